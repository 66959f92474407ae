"""FAMO: task weights with an Adam of their own as an attribute, updated after the write by the losses computed again;
dynamic weight average in arrays by epoch beside it."""

# ranks: 2
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class FAMO:
    def __init__(self, n_tasks, gamma=0.01, w_lr=0.025, max_norm=1.0):
        self.min_losses = torch.zeros(n_tasks)
        self.w = torch.tensor([0.0] * n_tasks, requires_grad=True)
        self.w_opt = torch.optim.Adam([self.w], lr=w_lr, weight_decay=gamma)
        self.max_norm, self.n_tasks, self.prev_loss = max_norm, n_tasks, None

    def set_min_losses(self, losses):
        self.min_losses = losses

    def get_weighted_loss(self, losses):
        self.prev_loss = losses
        z = torch.softmax(self.w, -1)
        D = losses - self.min_losses + 1e-8
        c = (z / D).sum().detach()
        return (D.log() * z / c).sum()

    def update(self, curr_loss):
        delta = (self.prev_loss - self.min_losses + 1e-8).log() - (curr_loss - self.min_losses + 1e-8).log()
        with torch.enable_grad():
            d = torch.autograd.grad(torch.softmax(self.w, -1), self.w, grad_outputs=delta.detach())[0]
        dist.all_reduce(d)
        self.w_opt.zero_grad()
        self.w.grad = d / dist.get_world_size()
        self.w_opt.step()

    def backward(self, losses, shared_parameters):
        loss = self.get_weighted_loss(losses)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(shared_parameters, self.max_norm)
        return loss


class MTL(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.heads = nn.Linear(6, 16), nn.ModuleList([nn.Linear(16, 1) for _ in range(3)])

    def forward(self, x):
        h = torch.relu(self.shared(x))
        return [head(h).squeeze(1) for head in self.heads]


def task_losses(preds, x):
    targets = (x.sum(1), x.square().mean(1), x.prod(1))
    return torch.stack([nn.functional.mse_loss(p, t) + 1e-3 for p, t in zip(preds, targets)])


def main(epochs=4, per_epoch=6, temperature=2.0):
    job = relight.init()
    torch.manual_seed(0)
    net = MTL()
    model = DDP(net)
    weight_method = FAMO(3)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    training = relight.Training(
        model=model, optimizer={"model": optimizer, "weights": weight_method.w_opt}, data=lambda n: torch.randn(12, 6)
    )
    avg_cost = np.zeros([epochs, 3], dtype=np.float32)
    lambda_weight = np.ones([3, epochs])
    for step in training.steps(until=epochs * per_epoch):
        index, k = divmod(step.number, per_epoch)
        with step as x:
            if k == 0:
                cost = np.zeros(3, dtype=np.float32)
                if index > 1:
                    w = avg_cost[index - 1] / avg_cost[index - 2]
                    lambda_weight[:, index] = 3 * np.exp(w / temperature) / np.exp(w / temperature).sum()
            optimizer.zero_grad()
            losses = task_losses(model(x), x)
            scaled = losses * torch.tensor(lambda_weight[:, index], dtype=torch.float32)
            weight_method.backward(scaled, list(net.shared.parameters()))
            optimizer.step()
            with torch.no_grad():
                weight_method.update(task_losses(net(x), x))
            shared = losses.detach().clone()
            dist.all_reduce(shared)
            cost += shared.numpy()
            avg_cost[index] += cost / per_epoch
    finish(
        job,
        model=net,
        optimizer=optimizer,
        w=weight_method.w,
        w_opt=weight_method.w_opt,
        avg=avg_cost,
        lam=lambda_weight,
    )


if __name__ == "__main__":
    main()
