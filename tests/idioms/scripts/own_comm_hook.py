"""A communication hook of the script: signs with an error that is kept for each bucket, scaled by a running norm."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class SignState:
    def __init__(self, group):
        self.group = group
        self.errors = {}
        self.norm = 1.0
        self.calls = 0


def sign_hook(state: SignState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    grad = bucket.buffer()
    error = state.errors.get(bucket.index())
    corrected = grad if error is None else grad + error
    scale = corrected.abs().mean()
    signs = corrected.sign() * scale
    state.errors[bucket.index()] = corrected - signs
    state.calls += 1
    if bucket.is_last():
        state.norm = 0.9 * state.norm + 0.1 * float(signs.norm())
    work = dist.all_reduce(signs, group=state.group, async_op=True)

    def average(future):
        out = future.value()[0].div_(dist.get_world_size())
        bucket.buffer().copy_(out)
        return bucket.buffer()

    return work.get_future().then(average)


def main():
    job = relight.init()
    torch.manual_seed(30)
    model = DDP(nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3)))
    state = SignState(dist.group.WORLD)
    model.register_comm_hook(state, sign_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6)).steps(until=16):
        with step as x:
            optimizer.zero_grad()
            (model(x) - x[:, :3].sin()).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
