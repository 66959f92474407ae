"""A learning-rate finder before training: some real steps with a growing rate, then model and optimizer are put back.

Writes, DDP's first backward passes and collectives before the loop begins.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class LRFinder:
    def __init__(self, model, optimizer, criterion):
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.model_state = copy.deepcopy(model.state_dict())
        self.optim_state = copy.deepcopy(optimizer.state_dict())
        self.history = {"lr": [], "loss": []}

    def range_test(self, batch, end_lr=1.0, num_iter=6):
        lr = 1e-3
        for _ in range(num_iter):
            x, y = batch()
            self.optimizer.param_groups[0]["lr"] = lr
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            loss = loss.detach()
            dist.all_reduce(loss)
            self.history["lr"].append(lr)
            self.history["loss"].append(loss.item())
            lr *= (end_lr / 1e-3) ** (1 / num_iter)

    def reset(self):
        self.model.load_state_dict(self.model_state)
        self.optimizer.load_state_dict(self.optim_state)

    def suggestion(self):
        losses = self.history["loss"]
        return self.history["lr"][min(range(len(losses)), key=losses.__getitem__)] / 3


def main():
    job = relight.init()
    torch.manual_seed(16)

    def get_batch(i=0):
        x = torch.randn(8, 6)
        return x, x.sum(1, keepdim=True).tanh()

    model = DDP(nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    finder = LRFinder(model, optimizer, nn.MSELoss())
    torch.manual_seed(1000)
    finder.range_test(get_batch)
    lr = finder.suggestion()
    finder.reset()
    for group in optimizer.param_groups:
        group["lr"] = lr
    training = relight.Training(model=model, optimizer=optimizer, data=get_batch)
    for step in training.steps(until=16):
        with step as (x, y):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, lr=lr)


if __name__ == "__main__":
    main()
