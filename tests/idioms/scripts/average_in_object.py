"""An average in an object whose state is a module with BatchNorm, and plain values; the schedule asks for one of them."""

# ranks: 2
import copy
import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class ModelEma:
    def __init__(self, model, decay=0.9):
        self.module = copy.deepcopy(model).eval()
        self.decay, self.updates, self.distances = decay, 0, []

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        if self.updates % 2:
            return
        decay = self.decay * (1 - math.exp(-self.updates / 4))
        moved = 0.0
        for mine, its in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            moved += (mine - its).float().norm().item()
            if mine.is_floating_point():
                mine.mul_(decay).add_(its, alpha=1 - decay)
        self.distances.append(round(moved, 6))

    def state_dict(self):
        return {"weights": self.module.state_dict(), "updates": self.updates}

    def load_state_dict(self, state):
        self.module.load_state_dict(state["weights"])
        self.updates = state["updates"]


def main():
    job = relight.init()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ema = ModelEma(model.module)
    training = relight.Training(model=model, optimizer=optimizer, ema=ema, data=lambda number: torch.randn(8, 6))
    for step in training.steps(until=14):
        with step as x:
            loss = (model(x) - x[:, :1].sin()).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            ema.update(model.module)
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, ema=ema.module, updates=ema.updates, distances=ema.distances)


if __name__ == "__main__":
    main()
