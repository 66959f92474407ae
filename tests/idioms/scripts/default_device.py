"""torch.set_default_device, here to one that is not where the model is: what a library makes without naming a device lands
there."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

torch.set_default_device("meta")


def main():
    job = relight.init()
    torch.manual_seed(37)
    device = job.device
    layers = (
        nn.Linear(6, 16, device=device),
        nn.BatchNorm1d(16, device=device),
        nn.Dropout(0.1),
        nn.Linear(16, 1, device=device),
    )
    model = DDP(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6, device=device))
    running = torch.zeros(1, device=device)
    for step in training.steps(until=18):
        with step as x:
            loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            running = 0.9 * running + 0.1 * loss.detach()
            optimizer.zero_grad()
            (loss / (1 + running)).backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, running=running)


if __name__ == "__main__":
    main()
