"""A loss with parameters of its own, in an optimizer of its own, with its gradient rescaled."""

# ranks: 2
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class CenterLoss(nn.Module):
    def __init__(self, classes, dim):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(classes, dim))

    def forward(self, x, y):
        return (x - self.centers[y]).square().sum(1).clamp(1e-12, 1e12).mean()


def main():
    job = relight.init()
    torch.manual_seed(53)
    features = nn.Sequential(nn.Linear(6, 10), nn.PReLU(), nn.Linear(10, 2))
    model = DDP(features)
    head = DDP(nn.Linear(2, 3))
    centers = DDP(CenterLoss(3, 2))
    opt_model = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.05, momentum=0.9)
    opt_center = torch.optim.SGD(centers.parameters(), 0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(opt_model, 4, 0.5)
    training = relight.Training(
        model={"features": model, "head": head, "centers": centers},
        optimizer={"model": opt_model, "center": opt_center},
        scheduler=scheduler,
        data=lambda n: torch.randn(9, 6),
    )
    alpha = 0.5
    for step in training.steps(until=14):
        with step as x:
            y = x[:, :3].argmax(1)
            f = model(x)
            loss = F.cross_entropy(head(f), y) + alpha * centers(f, y)
            opt_model.zero_grad()
            opt_center.zero_grad()
            loss.backward()
            opt_model.step()
            for param in centers.parameters():
                param.grad.data *= 1.0 / alpha
            opt_center.step()
            scheduler.step()
    finish(job, features=model, head=head, centers=centers, a=opt_model, b=opt_center)


if __name__ == "__main__":
    main()
