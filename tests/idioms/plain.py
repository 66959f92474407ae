"""Scripts of the library without relight: what `relight` is to them is replaced by plain torch.distributed over gloo.

    python -m tests.idioms.plain NAME ...

A loop that yields every step once, draws seeded as relight seeds them, no barrier, no recovery. What a script ends with
here is what it would end with under torchrun. Children are forked from a process that has imported torch, so a script
takes a second.
"""

import os
import runpy
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.parallel
from torch.utils.data import DataLoader

from relight.training.data.rng import seed_everything, streams_kept
from tests.idioms.library import names, path_of, ranks_of

DEADLINE_SECONDS = 60.0


class PlainJob:
    """The job that `relight.init()` returns here."""

    def __init__(self) -> None:
        self.rank = self.local_rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = torch.device("cpu")
        self.is_standby = False
        self.generation = 1


def _init(*, late_standby: bool | None = None) -> PlainJob:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torch._C._distributed_c10d.FileStore(os.environ["IDIOM_STORE"], world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return PlainJob()


class PlainStep:
    """A step that is always committed."""

    def __init__(self, training: "PlainTraining", number: int) -> None:
        self._training = training
        self.number = number
        self.attempt = 0
        self.warmup = False
        self.committed = False

    @property
    def epoch(self) -> int:
        return self._training.epoch(self.number)

    def report(self, loss: Any = None, **values: Any) -> None:
        """Do nothing: no logger listens."""

    def __enter__(self) -> Any:
        return self._training.draw(self.number)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.committed = error is None
        self._training.version += self.committed


class PlainTraining:
    """A loop without protection."""

    def __init__(
        self,
        *,
        data: Any = None,
        accumulate: int = 1,
        short_groups: bool = False,
        seed: int | None = None,
        rng: str = "step",
        **_: Any,
    ) -> None:
        self._short_groups = short_groups
        self._data, self._accumulate, self._seed, self._rng = data, accumulate, seed or 0, rng
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._until = 0  # of the epoch under way
        self._end = 0  # of all epochs
        self.version = 0

    def __getattr__(self, name: str) -> Any:  # carry, checkpoint, log_to, ...
        return lambda *_, **__: None

    def steps(self, until: int | None = None) -> Iterator[PlainStep]:
        """Offer them one after the other."""
        try:
            while self.version < (until or self._until):
                yield PlainStep(self, self.version)
        finally:
            if until or self._until == self._end:
                self._seed_streams("after", self.version)

    def epochs(self, count: int, *, steps_per_epoch: int | None = None) -> Iterator[int]:
        """Offer epochs one after the other."""
        length = steps_per_epoch or self._steps_in_an_epoch()
        self._end = count * length
        try:
            for epoch in range(count):
                self._until = (epoch + 1) * length
                yield epoch
        except GeneratorExit:
            self._seed_streams("after", self.version)
            raise

    def _steps_in_an_epoch(self) -> int:
        return -(-len(self._data) // self._accumulate)

    def epoch(self, number: int) -> int:
        return number * self._accumulate // len(self._data)

    def draw(self, number: int) -> Any:
        """The batch of a step."""
        if self._data is not None:
            self._seed_streams("step", number)
        first, count = number * self._accumulate, self._accumulate
        if self._short_groups:
            epoch, place = divmod(number, self._steps_in_an_epoch())
            first = epoch * len(self._data) + place * self._accumulate
            count = min(count, (epoch + 1) * len(self._data) - first)
        batches = [self._next(first + index) for index in range(count)]
        self._seed_streams("forward", number)
        return batches[0] if self._accumulate == 1 else batches

    def _next(self, number: int) -> Any:
        data = self._data
        if data is None:
            return None
        if not isinstance(data, DataLoader) and not hasattr(data, "state_dict"):
            return data(number) if callable(data) else data[number % len(data)]
        if self._iterator is None:
            self._iterator = self._start()
        try:
            return next(self._iterator)
        except StopIteration:
            self._epoch += 1
            self._iterator = self._start()
            return next(self._iterator)

    def _start(self) -> Iterator[Any]:
        for kind in ("sampler", "batch_sampler"):
            if set_epoch := getattr(getattr(self._data, kind, None), "set_epoch", None):
                set_epoch(self._epoch)
        with streams_kept():
            self._seed_streams("epoch", self._epoch)
            return iter(self._data)

    def _seed_streams(self, purpose: str, number: int) -> None:
        if self._rng == "step":
            seed_everything(self._seed, purpose, number, dist.get_rank())


def run(path: Path, world_size: int) -> tuple[int, str]:
    """The script's status and output, all ranks' together."""
    with tempfile.TemporaryDirectory(prefix="idiom-") as directory:
        output = Path(directory) / "output"
        children = [_fork(path, rank, world_size, Path(directory), output) for rank in range(world_size)]
        deadline = time.monotonic() + DEADLINE_SECONDS
        status = 0
        while children:
            pid, ended = os.waitpid(children[0], os.WNOHANG)
            if pid:
                children.pop(0)
                status = status or os.waitstatus_to_exitcode(ended)
            elif time.monotonic() > deadline or status:
                for child in children:
                    os.kill(child, 9)
            else:
                time.sleep(0.02)
        return status, output.read_text(errors="replace")


def _fork(path: Path, rank: int, world_size: int, directory: Path, output: Path) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), IDIOM_STORE=str(directory / "store")
        )
        os.chdir(directory)
        relight = types.ModuleType("relight")
        relight.__dict__.update(init=_init, Training=PlainTraining, Job=PlainJob, Step=PlainStep)
        sys.modules["relight"] = relight
        sys.argv = [str(path)]
        runpy.run_path(str(path), run_name="__main__")
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:  # a child must not go on as its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def main(words: list[str]) -> int:
    """Run the scripts that are named, or all, and show what they end with."""
    torch.set_num_threads(1)
    worst = 0
    for name in words or names():
        began = time.monotonic()
        status, output = run(path_of(name), ranks_of(name))
        worst = worst or status
        print(f"{name}: status {status} after {time.monotonic() - began:.1f} s\n{output}", flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
