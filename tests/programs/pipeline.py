"""A small training script whose stages are on different ranks, in one of several layouts. Run under `relight run`."""

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import relight
from tests.programs.divided import Block, PlainJob, save, whole_tensors

MICROBATCHES = 4
# By layout: the mesh of four ranks, or of eight.
MESHES = {
    "replicate": (("pp", 2), ("dp", 2)),
    "ddp": (("pp", 2), ("dp", 2)),
    "fsdp": (("pp", 2), ("dp", 2)),
    "none": (("pp", 4),),
    "tp": (("pp", 2), ("dp", 2), ("tp", 2)),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="replicate", choices=list(MESHES))
    parser.add_argument("--schedule", default="1f1b", choices=["gpipe", "1f1b", "interleaved"])
    parser.add_argument("--plain", action="store_true", help="without relight, under torchrun")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--batchnorm", action="store_true")
    parser.add_argument("--scheduler", action="store_true")
    parser.add_argument("--static", action="store_true", help="tell torch what the stages send each other")
    parser.add_argument("--early", action="store_true", help="have standbys build before they know their rank")
    parser.add_argument("--loader", action="store_true", help="read a DataLoader")
    parser.add_argument("--hide", action="store_true", help="do not hand the schedule over")
    parser.add_argument("--buddy", type=int, default=0, help="steps from one snapshot in buddy memory to the next")
    parser.add_argument("--publish", type=int, default=0, metavar="K", help="the weights after every K steps")
    parser.add_argument("--same-names", action="store_true", help="publish stages under the names that they have")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds more for each step, until HOLD is there")
    parser.add_argument("--hold-at", type=int, default=-1, help="after this step, wait until the file HOLD is there")
    parser.add_argument("--hold", default="")
    parser.add_argument("--save", default="", help="write digests of what this rank ends with to SAVE.RANK")
    return parser.parse_args()


def build(index: int, stages: int, options: argparse.Namespace) -> nn.Sequential:
    """One stage: all of them are of different shapes."""
    torch.manual_seed(100 + index)
    width = options.width
    hidden = width + 16 * (index + 1)
    layers: list[nn.Module] = [nn.Linear(16, width)] if index == 0 else []
    if options.batchnorm:
        layers.append(nn.BatchNorm1d(width))
    layers += [Block(width, hidden, options.dropout), Block(width, hidden, options.dropout)]
    return nn.Sequential(*layers, *([nn.Linear(width, 3)] if index == stages - 1 else []))


def divide(module: nn.Sequential, layout: str, mesh: DeviceMesh) -> nn.Module:
    if layout == "ddp":
        return DistributedDataParallel(module, process_group=mesh.get_group("dp"))
    if layout == "tp":
        for block in module:
            if isinstance(block, Block):
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if layout in ("replicate", "tp"):
        replicate(module, mesh=mesh["dp"])
    elif layout == "fsdp":
        fully_shard(module, mesh=mesh["dp"])
    return module


def name_in_whole(module: str, name: str) -> str:
    return f"{module}.{name}"


def whole_weights(modules: dict[str, nn.Module]) -> str:
    """A digest of all stages' tensors, as engines compute it of what was published. All ranks together.

    Of each stage as its first rank holds it: BatchNorm's statistics differ between ranks.
    """
    own = {name_in_whole(key, n): t for key, module in modules.items() for n, t in whole_tensors(module).items()}
    gathered: list[dict[str, torch.Tensor] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    found: dict[str, torch.Tensor] = {}
    for tensors in reversed(gathered):
        assert tensors is not None
        found.update(tensors)
    return relight.digest_weights(found)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    job = PlainJob() if options.plain else relight.init(late_standby=False if options.early else None)
    dimensions = MESHES[options.layout]
    mesh = init_device_mesh(
        "cpu", tuple(n for _, n in dimensions), mesh_dim_names=tuple(name for name, _ in dimensions)
    )
    own, size = mesh.get_local_rank("pp"), mesh.size(0)
    interleaved = options.schedule == "interleaved"
    stages_in_all = size * 2 if interleaved else size
    indices = [own, own + size] if interleaved else [own]
    device = torch.device("cpu")
    group = mesh.get_group("pp")
    modules = {f"stage{i}": divide(build(i, stages_in_all, options), options.layout, mesh) for i in indices}
    batch_size = 8

    def static(index: int) -> dict[str, Any]:
        if not options.static:
            return {}
        piece = batch_size // MICROBATCHES
        ends = [torch.empty(piece, n, device="meta") for n in (16 if index == 0 else options.width, options.width)]
        if index == stages_in_all - 1:
            ends[1] = torch.empty(piece, 3, device="meta")
        return {
            "input_args": ends[0].requires_grad_(index > 0),
            "output_args": ends[1].requires_grad_(),
        }

    stages: list[Any] = [
        PipelineStage(module, i, stages_in_all, device, group=group, **static(i))
        for i, module in zip(indices, modules.values(), strict=True)
    ]
    schedule = (
        ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=F.cross_entropy)
        if interleaved
        else {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[options.schedule](
            stages[0], MICROBATCHES, loss_fn=F.cross_entropy
        )
    )
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.003)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps) if options.scheduler else None

    data = torch.randn(96, 16, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(0, 3, (96,), generator=torch.Generator().manual_seed(8))

    def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        place = mesh.get_local_rank("dp") if "dp" in (mesh.mesh_dim_names or ()) else 0
        chosen = torch.randint(0, 96, (batch_size,), generator=torch.Generator().manual_seed(1000 * number + place))
        return data[chosen], labels[chosen]

    dataset = torch.utils.data.TensorDataset(data, labels)
    replicas = mesh["dp"].size() if "dp" in (mesh.mesh_dim_names or ()) else 1
    place = mesh.get_local_rank("dp") if replicas > 1 else 0
    sampler: Any = torch.utils.data.DistributedSampler(dataset, replicas, place)
    loader = torch.utils.data.DataLoader(dataset, batch_size, sampler=sampler)

    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        if not os.path.exists(options.hold):
            time.sleep(options.pause)
        losses: list[torch.Tensor] = []
        inputs = (x,) if stages[0].is_first else ()
        if stages[-1].is_last:
            schedule.step(*inputs, target=y, losses=losses)
        else:
            schedule.step(*inputs)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if losses else None

    whole = nn.ModuleDict(modules)
    if options.plain:
        for number in range(options.steps):
            train(*batch_of(number))
        save(f"{options.save}.{job.rank}", whole, optimizer)
        dist.destroy_process_group()
        return

    training = relight.Training(
        model=modules,
        optimizer=optimizer,
        scheduler=scheduler,
        data=loader if options.loader else batch_of,
        pipeline=None if options.hide else schedule,
    )
    if options.buddy:
        training.buddy(every=options.buddy)
    if options.publish:
        training.publish(every=options.publish, rename=None if options.same_names else name_in_whole)
    for step in training.steps(until=options.steps):
        with step as batch:
            loss = train(*batch)
            if loss is not None:
                step.report(loss)
        while step.number == options.hold_at and not os.path.exists(options.hold):
            time.sleep(0.01)
    others = {"weights": whole_weights(modules)} if options.publish else {}
    if options.save:
        save(f"{options.save}.{job.rank}", whole, optimizer, **others)


if __name__ == "__main__":
    main()
