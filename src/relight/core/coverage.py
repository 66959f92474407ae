"""Which losses a job survives, from who holds which part of the state, and where. Pure; shown before the first step.

A loss is survived if each part of the state keeps a holder. One loss is that of a device (its process), or of a host
with all its devices; two are any two of these at once, before the first is replaced. Cases are counted, not tried one
by one: a job of ten thousand ranks has fifty million pairs.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import comb

import msgspec


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of loss: how many cases there are, and which of them the job does not survive."""

    what: str  # "a device", "two hosts", ...
    cases: int
    fatal: int
    examples: tuple[str, ...] = ()  # of fatal cases, the first few: "rank 3", "ranks 1 and 3", "node-0 and rank 5"

    @property
    def survived(self) -> int:
        return self.cases - self.fatal


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the state."""

    key: str
    ranks: tuple[int, ...]  # that hold it
    hosts: tuple[str, ...]  # of these
    parameter_bytes: int  # of the parameters in one copy


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """What the layout of a job's state is worth when something fails."""

    parts: tuple[Part, ...]
    losses: tuple[Loss, ...]


_EXAMPLES = 4
_Unit = int | str  # a rank, or a host


def coverage(groups: Mapping[str, Sequence[int]], hosts: Sequence[str], part_bytes: Mapping[str, int]) -> Coverage:
    """Count the losses that are survived.

    Args:
        groups: the holders of each part.
        hosts: of each rank.
        part_bytes: of each part's parameters.
    """
    parts = tuple(
        Part(
            key=key,
            ranks=tuple(holders),
            hosts=tuple(dict.fromkeys(hosts[rank] for rank in holders)),
            parameter_bytes=part_bytes.get(key, 0),
        )
        for key, holders in groups.items()
    )
    names = list(dict.fromkeys(hosts))
    lone_ranks = {part.ranks[0] for part in parts if len(part.ranks) == 1}
    lone_hosts = {part.hosts[0] for part in parts if len(part.hosts) == 1}
    rank_pairs = {part.ranks for part in parts if len(part.ranks) == 2}
    host_pairs = {tuple(sorted(part.hosts, key=names.index)) for part in parts if len(part.hosts) == 2}
    losses = [
        _one("a device", range(len(hosts)), lone_ranks),
        _two("two devices", range(len(hosts)), lone_ranks, rank_pairs),
        _one("a host", names, lone_hosts),
    ]
    if len(names) > 1:
        mixed = {pair for part in parts for pair in _host_and_rank(part, hosts)}
        losses += [
            _two("two hosts", names, lone_hosts, host_pairs),
            _both("a host and a device elsewhere", hosts, lone_hosts, lone_ranks, mixed),
        ]
    return Coverage(parts=parts, losses=tuple(losses))


def _host_and_rank(part: Part, hosts: Sequence[str]) -> Iterable[tuple[str, int]]:
    """The pairs of a host and a device on another one that hold all copies of a part."""
    for host in part.hosts:
        elsewhere = [rank for rank in part.ranks if hosts[rank] != host]
        if len(elsewhere) == 1:
            yield host, elsewhere[0]


def _one(what: str, units: Sequence[_Unit], lone: set[int] | set[str]) -> Loss:
    fatal = [(unit,) for unit in units if unit in lone]
    return _loss(what, len(units), len(fatal), fatal)


def _two(
    what: str, units: Sequence[_Unit], lone: set[int] | set[str], pairs: Iterable[tuple[int, ...] | tuple[str, ...]]
) -> Loss:
    """Fatal are pairs with a member that is fatal alone, and pairs that only together are."""
    together = [pair for pair in pairs if not lone.intersection(pair)]
    together.sort(key=lambda pair: [units.index(unit) for unit in pair])
    cases = comb(len(units), 2)
    return _loss(what, cases, len(together) + cases - comb(len(units) - len(lone), 2), together)


def _both(
    what: str, hosts: Sequence[str], lone_hosts: set[str], lone_ranks: set[int], pairs: set[tuple[str, int]]
) -> Loss:
    """A host, and a device on another host: fatal if either is alone, or if they are together."""
    together = sorted(pair for pair in pairs if pair[0] not in lone_hosts and pair[1] not in lone_ranks)
    cases = fatal = 0
    for name in dict.fromkeys(hosts):
        elsewhere = len(hosts) - hosts.count(name)
        cases += elsewhere
        fatal += elsewhere if name in lone_hosts else sum(hosts[rank] != name for rank in lone_ranks)
    return _loss(what, cases, fatal + len(together), together)


def _loss(what: str, cases: int, fatal: int, examples: Sequence[tuple[_Unit, ...]]) -> Loss:
    return Loss(what=what, cases=cases, fatal=fatal, examples=tuple(_named(case) for case in examples[:_EXAMPLES]))


def _named(case: tuple[_Unit, ...]) -> str:
    if all(isinstance(unit, int) for unit in case):
        return f"rank{'s' if len(case) > 1 else ''} {' and '.join(map(str, case))}"
    return " and ".join(f"rank {unit}" if isinstance(unit, int) else unit for unit in case)


def describe(covered: Coverage) -> tuple[str, ...]:
    """Lines for people, before the first step: what is held how often, and what is survived."""
    fewest, most = min(len(part.ranks) for part in covered.parts), max(len(part.ranks) for part in covered.parts)
    often = f"{most} rank{'s' if most > 1 else ''}" if fewest == most else f"{fewest} to {most} ranks"
    size = max(part.parameter_bytes for part in covered.parts) / 2**20
    head = (
        f"the state is divided into {len(covered.parts)} parts, up to {size:.1f} MiB of parameters each, each held by "
        f"{often}; a loss is survived if each part keeps a holder:"
    )
    return (head, *(f"  losing {loss.what}: {_describe_loss(loss)}" for loss in covered.losses))


def _describe_loss(loss: Loss) -> str:
    if not loss.fatal:
        return "always survived"
    if loss.fatal == loss.cases:
        return "never survived"
    which = f", not if it is {_among(loss)}" if loss.examples else ""
    return f"survived in {loss.survived} of {loss.cases} cases{which}"


def _among(loss: Loss) -> str:
    return "; ".join(loss.examples) + ("; ..." if loss.fatal > len(loss.examples) else "")
