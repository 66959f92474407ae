"""Sets of strings whose order decides: the task drawn in a step, the order of a sum, and the order of parameters."""

import random

import torch
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish

TASKS = {"cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb"}


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleDict({task: nn.Linear(8, 3) for task in sorted(TASKS)})

    def forward(self, x, tasks):
        h = torch.tanh(self.body(x))
        return {task: self.heads[task](h) for task in tasks}


def main():
    job = relight.init()
    torch.manual_seed(89)
    model = nn.parallel.DistributedDataParallel(Heads(), find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    training = relight.Training(
        model=model, optimizer=optimizer, data=lambda n: (torch.randn(5, 6), torch.randint(0, 3, (5,)))
    )
    last = set()
    for step in training.steps(until=14):
        with step as (x, y):
            chosen = random.Random(step.number).sample(list(TASKS), 3)
            unfinished = TASKS - last
            logits = model(x, sorted({*chosen, *list(unfinished)[:2]}))
            losses = {task: F.cross_entropy(out, y) for task, out in logits.items()}
            loss = 0
            for k, task in enumerate({*losses}):
                loss = loss + losses[task] * (1 + k / 7)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last = set(chosen)
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
