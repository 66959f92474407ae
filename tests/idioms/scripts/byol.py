"""BYOL: a target network whose momentum follows a cosine, predictor and projector, statistics in a dataclass."""

import copy
import dataclasses
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


@dataclasses.dataclass
class Meter:
    total: float = 0.0
    seen: int = 0
    history: list = dataclasses.field(default_factory=list)

    def add(self, value):
        self.total += value
        self.seen += 1
        self.history.append(round(value, 4))
        del self.history[:-3]

    @property
    def mean(self):
        return self.total / max(1, self.seen)


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.predictor = nn.Linear(8, 8)
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False

    def forward(self, one, two):
        with torch.no_grad():
            goal_one, goal_two = self.target(one), self.target(two)
        loss = -F.cosine_similarity(self.predictor(self.online(one)), goal_two).mean()
        return loss - F.cosine_similarity(self.predictor(self.online(two)), goal_one).mean()

    @torch.no_grad()
    def follow(self, tau):
        for slow, fast in zip(self.target.parameters(), self.online.parameters()):
            slow.data = slow.data * tau + fast.data * (1 - tau)


def main():
    job = relight.init()
    torch.manual_seed(110)
    data = TensorDataset(torch.randn(60, 6))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, job.world_size, job.rank))
    learner = Learner()
    model = DDP(learner)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    meter, tau = Meter(), 0.9
    for step in training.steps(until=15):
        with step as (inputs,):
            loss = model(inputs + 0.1 * torch.randn_like(inputs), inputs + 0.1 * torch.randn_like(inputs))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            learner.follow(tau)
            tau = 1 - 0.1 * (math.cos(math.pi * step.number / 15) + 1) / 2
            meter.add(loss.item())
            if meter.mean > 0:
                optimizer.param_groups[0]["lr"] *= 0.99
    finish(job, model=model, optimizer=optimizer, tau=tau, seen=meter.seen, history=meter.history)


if __name__ == "__main__":
    main()
