"""Thousands of random schedules, on all processors. A seed gives the same schedule and run wherever it is tried."""

import multiprocessing
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from relight.sim.model.contents import Violation
from relight.sim.model.schedule import schedule_of
from relight.sim.planted.mutations import find_mutation
from relight.sim.timed.job import run_schedule

BLOCK = 200  # seeds that one process tries in a row


@dataclass
class Found:
    """The result of a search."""

    schedules: int = 0
    seconds: float = 0.0
    violations: dict[int, str] = field(default_factory=dict)  # seed -> the first line, in order of seeds

    @property
    def per_second(self) -> float:
        """Schedules, on all processors together."""
        return self.schedules / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Block:
    """So many of them, and how they are tried."""

    first: int
    count: int
    mutation: str
    kinds: tuple[str, ...]


def search(
    first: int,
    count: int,
    *,
    seconds: float | None = None,
    processes: int | None = None,
    mutation: str = "",
    kinds: Collection[str] = (),
    progress: Callable[[Found], None] | None = None,
) -> Found:
    """Try `count` seeds from `first` on, or as many of them as `seconds` allow; of these kinds (`KINDS`), if any."""
    found = Found()
    begun = time.monotonic()
    # One after the other: a search that its time ends may have millions of them.
    blocks = (
        Block(start, min(BLOCK, first + count - start), mutation, tuple(kinds))
        for start in range(first, first + count, BLOCK)
    )
    processes = 1 if count <= BLOCK else processes or os.cpu_count() or 1
    for tried, violations in _run(blocks, processes):
        found.schedules += tried
        found.seconds = time.monotonic() - begun
        found.violations = dict(sorted({**found.violations, **violations}.items()))
        if progress is not None:
            progress(found)
        if seconds is not None and found.seconds >= seconds:
            break
    return found


def _run(blocks: Iterable[Block], processes: int) -> Iterator[tuple[int, dict[int, str]]]:
    if processes == 1:
        yield from map(_try_block, blocks)
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield from pool.imap_unordered(_try_block, blocks)


def _try_block(block: Block) -> tuple[int, dict[int, str]]:
    violations = {}
    for seed in range(block.first, block.first + block.count):
        try:
            violation = try_seed(seed, block.mutation, block.kinds)
        except Exception as error:
            raise RuntimeError(f"--seed {seed} {block.kinds}: the simulation itself broke down: {error!r}") from error
        if violation is not None:
            violations[seed] = str(violation).partition("\n")[0]
    return block.count, violations


def try_seed(seed: int, mutation: str = "", kinds: Collection[str] = ()) -> Violation | None:
    """The violation in one schedule, or None."""
    schedule = schedule_of(seed, kinds)
    if mutation:
        return find_mutation(mutation).breaks(schedule)
    try:
        run_schedule(schedule)
    except Violation as violation:
        return violation
    return None
