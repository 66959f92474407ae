"""The loop lies in a coroutine, and batches are prepared by a task that runs while the model computes."""

import asyncio

import torch
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish


async def fetch(number, rank):
    source = torch.Generator().manual_seed(1000 * rank + number)
    await asyncio.sleep(0)
    return torch.randn(4, 6, generator=source), torch.randint(0, 3, (4,), generator=source)


async def train(job):
    torch.manual_seed(23)
    model = nn.parallel.DistributedDataParallel(nn.Linear(6, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    training = relight.Training(model=model, optimizer=optimizer)
    average, best = None, 1e9
    for step in training.steps(until=14):
        with step:
            x, y = await asyncio.create_task(fetch(step.number, job.rank))
            loss = F.cross_entropy(model(x), y)
            average = loss.detach() if average is None else 0.9 * average + 0.1 * loss.detach()
            optimizer.zero_grad()
            (loss / (1 + average)).backward()
            optimizer.step()
            best = min(best, float(average))
    return model, optimizer, average, best


def main():
    job = relight.init()
    model, optimizer, average, best = asyncio.run(train(job))
    finish(job, model=model, optimizer=optimizer, average=average, best=best)


if __name__ == "__main__":
    main()
