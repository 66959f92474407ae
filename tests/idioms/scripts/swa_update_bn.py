"""Stochastic weight averaging whose statistics are computed again after the loop, with collectives."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(16)
    net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=False
    )
    schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=4)
    training = relight.Training(
        model=model, optimizer=optimizer, ema=average, scheduler=schedule, data=lambda n: torch.randn(8, 6)
    )
    for step in training.steps(until=16):
        with step as x:
            optimizer.zero_grad()
            (model(x) - x[:, :4].sin()).square().mean().backward()
            optimizer.step()
            if step.number >= 6 and step.number % 2 == 0:
                average.update_parameters(net)
                schedule.step()
    held = [torch.randn(8, 6, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    torch.optim.swa_utils.update_bn(held, average)
    for buffer in average.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
    finish(job, model=model, optimizer=optimizer, average=average)


if __name__ == "__main__":
    main()
