"""Best weights: copied when the evaluation is better, loaded after the loop, as in torch's tutorial on transfer learning.

Only code after the loop reads them, and most steps leave what an earlier one copied.
"""

import copy

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(15)
    x = torch.randn(96, 5)
    y = x @ torch.randn(5, 1) + 0.5 * torch.randn(96, 1)
    train, val = TensorDataset(x[:72], y[:72]), (x[72:], y[72:])
    loader = DataLoader(train, batch_size=6, sampler=DistributedSampler(train, job.world_size, job.rank))
    model = DDP(nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.08)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    best_model_wts = copy.deepcopy(model.state_dict())
    best_loss = float("inf")
    for step in training.steps(until=30):
        with step as (inputs, labels):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), labels).backward()
            optimizer.step()
        if step.committed and step.number % 4 == 3 and step.number < 20:
            with torch.no_grad():
                loss = nn.functional.mse_loss(model.module(val[0]), val[1]).item()
            if loss < best_loss:
                best_loss = loss
                best_model_wts = copy.deepcopy(model.state_dict())
    model.load_state_dict(best_model_wts)
    finish(job, model=model, best=best_loss)


if __name__ == "__main__":
    main()
