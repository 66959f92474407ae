"""What simulated workers compute: small numbers that stand for tensors and show every mistake of a recovery.

A gradient depends on the state, on the rank and on that rank's private state; a new state depends on all gradients.
So whoever computes with a wrong version, a wrong rank or a wrong private state ends with another number than a run
that nothing disturbed. Numbers come from hashing tuples of integers, which is the same in every process.
"""

from functools import lru_cache
from typing import NamedTuple


class Violation(AssertionError):
    """An invariant does not hold. The message begins with its name: `I7: ...`."""

    @property
    def invariant(self) -> str:
        """The name, by which two schedules are held to show the same defect."""
        return str(self).partition(":")[0]


class State(NamedTuple):
    """Replicated state. `content` stands for parameters and moments; `applied` lists the steps, in order."""

    version: int
    lineage: str
    content: int
    applied: tuple[int, ...]

    def updated(self, gradient: int) -> "State":
        """After the optimizer applied the reduced gradient of the next step."""
        step = self.version
        return State(
            step + 1,
            f"{hash((3, step, int(self.lineage, 16))) & _MASK:x}",
            hash((4, self.content, gradient)),
            (*self.applied, step),
        )


_MASK = 2**60 - 1
FIRST_STATE = State(0, "1", 5, ())


def first_private(rank: int) -> int:
    """The rank-private state with which a rank starts."""
    return hash((6, rank))


def next_private(private: int, step: int) -> int:
    """Buffers, streams and data position change in every step, on each rank in its own way."""
    return hash((7, private, step))


def derived_private(rank: int, version: int, *, known: bool) -> int:
    """A rank's private state, worked out from its number and the step; wrong unless `known` to follow from them."""
    private = first_private(rank)
    for step in range(version):
        private = next_private(private, step)
    return private if known else hash((10, private))


def contribution(state: State, private: int, rank: int) -> int:
    """A rank's gradient."""
    return hash((8, state.content, state.version, private, rank))


def reduce(contributions: dict[int, int]) -> int:
    """The sum over all ranks."""
    return hash(tuple(contributions[rank] for rank in sorted(contributions)))


@lru_cache(maxsize=64)
def reference(world_size: int, until: int) -> tuple[tuple[State, ...], tuple[tuple[int, ...], ...]]:
    """States by version and private states by (version, rank), of a run that nothing disturbs."""
    states, privates = [FIRST_STATE], [tuple(first_private(rank) for rank in range(world_size))]
    for step in range(until):
        gradient = reduce({r: contribution(states[-1], privates[-1][r], r) for r in range(world_size)})
        states.append(states[-1].updated(gradient))
        privates.append(tuple(next_private(private, step) for private in privates[-1]))
    return tuple(states), tuple(privates)


def part_key(rank: int, parts: int) -> str:
    """What a rank says that it holds; empty: all of the state."""
    return f"part {rank % parts}" if parts > 1 else ""


def digest_of(content: int, rank: int, parts: int) -> str:
    """Of what a rank holds of a state: another one for each part."""
    return f"{content}/{rank % parts}" if parts > 1 else str(content)
