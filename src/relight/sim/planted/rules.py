"""Other rules for where to go from what the ranks report."""

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import msgspec

from relight.core.protocol import events as ev
from relight.core.recovery.corruption import outvoted
from relight.core.recovery.decision import Decision, Halt, decide

Private = Mapping[int, Collection[int]]
Rule = Callable[[Sequence[ev.Stopped], Private, int], Decision | Halt]


def make_decision(
    reports: Sequence[ev.Stopped], world_size: int, target: int, targets: Collection[int] = ()
) -> Decision:
    intact = [r for r in reports if not r.blank and not r.torn]
    sources = tuple(sorted(r.rank for r in intact if r.rank not in targets))
    missing = set(range(world_size)) - {r.rank for r in intact}
    return Decision(
        target=target,
        direction="planted",
        reason="a planted bug says so",
        sources=sources,
        finishers=tuple(r.rank for r in intact if r.version < target),
        targets=tuple(sorted(missing | set(targets))),
    )


def intact_versions(reports: Sequence[ev.Stopped]) -> list[int]:
    return [r.version for r in reports if not r.blank and not r.torn]


def newest_of_the_survivors(reports: Sequence[ev.Stopped], private: Private, world_size: int) -> Decision | Halt:
    """A7: the newest version of the survivors is restored. A version that only a dead rank finished is lost."""
    if not intact_versions(reports):
        return decide(reports, private, world_size)
    newest = max(intact_versions(reports))
    behind = [r.rank for r in reports if not r.blank and r.version < newest]
    return make_decision(reports, world_size, newest, behind)


def forward_if_any_is_prepared(reports: Sequence[ev.Stopped], private: Private, world_size: int) -> Decision | Halt:
    """One complete gradient is held to prove that all are complete."""
    if not intact_versions(reports):
        return decide(reports, private, world_size)
    base = min(intact_versions(reports))
    reachable = any(r.version > base or r.prepared == base for r in reports if not r.blank)
    return make_decision(reports, world_size, base + reachable)


def forward_if_most_are_prepared(reports: Sequence[ev.Stopped], private: Private, world_size: int) -> Decision | Halt:
    """A majority decides, as in so many protocols."""
    if not intact_versions(reports):
        return decide(reports, private, world_size)
    base = min(intact_versions(reports))
    ready = sum(r.version > base or r.prepared == base for r in reports if not r.blank)
    return make_decision(reports, world_size, base + (2 * ready > world_size))


def always_back(reports: Sequence[ev.Stopped], private: Private, world_size: int) -> Decision | Halt:
    """The step in flight is always repeated, also where a rank had finished it."""
    if not intact_versions(reports):
        return decide(reports, private, world_size)
    return make_decision(reports, world_size, min(intact_versions(reports)))


def prepared_is_not_asked_for(reports: Sequence[ev.Stopped], private: Private, world_size: int) -> Decision | Halt:
    """A5: the barrier is there, but the decision looks at versions only."""
    return decide([msgspec.structs.replace(r, prepared=-1) for r in reports], private, world_size)


def private_state_is_forgotten(reports: Sequence[ev.Stopped], private: Private, world_size: int) -> Decision | Halt:
    """The dead rank's private state is taken to be there."""
    return decide(reports, {rank: () for rank in private if rank < 0}, world_size)


def one_source_and_the_rest_copies(reports: Sequence[ev.Stopped], private: Private, world_size: int) -> Decision | Halt:
    """A8: restore everyone from one, whether he needs it or not."""
    decision = decide(reports, private, world_size)
    if isinstance(decision, Halt):
        return decision
    source = decision.sources[0]
    others = tuple(rank for rank in range(world_size) if rank != source)
    return msgspec.structs.replace(decision, sources=(source,), targets=others)


@contextmanager
def replaced(name: str, by: Callable[..., object], module: str = "stages.deciding") -> Iterator[None]:
    """Another function of that name, in a module of the core: as a rule, where the controller decides."""
    names = vars(importlib.import_module(f"relight.core.{module}"))
    before = names[name]
    names[name] = by
    try:
        yield
    finally:
        names[name] = before


def outvoted_by_one(digests: Mapping[int, int | str], voters: Collection[int]) -> tuple[int, ...] | None:
    """As ours, but a voter that is alone is a majority."""
    if len(voters) != 1:
        return outvoted(digests, voters)
    (only,) = voters
    return tuple(rank for rank in sorted(digests) if digests[rank] != digests[only])


def planted_rule(rule: Rule) -> AbstractContextManager[None]:
    return replaced("decide", rule)
