"""BatchNorm in eval mode for the first steps (frozen statistics), then in training mode: buffers first change late."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

FREEZE_STEPS = 7


def set_bn_eval(module):
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        module.eval()


def main():
    job = relight.init()
    torch.manual_seed(50)
    model = DDP(
        nn.Sequential(
            nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 2)
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6) * 2 + 1)
    for step in training.steps(until=18):
        with step as x:
            model.train()
            if step.number < FREEZE_STEPS:
                model.apply(set_bn_eval)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), (x[:, 0] > 1).long()).backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
