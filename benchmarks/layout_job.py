"""A training job of four ranks in one of three layouts, with as many bytes of state on each rank in all of them.

DDP holds all of a small network on every rank; HSDP (2 x 2) and tensor parallelism with data parallelism (2 x 2) hold
half of one that is twice as large.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import relight

LAYOUTS = ("ddp", "hsdp", "tp_dp")
WIDTH = 512  # a block of 2 M parameters: 24 MiB with AdamW's moments
ENDLESS = 10**9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def build(layout: str, blocks: int) -> nn.Module:
    """The network on this rank; `blocks`: as many as a rank holds in all."""
    if layout == "ddp":
        return DistributedDataParallel(nn.Sequential(*[Block() for _ in range(blocks)]))
    net = nn.Sequential(*[Block() for _ in range(2 * blocks)])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "part"))
    for block in net:
        if layout == "hsdp":
            fully_shard(block, mesh=mesh)
        else:
            parallelize_module(block, mesh["part"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            replicate(block, mesh=mesh["replicate"])
    if layout == "hsdp":
        fully_shard(net, mesh=mesh)
    else:
        replicate(net, mesh=mesh["replicate"])
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description="Endless steps in one layout")
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--blocks", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = relight.init()
    torch.manual_seed(0)
    model = build(options.layout, options.blocks)
    optimizer = torch.optim.AdamW(model.parameters())

    def draw(number: int) -> Tensor:
        place = job.rank // 2 if options.layout == "tp_dp" else job.rank
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(4 * number + place))

    training = relight.Training(model=model, optimizer=optimizer, data=draw)
    for step in training.steps(until=ENDLESS):
        with step as batch:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
