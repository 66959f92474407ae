"""An evolution strategy: perturbed copies are scored, scores are gathered, and weights written by hand."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish

SIGMA, RATE = 0.1, 0.05


def score(weights, x, y):
    return -F.mse_loss(torch.tanh(x @ weights[0]) @ weights[1], y)


def main():
    job = relight.init()
    torch.manual_seed(103)
    x = torch.randn(32, 4)
    y = x[:, :1] * x[:, 1:2]
    net = nn.ParameterList([nn.Parameter(torch.randn(4, 8) * 0.3), nn.Parameter(torch.randn(8, 1) * 0.3)])
    unused = torch.optim.SGD(net.parameters(), lr=RATE)
    training = relight.Training(model=net, optimizer=unused)
    baseline, best = None, -float("inf")
    for step in training.steps(until=14):
        with step, torch.no_grad():
            noise = [torch.randn_like(p) for p in net]
            mine = score([p + SIGMA * n for p, n in zip(net, noise)], x, y)
            mine = mine - score([p - SIGMA * n for p, n in zip(net, noise)], x, y)
            if baseline is not None:
                mine = mine - baseline
            gradient = [mine * n / (2 * SIGMA) for n in noise]
            for g in gradient:
                dist.all_reduce(g)
            for p, g in zip(net, gradient):
                p.add_(g / job.world_size, alpha=RATE)
            baseline = 0.1 * score(list(net), x, y) if baseline is None else 0.9 * baseline
            best = max(best, score(list(net), x, y).item())
    finish(job, model=net, best=best, baseline=baseline)


if __name__ == "__main__":
    main()
