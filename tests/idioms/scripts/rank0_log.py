"""Only rank 0 keeps a log of losses, a best value and an event list, after its update; others keep none."""

# ranks: 2
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(37)
    net = DDP(nn.Linear(5, 1))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    training = relight.Training(model=net, optimizer=opt, data=lambda n: torch.randn(6, 5))
    rows, peaks = [], 0
    for step in training.steps(until=14):
        with step as x:
            opt.zero_grad()
            loss = F.mse_loss(net(x), x.sum(1, keepdim=True))
            loss.backward()
            opt.step()
            if job.rank == 0 and step.number in (4, 7, 10):
                rows.append(json.dumps({"step": step.number, "loss": loss.item()}))
                peaks += loss.item() > 1
    finish(job, net=net, opt=opt, rows=rows, peaks=peaks)


if __name__ == "__main__":
    main()
