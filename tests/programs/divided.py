"""A small training script whose state is divided over ranks, in one of several layouts. Run under `relight run`."""

import argparse
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import relight
from tests.programs.train import digest


class PlainJob:
    """The job of a script without relight."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cpu")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--layout", default="hsdp", choices=["hsdp", "fsdp", "tp_dp", "tp_fsdp", "tp_hsdp", "zero_dp", "zero"]
    )
    parser.add_argument("--views", action="store_true", help="with ZeRO: parameters are views of a few buckets")
    parser.add_argument("--ema", action="store_true", help="average parameters")
    parser.add_argument("--plain", action="store_true", help="without relight, under torchrun")
    parser.add_argument("--late-standby", action="store_true", help="standbys build when they know their rank")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--batchnorm", action="store_true")
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--scheduler", action="store_true")
    parser.add_argument("--scaler", action="store_true", help="scale gradients, so much that some steps overflow")
    parser.add_argument("--mixed", action="store_true", help="compute in bfloat16, reduce in float32")
    parser.add_argument("--fused", action="store_true", help="a fused optimizer")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--evaluate", action="store_true", help="evaluate between steps, which gathers parameters")
    parser.add_argument("--buddy", type=int, default=0, help="steps from one snapshot in buddy memory to the next")
    parser.add_argument("--publish", type=int, default=0, metavar="K", help="the weights after every K steps")
    parser.add_argument("--embed", action="store_true", help="an embedding, and a head that is tied to it")
    parser.add_argument("--counters", action="store_true", help="buffers that are divided, and change in forward")
    parser.add_argument("--checkpoint", default="", help="keep checkpoints in this directory")
    parser.add_argument("--checkpoint-every", type=int, default=4)
    parser.add_argument("--tell", action="store_true", help="print each step that is committed")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds more for each step, until HOLD is there")
    parser.add_argument("--hold-at", type=int, default=-1, help="after this step, wait until the file HOLD is there")
    parser.add_argument("--hold", default="")
    parser.add_argument("--save", default="", help="write digests of what this rank ends with to SAVE.RANK")
    return parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return out


class CountingBlock(Block):
    """Sums up what each of its hidden units gives: other sums on every rank, since batches differ."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__(width, hidden, dropout)
        self.register_buffer("counter", torch.zeros(hidden))
        self.up.register_forward_hook(self._count)

    def divide_counter(self, mesh: DeviceMesh) -> None:
        """Each rank counts for the units that it has."""
        self.counter = distribute_tensor(self.get_buffer("counter"), mesh, [Shard(0)])

    def _count(self, _: nn.Module, inputs: object, out: torch.Tensor) -> None:
        del inputs
        if self.training:
            local(self.get_buffer("counter")).add_(local(out.detach()).sum(0))


class Net(nn.Module):
    def __init__(
        self, width: int, hidden: int, dropout: float, batchnorm: bool, embed: bool = False, counters: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(26, width) if embed else None
        self.head = nn.Linear(width, 26, bias=False) if embed else None
        if self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(1))  # fewer elements than there are ranks
        self.first = nn.Linear(16, width)
        self.statistics = nn.BatchNorm1d(width) if batchnorm else nn.Identity()
        kind = CountingBlock if counters else Block
        self.blocks = nn.ModuleList([kind(width, hidden, dropout) for _ in range(3)])
        self.last = nn.Linear(width, 3)  # fewer rows than some meshes have ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.statistics(self.first(x)) * self.scale
        if self.embedding is not None and self.head is not None:
            x = x + self.embedding(self.head(x).argmax(-1))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.last(x)
        return logits


def make_mesh(layout: str, world_size: int, kind: str) -> DeviceMesh:
    if layout == "hsdp":
        return init_device_mesh(kind, (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    if layout == "fsdp":
        return init_device_mesh(kind, (world_size,), mesh_dim_names=("shard",))
    if layout == "tp_hsdp":
        return init_device_mesh(kind, (2, world_size // 4, 2), mesh_dim_names=("replicate", "shard", "tp"))
    if layout == "zero":
        return init_device_mesh(kind, (1, world_size), mesh_dim_names=("dp", "zero"))
    return init_device_mesh(kind, (world_size // 2, 2), mesh_dim_names=("dp", layout.split("_", maxsplit=1)[0]))


def divide(net: Net, layout: str, mesh: DeviceMesh, mixed: MixedPrecisionPolicy) -> nn.Module:
    if layout.startswith("zero"):
        return DistributedDataParallel(net)
    if layout.startswith("tp"):
        for block in net.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if isinstance(block, CountingBlock):
                block.divide_counter(mesh["tp"])
    dimensions = {"tp_dp": ("dp",), "tp_fsdp": ("dp",), "tp_hsdp": ("replicate", "shard")}
    parts = mesh[dimensions[layout]] if layout in dimensions else mesh
    wrap = replicate if layout == "tp_dp" else fully_shard
    for block in net.blocks:
        wrap(block, mesh=parts, mp_policy=mixed)
    wrap(net, mesh=parts, mp_policy=mixed)
    return net


def clip(parameters: list[nn.Parameter], limit: float) -> None:
    """As torch's clip_grad_norm_, which refuses gradients on different meshes."""
    gradients: dict[DeviceMesh, list[torch.Tensor]] = {}
    for parameter in parameters:
        assert isinstance(parameter.grad, DTensor)
        gradients.setdefault(parameter.grad.device_mesh, []).append(parameter.grad)
    squares = 0.0
    for group in gradients.values():
        norm = nn.utils.get_total_norm(group)
        assert isinstance(norm, DTensor)
        squares += float(norm.full_tensor()) ** 2
    coefficient = min(1.0, limit / (squares**0.5 + 1e-6))
    for group in gradients.values():
        for gradient in group:
            gradient.mul_(coefficient)


def local(tensor: torch.Tensor) -> torch.Tensor:
    part: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def whole_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The result of `full_tensor`. All ranks that hold parts together."""
    named = {name.removeprefix("module."): tensor.detach() for name, tensor in model.state_dict().items()}
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in named.items()}


def whole_weights(model: nn.Module) -> str:
    """A digest of it, as engines compute it of what was published."""
    return relight.digest_weights(whole_tensors(model))


def save(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, **others: str) -> None:
    parts = {name: local(tensor) for name, tensor in model.state_dict().items()}
    own = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    states = [own.state[parameter] for parameter in model.parameters() if parameter in own.state]
    moments = [{name: local(tensor) for name, tensor in state.items()} for state in states]
    with open(path + ".part", "w") as file:
        json.dump({"model": digest(parts), "optimizer": digest(moments), **others}, file)
    os.replace(path + ".part", path)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    job = PlainJob() if options.plain else relight.init(late_standby=options.late_standby or None)
    torch.manual_seed(0)  # every rank divides the same model
    mesh = make_mesh(options.layout, job.world_size, job.device.type)
    # FSDP2 divides what does not divide evenly, torch's tensor parallelism does not.
    hidden = 2 * options.width + (not options.layout.startswith("tp"))
    net = Net(options.width, hidden, options.dropout, options.batchnorm, options.embed, options.counters)
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if options.mixed else MixedPrecisionPolicy()
    model = divide(net.to(job.device), options.layout, mesh, mixed)
    optimizer: torch.optim.Optimizer = (
        ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            process_group=mesh.get_group("zero"),
            parameters_as_bucket_view=options.views,
            lr=0.003,
        )
        if options.layout.startswith("zero")
        else torch.optim.AdamW(model.parameters(), lr=0.003, fused=options.fused or None)
    )
    extra: dict[str, Any] = {"ema": torch.optim.swa_utils.AveragedModel(model)} if options.ema else {}
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps) if options.scheduler else None

    scaler = torch.amp.GradScaler(job.device.type, init_scale=2.0**127, enabled=options.scaler)

    if options.scaler:
        extra["scaler"] = scaler

    data = torch.randn(96, 16, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(0, 3, (96,), generator=torch.Generator().manual_seed(8))

    def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        place = job.rank // 2 if options.layout.startswith("tp") else job.rank
        chosen = torch.randint(0, 96, (8,), generator=torch.Generator().manual_seed(1000 * number + place))
        return data[chosen].to(job.device), labels[chosen].to(job.device)

    def train(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        if not os.path.exists(options.hold):
            time.sleep(options.pause)
        loss = torch.zeros((), device=job.device)
        for index, (x, y) in enumerate(batches):
            if options.accumulate > 1:
                model.set_requires_gradient_sync(index == len(batches) - 1)  # type: ignore[operator]
            loss = F.cross_entropy(model(x), y) / len(batches)
            scaler.scale(loss).backward()
        if options.clip:
            scaler.unscale_(optimizer)
        if options.clip and options.layout.startswith("zero"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        elif options.clip:
            clip(list(model.parameters()), 0.5)
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        return loss

    if options.plain:
        for number in range(options.steps):
            train([batch_of(number)])
        save(f"{options.save}.{job.rank}", model, optimizer)
        dist.destroy_process_group()
        return

    training = relight.Training(
        model=model, optimizer=optimizer, scheduler=scheduler, data=batch_of, accumulate=options.accumulate, **extra
    )
    if options.checkpoint:
        training.checkpoint(options.checkpoint, every=options.checkpoint_every)
    if options.publish:
        training.publish(every=options.publish)
    if options.buddy:
        training.buddy(every=options.buddy)
    for step in training.steps(until=options.steps):
        with step as batch:
            step.report(train(batch if options.accumulate > 1 else [batch]))
        if options.tell and step.committed:
            print(f"committed {step.number}", flush=True)
        while step.number == options.hold_at and not os.path.exists(options.hold):
            time.sleep(0.01)
        if options.evaluate and step.committed and step.number % 2 == 1:
            model.eval()
            with torch.no_grad():
                model(data[:8].to(job.device))
            model.train()
    others = {"weights": whole_weights(model)} if options.publish else {}
    if options.save:
        save(f"{options.save}.{job.rank}", model, optimizer, **others)


if __name__ == "__main__":
    main()
