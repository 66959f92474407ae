"""A script with several DDP wrappers, each used in steps of its own; with --plain under torchrun, without relight."""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.programs.train import digest

WIDTH = 24


class PlainJob:
    """The job of a script without relight."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()


def make(seed: int, **options: Any) -> DDP:
    """Several buckets, that DDP rebuilds in another order than its first: the last layer is the first one's input."""
    torch.manual_seed(seed)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
    return DDP(nn.Sequential(*reversed(list(net))), bucket_cap_mb=0.003, **options)


def passes(step: int) -> dict[str, int]:
    """Return the number of forward and backward passes that each wrapper has in a step."""
    return {
        "often": 2,  # also in the first step: DDP rebuilds in its middle
        "odd": step % 2,
        "rare": int(step % 4 == 3),
        "maker": 0,  # trained against each other
        "judge": 0,
        "even": 1 - step % 2,  # planned faults strike in the middle of all parameters
        "late": int(step >= 4),
        "gathered": 3 * int(step >= 2),  # with no_sync but for the last one
        "unused": int(step >= 1),
        "static": int(step >= 2),
        "never": 0,
    }


def train_against(maker: DDP, judge: DDP, step: int, rank: int) -> None:
    """As people train generators: the judge is frozen while the maker learns from it. In DDP it stays trainable."""
    batch = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1000 * step + 999 - rank))
    judge.requires_grad_(False)
    judge(maker(batch)).square().mean().backward()
    judge.requires_grad_(True)
    judge(maker(batch).detach()).mean().backward()


def train_step(models: dict[str, DDP], step: int, rank: int) -> None:
    train_against(models["maker"], models["judge"], step, rank)
    for name, count in passes(step).items():
        for number in range(count):
            generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
            batch = torch.randn(5, WIDTH, generator=generator)
            model = models[name]
            if name == "gathered" and number < count - 1:
                with model.no_sync():
                    model(batch).square().mean().backward()
            else:
                model(batch).square().mean().backward()


def make_all() -> dict[str, DDP]:
    options = {"unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}
    models = {name: make(seed, **options.get(name, {})) for seed, name in enumerate(passes(0))}
    models["often"] = make(0, gradient_as_bucket_view=True)
    return models


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--save", default="")
    parser.add_argument("--hold", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    job: Any = PlainJob() if options.plain else relight.init()
    models = make_all()
    parameters = [parameter for model in models.values() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    if options.plain:
        for step in range(options.steps):
            train_step(models, step, job.rank)
            optimizer.step()
            optimizer.zero_grad()
    else:
        handed: dict[str, nn.Module] = dict(models)
        handed["late"] = models["late"].module  # people also hand over what is wrapped
        training = relight.Training(model=handed, optimizer=optimizer)
        if options.checkpoint:
            training.checkpoint(options.checkpoint, every=2)
        for offered in training.steps(until=options.steps):
            with offered:
                train_step(models, offered.number, job.rank)
                optimizer.step()
                optimizer.zero_grad()
    if job.rank == 0:
        for name, model in models.items():
            print(f"end {name} {digest(dict(model.named_parameters()))}", flush=True)


if __name__ == "__main__":
    main()
