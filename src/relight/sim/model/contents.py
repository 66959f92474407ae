"""Numbers that simulated workers compute; they stand for tensors and show every mistake of a recovery.

A gradient depends on the state, on the rank and on that rank's private state; a new state depends on all gradients.
So a rank that computes with a wrong version, a wrong rank or a wrong private state ends with another number than a run
that nothing disturbed. Numbers come from hashing tuples of integers, which is the same in every process.
"""

from functools import lru_cache
from typing import NamedTuple

from relight.sim.model.shapes import ONE_WRITE, Pattern


class Violation(AssertionError):
    """An invariant does not hold. The message begins with its name: `I7: ...`."""

    @property
    def invariant(self) -> str:
        """The name, by which two schedules are held to show the same defect."""
        return str(self).partition(":")[0]


class State(NamedTuple):
    """Replicated state. `content` stands for parameters and moments; `applied` lists the steps, in order.

    `own` has a bit for each step that changed a buffer for the first time: buffers that are in no copy of the state.
    """

    version: int
    lineage: str
    content: int
    applied: tuple[int, ...]
    own: int = 0

    def written(self, gradient: int, *, last: bool) -> "State":
        """The state after one write of a step, in place: it is of no newer version yet."""
        return self._replace(content=hash((4 if last else 12, self.content, gradient)))

    def halved(self) -> "State":
        """Inside a write: neither what was nor what will be. Of a halved state, the whole one."""
        return self._replace(content=~self.content)

    def alone(self, rank: int) -> "State":
        """The state after code between two steps that had a rank's own value of a collective."""
        return self._replace(content=hash((14, self.content, rank)))

    def committed(self, *, finds: bool = False) -> "State":
        """The state after the last write of a step: the next version. `finds`: a buffer is known to be private."""
        step = self.version
        lineage = f"{hash((3, step, int(self.lineage, 16))) & _MASK:x}"
        return State(step + 1, lineage, self.content, (*self.applied, step), self.own | finds << step)


_MASK = 2**60 - 1
FIRST_STATE = State(0, "1", 5, ())


def first_private(rank: int) -> int:
    """The rank-private state with which a rank starts."""
    return hash((6, rank))


def next_private(private: int, step: int) -> int:
    """Buffers, streams and data position change in every step, on each rank in its own way."""
    return hash((7, private, step))


def private_with_buffer(private: int) -> int:
    """Private state with a buffer that each rank has for itself from this step on."""
    return hash((15, private))


def late_private(private: int) -> int:
    """Private state that changes once more after the last write."""
    return hash((13, private))


def derived_private(rank: int, version: int, pattern: Pattern = ONE_WRITE, *, known: bool) -> int:
    """A rank's private state, worked out from its number and the step; wrong unless `known` to follow from them."""
    private = first_private(rank)
    for step in range(version):
        private = next_private(private, step)
        if pattern.script(step).finders:
            private = private_with_buffer(private)
        if pattern.script(step).changes_private_late:
            private = late_private(private)
    return private if known else hash((10, private))


def contribution(state: State, private: int, rank: int) -> int:
    """A rank's gradient."""
    return hash((8, state.content, state.version, private, rank))


def reduce(contributions: dict[int, int]) -> int:
    """The sum over all ranks."""
    return hash(tuple(contributions[rank] for rank in sorted(contributions)))


class Reference(NamedTuple):
    """Right values of a job, from a run that nothing disturbs."""

    states: tuple[State, ...]  # by version
    privates: tuple[tuple[int, ...], ...]  # by version and rank
    brought: tuple[tuple[tuple[int, ...], ...], ...]  # by step, collective and rank
    early_privates: tuple[tuple[int, ...], ...]  # by version and rank: before private state changed late


@lru_cache(maxsize=64)
def reference(world_size: int, until: int, pattern: Pattern = ONE_WRITE) -> Reference:
    """Compute the reference of a job of that size and length."""
    ranks = range(world_size)
    states, privates = [FIRST_STATE], [tuple(first_private(rank) for rank in ranks)]
    early = privates.copy()
    brought: list[tuple[tuple[int, ...], ...]] = []
    for step in range(until):
        script, state, private = pattern.script(step), states[-1], privates[-1]
        collectives = []
        for number in range(script.writes):
            collectives.append(tuple(contribution(state, private[rank], rank) for rank in ranks))
            state = state.written(reduce(dict(enumerate(collectives[-1]))), last=number == script.writes - 1)
            if not number:
                private = tuple(next_private(one, step) for one in private)
        if script.finders:
            private = tuple(map(private_with_buffer, private))
        brought.append(tuple(collectives))
        states.append(state.committed(finds=bool(script.finders)))
        early.append(private)
        privates.append(tuple(late_private(one) for one in private) if script.changes_private_late else private)
    return Reference(tuple(states), tuple(privates), tuple(brought), tuple(early))


def part_key(rank: int, parts: int) -> str:
    """The name of the part of the state that a rank holds; empty: all of it."""
    return f"part {rank % parts}" if parts > 1 else ""


def digest_of(state: State, rank: int, parts: int) -> str:
    """The digest of the part of a state that a rank holds; each part has another one."""
    content = hash((16, state.content, state.own)) if state.own else state.content
    return f"{content}/{rank % parts}" if parts > 1 else str(content)
