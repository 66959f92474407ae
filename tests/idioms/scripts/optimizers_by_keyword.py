"""Two optimizers by two keywords, of one model: the backbone's, and the head's with a schedule of its own."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model = DDP(net)
    optimizer = torch.optim.SGD(net[0].parameters(), 0.1, momentum=0.9)
    head_optimizer = torch.optim.Adam(net[2].parameters(), 0.05)
    head_schedule = torch.optim.lr_scheduler.ExponentialLR(head_optimizer, 0.9)
    training = relight.Training(
        model=model,
        optimizer=optimizer,
        head_optimizer=head_optimizer,
        head_schedule=head_schedule,
        data=lambda n: torch.randn(6, 4),
    )
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            head_optimizer.zero_grad()
            (model(x) - x[:, :2].sin()).square().mean().backward()
            optimizer.step()
            head_optimizer.step()
            head_schedule.step()
    finish(job, model=model, optimizer=optimizer, head=head_optimizer, schedule=head_schedule)


if __name__ == "__main__":
    main()
