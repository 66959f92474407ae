"""The job of the soak: a small model with all kinds of state, which goes no further than it is let.

A file that is shared with the nemesis says how far every rank may go, and bears witness of what each of them
has done: a loss and a number of commits for each rank and step. It outlives the processes that write it.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import struct
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight

_WORD = struct.Struct("<q")
_LOSS = struct.Struct("<d")
_HEAD_BYTES = 4096
_DIGEST_BYTES = 64
_MAX_RANKS = 32
_DIGESTS_AT = 1024  # in the head, after the words
_LOOK_SECONDS = 0.004
_EXAMPLES = 4096
_WIDTH = 48


class SharedBarrier:
    """A file of one head (word 0: how many steps may be taken; word 1 + r: where rank r is) and a table.

    The table has for each rank and step the bits of the loss that was committed (8 bytes), and how often it was
    committed (1 byte).
    """

    def __init__(self, path: Path, ranks: int, steps: int) -> None:
        self._ranks, self._steps = ranks, steps
        size = _HEAD_BYTES + ranks * steps * (_LOSS.size + 1)
        if not path.exists():
            with path.open("wb") as file:
                file.truncate(size)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)

    @property
    def allowed(self) -> int:
        """No rank begins this step or a later one."""
        return int(_WORD.unpack_from(self._map, 0)[0])

    def allow(self, steps: int) -> None:
        _WORD.pack_into(self._map, 0, steps)

    def arrive(self, rank: int, step: int) -> None:
        """The rank is about to begin this step."""
        _WORD.pack_into(self._map, _WORD.size * (1 + rank), step)

    def arrived(self) -> list[int]:
        """The position of each rank."""
        return [int(_WORD.unpack_from(self._map, _WORD.size * (1 + rank))[0]) for rank in range(self._ranks)]

    def commit(self, rank: int, step: int, loss: float) -> None:
        place = rank * self._steps + step
        _LOSS.pack_into(self._map, _HEAD_BYTES + place * _LOSS.size, loss)
        self._map[_HEAD_BYTES + self._ranks * self._steps * _LOSS.size + place] += 1

    def losses(self, rank: int) -> bytes:
        """The losses of all steps, 8 bytes each; zero where this rank number never committed a step itself."""
        begin = _HEAD_BYTES + rank * self._steps * _LOSS.size
        return self._map[begin : begin + self._steps * _LOSS.size]

    def commits(self, rank: int) -> bytes:
        """Return how often this rank number committed each step, one byte each."""
        begin = _HEAD_BYTES + self._ranks * self._steps * _LOSS.size + rank * self._steps
        return self._map[begin : begin + self._steps]

    def sign(self, rank: int, digest: str) -> None:
        """Sign all state that the rank ends with."""
        begin = _DIGESTS_AT + rank * _DIGEST_BYTES
        self._map[begin : begin + _DIGEST_BYTES] = digest.encode().ljust(_DIGEST_BYTES, b"\0")

    def digests(self) -> list[str]:
        """The digests that the ranks have signed."""
        begins = [_DIGESTS_AT + rank * _DIGEST_BYTES for rank in range(self._ranks)]
        return [self._map[begin : begin + _DIGEST_BYTES].rstrip(b"\0").decode() for begin in begins]


def make_model() -> DistributedDataParallel:
    """Dropout draws random numbers; the statistics of BatchNorm differ from rank to rank."""
    torch.manual_seed(5)
    layers = [
        *(nn.Linear(16, _WIDTH), nn.BatchNorm1d(_WIDTH), nn.GELU(), nn.Dropout(0.1)),
        *(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, 4)),
    ]
    return DistributedDataParallel(nn.Sequential(*layers), broadcast_buffers=False)


def digest(*trees: Any) -> str:
    """A digest of the raw bytes of all tensors, made without relight's own digest."""
    sha = hashlib.sha256()
    for tree in trees:
        _feed(sha, tree)
    return sha.hexdigest()


def _feed(sha: Any, tree: Any) -> None:
    if isinstance(tree, torch.Tensor):
        sha.update(tree.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(tree, dict):
        for key, value in tree.items():
            sha.update(repr(key).encode())
            _feed(sha, value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            _feed(sha, value)
    else:
        sha.update(repr(tree).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description="The job of the soak, under `relight run`")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--board", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = relight.init()
    assert job.world_size <= _MAX_RANKS
    shared_barrier = SharedBarrier(options.shared_barrier, job.world_size, options.steps)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    generator = torch.Generator().manual_seed(7)
    dataset = TensorDataset(
        torch.randn(_EXAMPLES, 16, generator=generator), torch.randint(0, 4, (_EXAMPLES,), generator=generator)
    )
    sampler: DistributedSampler[object] = DistributedSampler(dataset, job.world_size, job.rank, shuffle=True, seed=3)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    for step in training.steps(until=options.steps):
        if not step.warmup:
            shared_barrier.arrive(job.rank, step.number)
            while step.number >= shared_barrier.allowed:
                time.sleep(_LOOK_SECONDS)
        loss = torch.zeros(())
        with step as (inputs, labels):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step.committed:
            shared_barrier.commit(job.rank, step.number, float(loss.detach()))
    shared_barrier.sign(job.rank, digest(model.module.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    shared_barrier.arrive(job.rank, options.steps)


if __name__ == "__main__":
    main()
