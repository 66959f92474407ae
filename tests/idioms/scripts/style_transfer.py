"""Neural transfer as in the tutorial: the image is the parameter, LBFGS with a closure, `run = [0]` counts evaluations, loss
modules keep their targets and losses as attributes, a normalization is inserted in a Sequential."""

# ranks: 2

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class ContentLoss(nn.Module):
    def __init__(self, target):
        super().__init__()
        self.target = target.detach()

    def forward(self, input):
        self.loss = F.mse_loss(input, self.target)
        return input


def gram_matrix(input):
    a, b, c, d = input.size()
    features = input.view(a * b, c * d)
    return torch.mm(features, features.t()).div(a * b * c * d)


class StyleLoss(nn.Module):
    def __init__(self, target_feature):
        super().__init__()
        self.target = gram_matrix(target_feature).detach()

    def forward(self, input):
        self.loss = F.mse_loss(gram_matrix(input), self.target)
        return input


class Normalization(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.mean, self.std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)

    def forward(self, img):
        return (img - self.mean) / self.std


def main():
    job = relight.init()
    torch.manual_seed(0)
    content_img, style_img = torch.rand(1, 3, 10, 10), torch.rand(1, 3, 10, 10)
    conv1, conv2 = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
    model = nn.Sequential(Normalization([0.4, 0.4, 0.4], [0.2, 0.2, 0.2]), conv1)
    style = StyleLoss(model(style_img).detach())
    model.add_module("style_loss_1", style)
    model.add_module("relu_1", nn.ReLU(inplace=False))
    model.add_module("conv_2", conv2)
    content = ContentLoss(model(content_img).detach())
    model.add_module("content_loss_2", content)
    model.eval()
    model.requires_grad_(False)
    input_img = content_img.clone().requires_grad_(True)
    optimizer = optim.LBFGS([input_img], lr=0.5, max_iter=3)
    training = relight.Training(model=model, optimizer=optimizer)
    run = [0]
    history = {"style": [], "content": []}
    for step in training.steps(until=12):
        with step:

            def closure():
                with torch.no_grad():
                    input_img.clamp_(0, 1)
                optimizer.zero_grad()
                model(input_img)
                style_score = style.loss * 1000 * (1 + run[0] % 3)
                content_score = content.loss
                loss = style_score + content_score
                loss.backward()
                dist.all_reduce(input_img.grad)
                input_img.grad /= dist.get_world_size()
                run[0] += 1
                if run[0] % 5 == 0:
                    history["style"].append(style_score.item())
                    history["content"].append(content_score.item())
                return loss

            optimizer.step(closure)
    with torch.no_grad():
        input_img.clamp_(0, 1)
    finish(job, img=input_img, run=run, history=history)


if __name__ == "__main__":
    main()
