"""Elastic weight consolidation: a second task from some step on, with Fisher information of the first."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish

SWITCH = 7


class Task:
    def __init__(self, seed):
        chance = torch.Generator().manual_seed(seed)
        self.x = torch.randn(48, 5, generator=chance)
        self.y = (self.x @ torch.randn(5, generator=chance) > 0).long()
        self.fisher = {}
        self.means = {}

    def batch(self, number, rank):
        pick = torch.arange(8) + 8 * ((number * 3 + rank) % 6)
        return self.x[pick], self.y[pick]

    def consolidate(self, model):
        model.zero_grad()
        F.cross_entropy(model(self.x), self.y).backward()
        for name, p in model.named_parameters():
            self.fisher[name] = p.grad.detach().clone().pow(2)
            self.means[name] = p.detach().clone()
        model.zero_grad()

    def penalty(self, model):
        return sum((self.fisher[n] * (p - self.means[n]).pow(2)).sum() for n, p in model.named_parameters())


def main():
    job = relight.init()
    torch.manual_seed(102)
    first, second = Task(1), Task(2)
    net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 2))
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    training = relight.Training(model=model, optimizer=optimizer)
    current = first
    for step in training.steps(until=15):
        with step:
            inputs, labels = current.batch(step.number, job.rank)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            if first.fisher:
                loss = loss + 10 * first.penalty(net)
            loss.backward()
            optimizer.step()
            if step.number == SWITCH:
                first.consolidate(net)
                current = second
    finish(job, model=model, optimizer=optimizer, fisher=sorted(v.sum().item() for v in first.fisher.values()))


if __name__ == "__main__":
    main()
