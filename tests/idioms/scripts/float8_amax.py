"""Delayed scaling: a history of largest values per layer, rolled in place, reduced over ranks in forward."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Fp8Linear(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("amax_history", torch.zeros(4), persistent=False)
        self.register_buffer("scale", torch.ones(()))
        self.fp8_meta = {"updates": 0, "recipe": "delayed"}

    def forward(self, x):
        if self.training:
            amax = x.detach().abs().max()
            dist.all_reduce(amax, op=dist.ReduceOp.MAX)
            self.amax_history.copy_(torch.roll(self.amax_history, -1, 0))
            self.amax_history[0] = amax
            self.scale = 448.0 / self.amax_history.max().clamp(min=1e-6)
            self.fp8_meta["updates"] += 1
        q = (x * self.scale).to(torch.float8_e4m3fn).to(x.dtype) / self.scale
        return nn.functional.linear(x + (q - x).detach(), self.weight, self.bias)


def main():
    job = relight.init()
    torch.manual_seed(100)
    net = nn.Sequential(Fp8Linear(6, 12), nn.ReLU(), Fp8Linear(12, 2))
    model = DDP(net, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6))
    for step in training.steps(until=15):
        with step as x:
            optimizer.zero_grad()
            (model(x) - x[:, :2]).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, updates=[m.fp8_meta["updates"] for m in (net[0], net[2])])


if __name__ == "__main__":
    main()
