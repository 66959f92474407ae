"""Double Q-learning whose target network is a deep copy made anew every few steps."""

# ranks: 2
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(17)
    q = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.Adam(q.parameters(), 0.01)
    target = copy.deepcopy(q.module)
    training = relight.Training(
        model=q, optimizer=optimizer, data=lambda n: (torch.randn(8, 4), torch.randn(8, 4), torch.randn(8))
    )
    for step in training.steps(until=16):
        with step as (s, s2, r):
            if step.number % 5 == 4:
                target = copy.deepcopy(q.module)
            with torch.no_grad():
                best = q.module(s2).argmax(1, keepdim=True)
                goal = r + 0.9 * target(s2).gather(1, best).squeeze(1)
            optimizer.zero_grad()
            (q(s).max(1).values - goal).square().mean().backward()
            optimizer.step()
    finish(job, model=q, optimizer=optimizer, target=target)


if __name__ == "__main__":
    main()
