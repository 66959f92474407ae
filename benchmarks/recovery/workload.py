"""The workload of every system in the recovery benchmark, and the log from which every figure is computed.

The job must be the same for all systems, or their recovery times could not be compared. So the model,
its first values, the optimizer and the data live here, as pure functions of the arguments, and a system's
own script adds nothing but what that system asks its users to write.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Shape:
    """Size of the model and of one rank's batch: about 20 M parameters, and a step of 0.6 to 0.8 s when
    four processes share two cores."""

    layers: int = 6
    width: int = 512
    heads: int = 8
    context_bytes: int = 64
    batch_samples: int = 2


SHAPE = Shape()


# ---------------------------------------------------------------- model


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then a feed-forward layer four times as wide."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.norm_feed = nn.LayerNorm(shape.width)
        self.feed = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        qkv: Tensor = self.qkv(self.norm_attention(x))
        split = (samples, length, self.heads, width // self.heads)
        query, key, value = (part.view(split).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        fed: Tensor = self.feed(self.norm_feed(x))
        return x + fed


class ByteTransformer(nn.Module):
    """Predicts the next byte. No dropout, so that a step is a pure function of parameters and batch."""

    def __init__(self, shape: Shape = SHAPE) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, shape.width)
        self.places = nn.Embedding(shape.context_bytes, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.bytes(tokens) + self.places(places))
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def build_model(seed: int, shape: Shape = SHAPE) -> ByteTransformer:
    """The model with its first values: the same bits in every process that passes the same seed."""
    torch.manual_seed(seed)
    return ByteTransformer(shape)


def build_optimizer(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    logits: Tensor = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---------------------------------------------------------------- data


@cache
def corpus() -> Tensor:
    """Text that every machine has: some of the largest modules of Python's own library, as bytes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse", "ast", "datetime", "decimal", "doctest", "inspect", "pickle", "tarfile", "typing")
    text = b"".join(path.read_bytes() for path in (library / f"{name}.py" for name in names) if path.exists())
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(seed: int, step: int, rank: int, shape: Shape = SHAPE) -> tuple[Tensor, Tensor]:
    """The batch of one rank at one step, in whichever process and however often: inputs and targets."""
    key = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
    text = corpus()
    last_start = text.numel() - shape.context_bytes - 1
    starts = torch.randint(last_start, (shape.batch_samples, 1), generator=generator)
    tokens = text[starts + torch.arange(shape.context_bytes + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


# ---------------------------------------------------------------- the log of events


class EventLog:
    """Appends one JSON line per event to a file of this process's own.

    A line is handed to the kernel by one ``os.write`` before ``emit`` returns, so that a SIGKILL in the next
    instruction loses nothing. The clock is the machine's monotonic one, the same for all its processes.

    Every event says that something *begins*, except ``step_end`` (this rank's batch is now part of this
    rank's parameters), ``step_passive`` (the parameters moved on without this rank's batch),
    ``step_discarded`` (the attempt came to nothing) and ``restored`` (the state was loaded).
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._rank = rank
        self._pid = os.getpid()
        path = directory / f"rank{rank}-pid{self._pid}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def emit(self, event: str, step: int, **details: str | int | float | bool) -> None:
        t_ns = time.monotonic_ns()
        line = {"t_ns": t_ns, "rank": self._rank, "pid": self._pid, "event": event, "step": step, **details}
        os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")


# ---------------------------------------------------------------- the parts of a script


def compute_gradients(model: nn.Module, log: EventLog, seed: int, step: int, rank: int) -> float:
    """Forward and backward of one attempt at a step; returns the loss of this rank's batch."""
    log.emit("forward", step)
    loss = loss_of(model, *batch(seed, step, rank))
    log.emit("backward", step)
    loss.backward()
    return loss.item()


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    log: EventLog,
    seed: int,
    step: int,
    rank: int,
) -> float:
    """One ordinary optimizer step; a system with its own idea of a step writes its own."""
    log.emit("step_start", step)
    optimizer.zero_grad()
    loss = compute_gradients(model, log, seed, step, rank)
    log.emit("optimizer", step)
    optimizer.step()
    log.emit("step_end", step)
    return loss


def state_digest(model: nn.Module, optimizer: Optimizer) -> str:
    """Hash of all parameters, buffers and optimizer tensors: equal if and only if every bit is."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in _state_tensors(model, optimizer):
        flat = tensor.detach().cpu().contiguous()
        digest.update(ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()))
    return digest.hexdigest()


def _state_tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[Tensor]:
    yield from model.state_dict().values()
    for state in optimizer.state_dict()["state"].values():
        yield from (state[name] for name in sorted(state) if isinstance(state[name], Tensor))


def arguments(description: str) -> argparse.ArgumentParser:
    """The arguments that every system's script takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--log-dir", type=Path, required=True, help="where each process writes its events")
    parser.add_argument("--seed", type=int, default=0, help="of the first parameters and of the data")
    parser.add_argument("--steps", type=int, default=600, help="bounds the run if nothing else ends it")
    return parser


def use_one_thread() -> None:
    """Four processes share two cores: more threads would only wait for each other."""
    torch.set_num_threads(1)
