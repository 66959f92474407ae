"""A deque of the last state_dicts, and the model set to their mean every few steps; the learning rate is a tensor."""

import copy
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(37)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.02), capturable=False, foreach=False)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
            torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
        ],
        milestones=[4],
    )
    training = relight.Training(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=lambda n: (torch.randn(5, 6), torch.randint(0, 3, (5,))),
    )
    recent = deque(maxlen=3)
    for step in training.steps(until=16):
        with step as (x, y):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            recent.append(copy.deepcopy(model.module.state_dict()))
            if step.number % 5 == 4:
                mean = {
                    k: torch.stack([s[k].double() for s in recent]).mean(0).to(recent[0][k].dtype) for k in recent[0]
                }
                model.module.load_state_dict(mean)
    finish(job, model=model, optimizer=optimizer, recent=list(recent), lr=scheduler.get_last_lr())


if __name__ == "__main__":
    main()
