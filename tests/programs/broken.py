"""Training scripts with one mistake each, chosen by --how."""

import argparse
import importlib
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight


def raise_from_the_depths(rank: int, step: int) -> None:
    raise ValueError(f"sample 17 is broken on rank {rank} at step {step}")


class Communicating(torch.optim.SGD):
    """Averages parameters over all ranks after its update."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()
        return result


class Counter:
    """An object without state_dict."""

    count = 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--at", type=int, default=3, help="the step of the mistake")
    parser.add_argument("--rank", type=int, default=1, help="the rank of the mistake")
    options = parser.parse_args()
    how = options.how
    torch.set_num_threads(1)
    if how == "no_init":
        return
    if how == "idle_import":
        importlib.import_module("torch.distributed.pipelining")
    job = relight.init()
    if how == "startup" and job.rank == options.rank:
        raise_from_the_depths(job.rank, -1)
    if how == "exit_0_at_startup" and job.rank == options.rank:
        sys.exit(0)
    torch.manual_seed(job.rank * (how != "no_ddp"))
    width = 8 + 8 * (how == "shape" and job.rank == options.rank)
    first = nn.Linear(8, width)
    net = nn.Sequential(first, nn.ReLU(), nn.Linear(width, 4))
    model: nn.Module = net if how in ("weights", "shape", "no_ddp") else DDP(net)
    kind: Any = Communicating if how == "communicating_optimizer" else torch.optim.AdamW
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.01)
    second = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2) if "scheduler" in how else None
    scaler = torch.amp.GradScaler("cpu") if "scaler" in how else None
    ema = torch.optim.swa_utils.AveragedModel(net) if "ema" in how else None
    extra: dict[str, Any] = {"counter": Counter()} if how == "no_state_dict" else {}
    handed = scheduler if how == "scheduler_between" else None

    def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number + 1000 * job.rank * (how == "no_ddp"))
        return torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)

    training = relight.Training(model=model, optimizer=optimizer, data=batch_of, scheduler=handed, **extra)
    until = options.steps + (how == "steps" and job.rank == options.rank)
    for step in training.steps(until=until):
        here = step.number == options.at and job.rank == options.rank and not step.warmup
        writes = how != "carried_gradients" or step.number % 2 == 1
        with step as (x, y):
            loss = F.cross_entropy(model(x), y)
            if here and how == "exception":
                raise_from_the_depths(job.rank, step.number)
            if here and how == "extra_collective":
                dist.all_reduce(torch.ones(3))
            if here and how == "exit_code":
                sys.exit(7)
            if here and how == "exit_0":
                sys.exit(0)
            if step.number == options.at and how == "nan":
                loss = loss * float("nan")
            (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            elif not (here and how == "no_write") and writes:
                optimizer.step()
            if how == "second_optimizer" and step.number == options.at:
                second.step()
            if ema is not None:
                ema.update_parameters(net)
            if how == "forgotten_scheduler" and scheduler is not None:
                scheduler.step()
            if how == "collective_after_write":
                dist.all_reduce(loss.detach())
            if writes:
                optimizer.zero_grad()
            step.report(loss)
        if not step.committed:
            continue
        if here and how == "exception_between":
            raise_from_the_depths(job.rank, step.number)
        if here and how == "break":
            break
        if how == "collective_between":
            total = torch.ones(1)
            dist.all_reduce(total)
        if step.number == options.at:
            if how == "parameters_between":
                with torch.no_grad():
                    first.bias.add_(1.0)
            if how == "rate_between":
                optimizer.param_groups[0]["lr"] = 0.5
            if how == "scheduler_between" and scheduler is not None:
                scheduler.step()
    if how == "closed_output":  # as loggers do that put a file in their place
        sys.stderr.close()
        sys.stdout.close()
    if how == "exception_after" and job.rank == options.rank:
        raise_from_the_depths(job.rank, options.steps)


if __name__ == "__main__":
    main()
