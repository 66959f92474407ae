"""Gradients are compressed by PowerSGD: the hook's state keeps errors, bases and a counter on each rank."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4)))
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=4, min_compression_rate=0.5
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 12))
    for step in training.steps(until=16):
        with step as x:
            optimizer.zero_grad()
            (model(x) - x[:, :4].sin()).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
