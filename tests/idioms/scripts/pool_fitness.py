"""Candidates are judged in a pool of processes in each step; the best step is taken."""

# ranks: 2
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


def fitness(task):
    seed, weights = task
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 4, generator=generator)
    return -(x @ torch.tensor(weights).view(4, 2) - x[:, :2].sin()).square().mean().item()


def main():
    job = relight.init()
    torch.manual_seed(12)
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    pool = get_context("spawn").Pool(2)
    training = relight.Training(model=model, optimizer=optimizer)
    sigma = 0.3
    for step in training.steps(until=8):
        with step:
            noise = torch.randn(4, *model.weight.shape)
            tasks = [(step.number, (model.weight.detach() + sigma * n).t().reshape(-1).tolist()) for n in noise]
            scores = torch.tensor(pool.map(fitness, tasks))
            grad = -(noise * (scores - scores.mean()).view(-1, 1, 1)).mean(0) / sigma
            dist.all_reduce(grad)
            model.weight.grad = grad
            sigma *= 0.95 if scores.std() < 0.5 else 1.02
            optimizer.step()
    pool.close()
    finish(job, model=model, optimizer=optimizer, sigma=sigma)


if __name__ == "__main__":
    main()
