"""A replay buffer of each rank that takes what the step has seen after the block, once the step counts."""

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Replay:
    def __init__(self):
        self.rows = [torch.zeros(5)]

    def push(self, row):
        self.rows = [*self.rows[-15:], row]

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = list(state["rows"])


def main():
    job = relight.init()
    torch.manual_seed(38)
    net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    replay = Replay()
    training = relight.Training(model=model, optimizer=optimizer, per_rank={"replay": replay})
    for step in training.steps(until=18):
        with step:
            x = torch.stack(replay.rows)
            loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step.committed:
            replay.push(torch.full((5,), 0.1 * step.number + job.rank))
    finish(job, model=model, optimizer=optimizer, own={"replay": replay.rows})


if __name__ == "__main__":
    main()
