"""GradNorm: weights of two tasks are parameters of an optimizer of their own, renormalized after each step."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(104)
    x = torch.randn(60, 6)
    data = TensorDataset(x, x[:, :1] * 3, (x[:, 1] > 0).float()[:, None])
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, job.world_size, job.rank))
    trunk = nn.Linear(6, 16)
    net = nn.ModuleDict({"trunk": trunk, "a": nn.Linear(16, 1), "b": nn.Linear(16, 1)})

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = net

        def forward(self, x):
            h = self.parts["trunk"](x).relu()
            return self.parts["a"](h), self.parts["b"](h)

    model = DDP(Both())
    weights = nn.Parameter(torch.ones(2))
    balance = nn.ParameterList([weights])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    tuner = torch.optim.SGD([weights], lr=0.02)
    training = relight.Training(
        model={"model": model, "balance": balance}, optimizer={"main": optimizer, "tuner": tuner}, data=loader
    )
    initial = None
    for step in training.steps(until=15):
        with step as (inputs, a, b):
            left, right = model(inputs)
            losses = torch.stack([F.mse_loss(left, a), F.binary_cross_entropy_with_logits(right, b)])
            if initial is None:
                initial = losses.detach()
            optimizer.zero_grad()
            (weights.detach() * losses).sum().backward(retain_graph=True)
            norms = torch.stack(
                [
                    weights[i] * torch.autograd.grad(losses[i], trunk.weight, retain_graph=True)[0].norm()
                    for i in range(2)
                ]
            )
            ratio = (losses.detach() / initial) / (losses.detach() / initial).mean()
            tuner.zero_grad()
            weights.grad = torch.autograd.grad((norms - (norms.mean() * ratio).detach()).abs().sum(), weights)[0]
            torch.distributed.all_reduce(weights.grad)
            tuner.step()
            with torch.no_grad():
                weights.mul_(2 / weights.sum())
            optimizer.step()
    finish(job, model=model, weights=weights, optimizer=optimizer, initial_shape=tuple(initial.shape))


if __name__ == "__main__":
    main()
