"""Rank 0 alone validates, keeps the best, drops the learning rate, and tells the others with broadcast_object_list."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Validator:
    def __init__(self, patience):
        self.best, self.bad, self.patience = float("inf"), 0, patience
        self.best_state = None
        self.x = torch.linspace(-1, 1, 60).view(10, 6)

    @torch.no_grad()
    def __call__(self, net):
        net.eval()
        loss = (net(self.x) - self.x[:, :1]).square().mean().item()
        net.train()
        if loss < self.best * 0.98:
            self.best, self.bad = loss, 0
            self.best_state = copy.deepcopy(net.state_dict())
        else:
            self.bad += 1
        return self.bad >= self.patience


def main():
    job = relight.init()
    torch.manual_seed(21)
    net = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.1), nn.ReLU(), nn.Linear(12, 1))
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    validator = Validator(2)
    drops = 0
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=18):
        with step as x:
            if step.number and step.number % 3 == 0:
                verdict = [validator(net) if dist.get_rank() == 0 else None]
                dist.broadcast_object_list(verdict, src=0)
                if verdict[0]:
                    drops += 1
                    validator.bad = 0
                    for group in optimizer.param_groups:
                        group["lr"] *= 0.5
            optimizer.zero_grad()
            (model(x) - x[:, :1]).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, drops=drops, best=validator.best)


if __name__ == "__main__":
    main()
