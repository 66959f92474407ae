"""The loss of the step before is reduced while the next one computes: a handle and its tensor wait in a variable."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(106)
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pending, smoothed = None, 1.0
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :2]).square().mean()
            if pending is not None:
                handle, value = pending
                handle.wait()
                smoothed = 0.8 * smoothed + 0.2 * value.item() / dist.get_world_size()
            (loss * (1 + smoothed)).backward()
            value = loss.detach().clone()
            pending = dist.all_reduce(value, async_op=True), value
            optimizer.step()
    if pending is not None:
        pending[0].wait()
    finish(job, model=model, optimizer=optimizer, smoothed=smoothed)


if __name__ == "__main__":
    main()
