"""A small training script with everything people write, switchable by flags. Tests run it under `relight run`."""

import argparse
import contextlib
import copy
import hashlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from relight.training.job import current_runtime
from relight.transfer.restore import fabric

DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "view": {"gradient_as_bucket_view": True},
    "static-view": {"static_graph": True, "gradient_as_bucket_view": True},
    "small": {"bucket_cap_mb": 0.001},
}


OPTIMIZERS = ("sgd", "adam", "adamw", "adamw-fused", "adamw-foreach", "rmsprop", "adafactor", "muon")
SCHEDULERS = ("cosine", "plateau", "one-cycle", "sequential")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS)
    parser.add_argument("--groups", action="store_true", help="matrices, and all else with another learning rate")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--batchnorm", action="store_true")
    parser.add_argument("--local-buffers", action="store_true", help="let BatchNorm's statistics differ between ranks")
    parser.add_argument("--ddp", default="plain", choices=DDP_OPTIONS)
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--late-standby", action="store_true", help="standbys build when they know their rank")
    parser.add_argument("--compile", default="", metavar="BACKEND", help="compile the model")
    parser.add_argument("--hand-over-compiled", action="store_true", help="the compiled model instead of the other one")
    parser.add_argument("--scheduler", nargs="?", default="", const="cosine", choices=SCHEDULERS)
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--scaler", action="store_true")
    parser.add_argument("--overflow-at", type=int, default=-1, help="make the loss infinite at this step")
    parser.add_argument("--ema", action="store_true")
    parser.add_argument("--ema-kind", default="plain", choices=["plain", "buffers", "by-hand", "by-hand-averaged"])
    parser.add_argument("--ema-every", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--publish", type=int, default=0, metavar="K", help="the weights after every K steps")
    parser.add_argument("--checkpoint", default="", help="directory of checkpoints")
    parser.add_argument("--checkpoint-anew", action="store_true")
    parser.add_argument("--checkpoint-every", type=int, default=2)
    parser.add_argument("--data", default="loader", choices=["loader", "stateful", "function"])
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--streams", default="step", choices=["step", "preserve"])
    parser.add_argument("--own-stream", action="store_true", help="compute each step on a stream of the script's own")
    parser.add_argument("--evaluate", action="store_true", help="evaluate and draw random numbers between steps")
    parser.add_argument("--zero-first", action="store_true", help="zero_grad at the start of the step")
    parser.add_argument("--noise", type=float, default=0.01, help="how much of random numbers to add to x")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds more for each step, until HOLD is there")
    parser.add_argument("--linger-at", type=int, default=-1, help="see `linger`")
    parser.add_argument("--hold-at", type=int, default=-1, help="after this step, wait until the file HOLD is there")
    parser.add_argument("--hold", default="")
    parser.add_argument("--several-sources", action="store_true", help="copy also a small state from several ranks")
    parser.add_argument("--tell", action="store_true", help="print each committed step")
    parser.add_argument("--log", default="", help="report, early in the step, to: lines (of JSON), tensorboard, wandb")
    parser.add_argument("--save", default="", help="write digests of what this rank ends with to SAVE.RANK")
    return parser.parse_args()


class Net(nn.Module):
    mask: torch.Tensor

    def __init__(self, width: int, dropout: float, batchnorm: bool, spare: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.spare = nn.Linear(16, width) if spare else None
        self.uses_spare = False
        self.norm: nn.Module = nn.BatchNorm1d(width) if batchnorm else nn.LayerNorm(width)
        self.middle = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(width, 4)
        self.register_buffer("mask", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.spare if self.spare is not None and self.uses_spare else self.first
        x = torch.relu(self.norm(layer(x))) * self.mask
        logits: torch.Tensor = self.last(self.dropout(torch.relu(self.middle(x))))
        return logits


class Lines:
    """A logger of the script's own."""

    def __init__(self, path: str) -> None:
        self._path = path

    def log(self, values: dict[str, float], *, step: int) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps({"step": step, "pid": os.getpid(), **values}) + "\n")


def make_optimizers(kind: str, model: nn.Module, groups: bool) -> dict[str, torch.optim.Optimizer]:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    if kind == "muon":  # it is for matrices alone
        return {"muon": torch.optim.Muon(matrices, lr=0.02), "adamw": torch.optim.AdamW(others, lr=0.003)}
    apart = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.0005, "weight_decay": 0.0}]
    parameters: Any = apart if groups else model.parameters()
    if kind == "sgd":
        return {"optimizer": torch.optim.SGD(parameters, lr=0.05, momentum=0.9)}
    if kind == "adam":
        return {"optimizer": torch.optim.Adam(parameters, lr=0.003)}
    if kind == "rmsprop":
        return {"optimizer": torch.optim.RMSprop(parameters, lr=0.003, momentum=0.9, centered=True)}
    if kind == "adafactor":
        return {"optimizer": torch.optim.Adafactor(parameters, lr=0.03)}
    fused, foreach = kind == "adamw-fused" or None, kind == "adamw-foreach" or None
    return {"optimizer": torch.optim.AdamW(parameters, lr=0.003, fused=fused, foreach=foreach)}


def make_scheduler(kind: str, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    kinds = torch.optim.lr_scheduler
    if kind == "plateau":
        return kinds.ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.1)
    if kind == "one-cycle":
        return kinds.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)
    if kind == "sequential":
        parts: list[Any] = [kinds.LinearLR(optimizer, 0.1, total_iters=3), kinds.CosineAnnealingLR(optimizer, steps)]
        return kinds.SequentialLR(optimizer, parts, milestones=[3])
    return kinds.CosineAnnealingLR(optimizer, steps) if kind else None


def make_average(kind: str, net: nn.Module) -> nn.Module:
    if kind.startswith("by-hand"):
        return copy.deepcopy(net).requires_grad_(False)
    return AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=kind == "buffers")


@torch.no_grad()
def update_average(kind: str, ema: nn.Module, net: nn.Module) -> None:
    if isinstance(ema, AveragedModel):
        ema.update_parameters(net)
        return
    for own, parameter in zip(ema.parameters(), net.parameters(), strict=True):
        own.data.lerp_(parameter.data, 0.1)
    for average, buffer in zip(ema.buffers(), net.buffers(), strict=True):
        if kind == "by-hand-averaged" and buffer.is_floating_point():
            average.data.lerp_(buffer.data, 0.1)
        else:
            average.data.copy_(buffer.data)


def linger(rank: int) -> None:
    """Rank 0 stays until it knows of another rank's failure; the others only until rank 0 has come here.

    So rank 0 has launched its forward pass and waited for nothing when the next collective is interrupted.
    """
    deadline = time.monotonic() + 60
    if rank == 0:
        Path("lingers").touch()
    while not (current_runtime().closed if rank == 0 else os.path.exists("lingers")):
        assert time.monotonic() < deadline, "nothing has failed"
        time.sleep(0.01)


def zero_gradients(optimizers: dict[str, torch.optim.Optimizer]) -> None:
    for optimizer in optimizers.values():
        optimizer.zero_grad()


def save(path: str, model: DDP, weights: str, **others: Any) -> None:
    """Write a digest of the raw bytes of everything that training changes: independent of relight's own digest."""
    found = {"parameters": digest(dict(model.named_parameters())), "buffers": digest(dict(model.named_buffers()))}
    found["weights"] = weights
    found.update((name, digest(thing.state_dict())) for name, thing in others.items() if thing is not None)
    with open(path + ".part", "w") as file:
        json.dump(found, file)
    os.replace(path + ".part", path)


def digest(tree: Any) -> str:
    sha = hashlib.sha256()
    _feed(sha, tree)
    return sha.hexdigest()[:16]


def _feed(sha: Any, tree: Any) -> None:
    if isinstance(tree, torch.Tensor):
        sha.update(f"{tree.dtype} {list(tree.shape)}".encode())
        sha.update(tree.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    elif isinstance(tree, dict):
        for key, value in tree.items():
            sha.update(repr(key).encode())
            _feed(sha, value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            _feed(sha, value)
    else:
        sha.update(repr(tree).encode())


def main() -> None:
    options = parse()
    if options.several_sources:
        fabric.STRIPE_BYTES = 1
    torch.set_num_threads(1)
    job = relight.init(late_standby=options.late_standby or None)
    random.seed(job.rank)
    numpy.random.seed(job.rank)
    torch.manual_seed(job.rank if options.data == "loader" else 0)  # DDP's broadcast makes replicas equal
    device = job.device  # a GPU only where a test asks for one
    net = Net(options.width, options.dropout, options.batchnorm, spare=options.ddp == "unused").to(device)
    model = DDP(net, broadcast_buffers=not options.local_buffers, **DDP_OPTIONS[options.ddp])
    run: Any = torch.compile(model, backend=options.compile) if options.compile else model
    optimizers = make_optimizers(options.optimizer, model, options.groups)
    scheduler = make_scheduler(options.scheduler, next(iter(optimizers.values())), options.steps)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=3) if options.scaler else None
    ema = make_average(options.ema_kind, model.module) if options.ema else None

    generator = torch.Generator().manual_seed(7)
    data = torch.randn(96 * job.world_size, 16, generator=generator)
    labels = torch.randint(0, 4, (96 * job.world_size,), generator=generator)
    dataset = TensorDataset(data, labels)
    source: object
    if options.data == "function":
        source = lambda number: (data[number % 8 :: 8], labels[number % 8 :: 8])  # noqa: E731
    else:
        sampler: DistributedSampler[object] = DistributedSampler(
            dataset, job.world_size, job.rank, shuffle=True, seed=3
        )
        if options.data == "stateful":
            from torchdata.stateful_dataloader import StatefulDataLoader

            source = StatefulDataLoader(dataset, batch_size=24, sampler=sampler)
        else:
            source = DataLoader(dataset, batch_size=24, sampler=sampler, num_workers=options.loader_workers)

    training = relight.Training(
        model=run if options.hand_over_compiled else model,
        optimizer=optimizers,
        scheduler=scheduler,
        scaler=scaler,
        ema=ema,
        data=source,
        accumulate=options.accumulate,
        rng=options.streams,
    )
    if options.checkpoint:
        training.checkpoint(options.checkpoint, every=options.checkpoint_every, resume=not options.checkpoint_anew)
    if options.publish:
        training.publish(every=options.publish)
    if options.log:
        training.log_to((lambda: Lines("logged.jsonl")) if options.log == "lines" else options.log)
    stream = torch.Stream(device) if options.own_stream else contextlib.nullcontext()
    for step in training.steps(until=options.steps):
        with step as batch, stream:
            if options.zero_first:
                zero_gradients(optimizers)
            if not os.path.exists(options.hold):
                time.sleep(options.pause)
            net.uses_spare = step.number % 2 == 1
            batches = batch if options.accumulate > 1 else [batch]
            loss = torch.zeros((), device=device)
            for index, (x, y) in enumerate((x.to(device), y.to(device)) for x, y in batches):
                last = index == len(batches) - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    noise = (random.random() + numpy.random.random()) * options.noise
                    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.autocast):
                        loss = F.cross_entropy(run(x + noise), y) / len(batches)
                    if step.number == options.linger_at and job.generation == 1 and not step.warmup:
                        linger(job.rank)
                        dist.all_reduce(torch.zeros(1, device=device))
                    if step.number == options.overflow_at:
                        loss = loss * float("inf")
                    (scaler.scale(loss) if scaler else loss).backward()
            if options.log:
                step.report(loss, number=step.number, half=loss / 2)
            if options.clip:
                if scaler:
                    for optimizer in optimizers.values():
                        scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if options.scheduler == "plateau":  # of all ranks: or each would have a learning rate of its own
                loss = loss.detach()
                dist.all_reduce(loss)
            for optimizer in optimizers.values():
                scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()
            if ema is not None and step.number % options.ema_every == 0:
                update_average(options.ema_kind, ema, model.module)
            if scheduler is not None:
                scheduler.step(*([loss] if options.scheduler == "plateau" else []))
            if not options.zero_first:
                zero_gradients(optimizers)
            if not options.log:
                step.report(loss)
        if options.tell and step.committed:
            print(f"committed {step.number}", flush=True)
        while step.number == options.hold_at and not os.path.exists(options.hold):
            time.sleep(0.01)
        if options.evaluate and step.committed and step.number % 2 == 1:
            torch.randn(3), random.random(), numpy.random.random()
            model.eval()
            with torch.no_grad():
                model.module(data[:8].to(device))
            model.train()
    if options.save:
        # What engines were sent is compared with rank 0's own, buffers included.
        weights = relight.digest_weights(relight.weights_of(model))
        others = {**optimizers, "scheduler": scheduler, "scaler": scaler, "ema": ema}
        save(f"{options.save}.{job.rank}", model, weights=weights, **others)


if __name__ == "__main__":
    main()
