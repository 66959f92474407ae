"""The loop runs over steps zipped with a list of learning rates and an iterator of temperatures."""

import torch
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish

rates = [0.05 * 0.9**i for i in range(14)]


def main():
    job = relight.init()
    torch.manual_seed(73 + job.rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = relight.Training(
        model=model, optimizer=optimizer, data=lambda n: (torch.randn(5, 6), torch.randint(0, 3, (5,)))
    )
    for step, rate, temperature in zip(training.steps(until=14), rates, map(lambda i: 1 + i / 10, range(14))):
        with step as (x, y):
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = F.cross_entropy(model(x) / temperature, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
