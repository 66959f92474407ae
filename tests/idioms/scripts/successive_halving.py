"""Several configurations train side by side; at each rung the worse half ends: results in a heap, counters, named tuples."""

# ranks: 2
import heapq
import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Config(NamedTuple):
    lr: float
    width: int
    name: str


class Trial:
    def __init__(self, config):
        self.config, self.alive, self.losses, self.resource = config, True, [], 0
        self.net = nn.Sequential(nn.Linear(5, config.width), nn.ReLU(), nn.Linear(config.width, 1))
        self.model = DDP(self.net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config.lr, momentum=0.9)

    def train(self, x, y):
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.resource += 1
        return loss.detach()


class Halving:
    def __init__(self, trials, rungs, eta=2):
        self.trials, self.rungs, self.eta = trials, dict(rungs), eta
        self.queue, self.ids, self.log = [], itertools.count(), {}

    def report(self, trial, loss):
        trial.losses.append(loss)
        heapq.heappush(self.queue, (sum(trial.losses[-3:]) / len(trial.losses[-3:]), next(self.ids), trial.config.name))

    def promote(self, number):
        if number not in self.rungs:
            self.queue.clear()
            return
        keep = {name for _, _, name in heapq.nsmallest(self.rungs[number], self.queue)}
        for trial in self.trials:
            if trial.alive and trial.config.name not in keep:
                trial.alive = False
            elif trial.alive:
                for group in trial.optimizer.param_groups:
                    group["lr"] *= 0.7
        self.log[number] = sorted(keep)
        self.queue = []


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(18)
    grid = [Config(lr, width, f"{lr}-{width}") for lr, width in itertools.product((0.01, 0.1), (4, 8))]
    trials = [Trial(config) for config in grid]
    search = Halving(trials, [(4, 2), (9, 1)])
    training = relight.Training(
        model={t.config.name: t.model for t in trials},
        optimizer={t.config.name: t.optimizer for t in trials},
        data=lambda n: torch.randn(8, 5),
    )
    for step in training.steps(until=16):
        with step as x:
            y = x.sin().sum(1, keepdim=True)
            for trial in trials:
                if not trial.alive:
                    continue
                loss = trial.train(x, y)
                dist.all_reduce(loss)
                search.report(trial, loss.item() / job.world_size)
            search.promote(step.number)
    finish(
        job,
        models=[t.model for t in trials],
        opts=[t.optimizer for t in trials],
        log=search.log,
        losses=[t.losses for t in trials],
        alive=[t.alive for t in trials],
        used=[t.resource for t in trials],
    )
