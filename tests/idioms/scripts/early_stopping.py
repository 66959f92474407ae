"""Early stopping: evaluation between steps, best loss and patience in plain Python, `break` when patience is over.

Variables of the script decide when training ends; each rank computes them from equal parameters.
"""

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model.module(x), y).item()
    model.train()
    return loss


def main():
    job = relight.init()
    torch.manual_seed(15)
    x = torch.randn(96, 5)
    y = x @ torch.randn(5, 1) + 0.5 * torch.randn(96, 1)
    train, val = TensorDataset(x[:72], y[:72]), (x[72:], y[72:])
    loader = DataLoader(train, batch_size=6, sampler=DistributedSampler(train, job.world_size, job.rank))
    model = DDP(nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.08)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)

    best_loss, patience, trigger_times = float("inf"), 3, 0
    for step in training.steps(until=60):
        with step as (inputs, labels):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), labels).backward()
            optimizer.step()
        if not step.committed or (step.number + 1) % 3:
            continue
        current_loss = evaluate(model, *val)
        if current_loss > best_loss:
            trigger_times += 1
            if trigger_times >= patience:
                break
        else:
            trigger_times = 0
            best_loss = current_loss
    finish(job, model=model, optimizer=optimizer, best=best_loss, times=trigger_times, stopped_at=step.number)


if __name__ == "__main__":
    main()
