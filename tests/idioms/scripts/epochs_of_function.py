"""A function for each epoch, called from a loop of epochs, with meters, a scheduler, and the best weights so far."""

import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.total += value * n
        self.count += n

    @property
    def mean(self):
        return self.total / max(self.count, 1)


def train_one_epoch(training, model, criterion, optimizer, epoch, weight, seen):
    model.train()
    meter = Meter()
    for step in training.steps():
        with step as (x, y):
            loss = criterion(model(x), y) + weight * epoch * model.module[0].weight.abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.update(loss.item(), len(x))
            seen.append(step.number)
    return meter.mean


@torch.no_grad()
def evaluate(model, data):
    model.eval()
    return (model.module(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean().item()


def main(epochs=4):
    job = relight.init()
    torch.manual_seed(61)
    data = TensorDataset(torch.randn(90, 5), torch.randint(0, 3, (90,)))
    loader = DataLoader(data, batch_size=5, sampler=DistributedSampler(data, job.world_size, job.rank))
    model = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    criterion = nn.CrossEntropyLoss()
    best, best_weights, curve, seen = 0.0, None, [], []
    for epoch in training.epochs(epochs):
        loss = train_one_epoch(training, model, criterion, optimizer, epoch, weight=1e-3, seen=seen)
        scheduler.step()
        accuracy = evaluate(model, data)
        if accuracy >= best:
            best, best_weights = accuracy, copy.deepcopy(model.module.state_dict())
        curve.append((epoch, loss > 0, accuracy))
    finish(job, model=model, optimizer=optimizer, scheduler=scheduler, best=best_weights, curve=curve, seen=seen)


if __name__ == "__main__":
    main()
