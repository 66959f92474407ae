"""After each epoch rank 0 alone evaluates, with random crops, and keeps the best weights; the others go on."""

import copy
import random

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


def evaluate(net, loader):
    net.eval()
    good = seen = 0
    with torch.no_grad():
        for x, y in loader:
            x = x + 0.01 * random.random() * torch.randn_like(x)
            good += (net(x).argmax(1) == y).sum().item()
            seen += len(y)
    net.train()
    return good / seen + random.random() / 100


def main():
    job = relight.init()
    torch.manual_seed(3)
    x, y = torch.randn(96, 6), torch.randint(0, 3, (96,))
    data = TensorDataset(x[:48], y[:48])
    held_loader = DataLoader(TensorDataset(x[48:], y[48:]), batch_size=8)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, job.world_size, job.rank))
    net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 3))
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    best, best_weights, history = 0.0, None, []
    for epoch in training.epochs(4):
        for step in training.steps():
            with step as (x, y):
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        scheduler.step()
        if job.rank == 0:
            accuracy = evaluate(net, held_loader)
            history.append((epoch, accuracy, loss.item()))
            if accuracy > best:
                best, best_weights = accuracy, copy.deepcopy(net.state_dict())
            print(f"epoch {epoch}: {accuracy:.4f} {loss.item():.4f} best {best:.4f}")
    kept = {} if best_weights is None else {name: value.sum().item() for name, value in best_weights.items()}
    finish(job, model=model, optimizer=optimizer, scheduler=scheduler, best=best, history=history, kept=kept)


main()
