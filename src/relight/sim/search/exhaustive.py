"""Every order of events of a small job, with every choice of faults: a search with memory of what it has seen.

A job begins where all ranks have entered training and all standbys are warm. From each situation the search follows
everything that may happen next: a message arrives, a main thread moves on, a collective completes on one rank or
breaks on it, a process is struck by a fault. Two orders that lead to the same situation are followed once; the same is
what differs in names only (sameness.py).

Time stands still; a deadline passes when nothing else can happen, and a fresh process gets warm only then. Deadlines
that pass early, and repeated or lost messages, are the random search's part.

situation.py documents which orders are distinguished.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from relight.core.protocol.fault import Action as Fault
from relight.sim.model.contents import Violation
from relight.sim.model.shapes import ONE_WRITE, Pattern, pattern_of
from relight.sim.planted.mutations import find_mutation
from relight.sim.search.situation import Situation
from relight.sim.timed.job import PRODUCTION, Parts, show

FAULTS = {"kill": Fault.KILL, "freeze": Fault.FREEZE, "cut": Fault.CUT}


# --- the search ---------------------------------------------------------------------------------------------------
@dataclass
class Searched:
    """The result of a search."""

    situations: int = 0
    steps: int = 0  # from one situation to the next
    ends: dict[str, int] = field(default_factory=dict)  # how often a job ended in which way
    seconds: float = 0.0
    violation: str = ""
    script: tuple[int, ...] = ()  # that leads to it: which of the choices, each time
    complete: bool = False
    keys: set[int] = field(default_factory=set, repr=False)  # of the situations from which something follows


@dataclass
class _Node:
    situation: Situation
    key: int
    parent: "_Node | None"
    choice: int

    def script(self) -> tuple[int, ...]:
        choices: list[int] = []
        node: _Node | None = self
        while node is not None and node.parent is not None:
            choices.append(node.choice)
            node = node.parent
        return tuple(reversed(choices))


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """One order of events, to be followed again: the situation where it begins, and a choice at each step."""

    ranks: int
    steps: int
    faults: int
    kinds: tuple[str, ...]
    choices: tuple[int, ...]
    fine: bool = False
    mutation: str = ""
    shapes: tuple[str, ...] = ()
    relearns: bool = False
    learns: bool = False

    def follow(self, parts: Parts = PRODUCTION) -> str:
        """Follow the choices and return a line for each. Raises Violation with these lines if an invariant breaks."""
        lines: list[str] = []
        pattern = pattern_of(self.shapes, relearns=self.relearns, learns=self.learns)
        here = situation(self.ranks, self.steps, self.faults, self.kinds, parts, fine=self.fine, pattern=pattern)
        here.listener = lambda what, thing: lines.append(f"    {what} {show(thing)}")
        for choice in self.choices:
            action = here.choices()[choice]
            lines.append(" ".join(map(str, action)))
            try:
                here.happen(action)
            except Violation as violation:
                raise Violation(f"{violation}\n" + "\n".join(lines)) from None
        return "\n".join(lines)


def explore(start: Situation, *, seconds: float | None = None, exact: bool = False) -> Searched:
    """Follow everything from `start`. Stops at the first violation.

    Args:
        start: is not changed.
        seconds: give up after so long.
        exact: follow situations that differ only in names, too. For tests: it finds nothing else, in a longer time.
    """
    found = Searched()
    begun = time.monotonic()
    key = Situation.exact_key if exact else Situation.key
    root = _Node(start, key(start), None, -1)
    seen = {root.key}
    onward: dict[int, int] = {}  # where the first choice leads: following it, every job must end
    stack = [root]
    while stack:
        node = stack.pop()
        found.situations += 1
        if node.situation.end is not None:
            kind = _kind_of_end(node.situation.end.error)
            found.ends[kind] = found.ends.get(kind, 0) + 1
            continue
        try:
            new = list(_follow(node, found, onward, key))
        except _Broken as broken:
            found.violation, found.script = str(broken.violation), (*node.script(), *broken.choice)
            break
        for child in reversed(new):
            if child.key not in seen:
                seen.add(child.key)
                stack.append(child)
        if seconds is not None and found.situations % 1000 == 0 and time.monotonic() - begun > seconds:
            break
    else:
        found.complete = True
        found.keys = set(onward)
        if _has_circle(onward):
            found.violation = "L2: some job goes round in circles and never ends"
    found.seconds = time.monotonic() - begun
    return found


class _Broken(Exception):
    """An invariant breaks, after one more choice or none."""

    def __init__(self, violation: Violation, choice: tuple[int, ...]) -> None:
        super().__init__(violation)
        self.violation = violation
        self.choice = choice


def _follow(
    node: _Node, found: Searched, onward: dict[int, int], key_of: Callable[[Situation], int]
) -> Iterator[_Node]:
    choices = node.situation.choices()
    if not choices:
        stage = node.situation.controller.stage
        raise _Broken(Violation(f"L2: nothing will ever happen again, in stage {stage}"), ())
    for number, choice in enumerate(choices):
        found.steps += 1
        child = node.situation.copy()
        try:
            child.happen(choice)
        except Violation as violation:
            raise _Broken(violation, (number,)) from None
        key = key_of(child)
        if number == 0:
            onward[node.key] = key
        yield _Node(child, key, node, number)


def _has_circle(onward: dict[int, int]) -> bool:
    """Return whether following first choices from somewhere comes back to where it has been."""
    good: set[int] = set()
    for start in onward:
        path: list[int] = []
        here: int | None = start
        on_path: set[int] = set()
        while here is not None and here not in good:
            if here in on_path:
                return True
            path.append(here)
            on_path.add(here)
            here = onward.get(here)
        good.update(path)
    return False


def _kind_of_end(error: str) -> str:
    if not error:
        return "finished"
    return "every replica lost" if "replica" in error else error


def situation(
    ranks: int,
    steps: int,
    faults: int,
    kinds: Sequence[str],
    parts: Parts = PRODUCTION,
    *,
    fine: bool = False,
    pattern: Pattern = ONE_WRITE,
) -> Situation:
    """Return the situation in which the search begins."""
    start = Situation(ranks, steps, faults, [FAULTS[kind] for kind in kinds], parts, fine=fine, pattern=pattern)
    start.begin()
    return start


def main(job: Script) -> int:
    """For the command line: search the job of `job`, whose choices do not count. Returns the exit status."""
    mutation = find_mutation(job.mutation) if job.mutation else None
    pattern = pattern_of(job.shapes, relearns=job.relearns, learns=job.learns)
    with mutation.planted() if mutation is not None else contextlib.nullcontext(PRODUCTION) as parts:
        start = situation(job.ranks, job.steps, job.faults, job.kinds, parts, fine=job.fine, pattern=pattern)
        found = explore(start)
    shapes = f" of {', '.join(job.shapes)}" if job.shapes else ""
    print(
        f"{job.ranks} ranks, {job.steps} steps{shapes}, up to {job.faults} faults ({', '.join(job.kinds)}): "
        f"{found.situations:,} situations, {found.steps:,} steps between them, in {found.seconds:.1f} s; {found.ends}"
    )
    if found.violation:
        script = msgspec.structs.replace(job, choices=found.script)
        print(found.violation)
        print(f"replay it with: python -m relight.sim --replay '{msgspec.json.encode(script).decode()}'")
    return 1 if found.violation else 0
