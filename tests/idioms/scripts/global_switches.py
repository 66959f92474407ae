"""Evaluation that switches gradients, the default dtype and autocast off and on by calls, with collectives between."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish


def evaluate(model, held_out):
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_autocast_enabled("cpu", True)
    threads = torch.get_num_threads()
    total = torch.zeros(())
    for x, y in held_out:
        total += F.cross_entropy(model(x).double(), y)
        dist.all_reduce(total)
    torch.set_num_threads(threads)
    torch.set_autocast_enabled("cpu", False)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    return total.item()


def main():
    job = relight.init()
    torch.manual_seed(59 + job.rank)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    source = torch.Generator().manual_seed(1)
    held_out = [(torch.randn(5, 6, generator=source), torch.randint(0, 3, (5,), generator=source)) for _ in range(3)]
    training = relight.Training(
        model=model, optimizer=optimizer, data=lambda n: (torch.randn(5, 6), torch.randint(0, 3, (5,)))
    )
    score = 1.0
    for step in training.steps(until=14):
        with step as (x, y):
            if step.number % 2 == 0:
                score = evaluate(model.module, held_out)
            noise = torch.rand(5, 1)
            loss = F.cross_entropy(model(x + 0.1 * noise), y) / (1 + score)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, score=score)


if __name__ == "__main__":
    main()
