"""The losses that a job survives, by the holders of each part of the state, and their hosts. Pure; shown at the start.

A loss is survived if each part of the state keeps a holder; or, where there are buddies, if each rank's snapshot is
left, its own or its buddy's. One loss is that of a device (its process), or of a host
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
    fatal: int  # in which replicas do not have all of the state
    examples: tuple[str, ...] = ()  # of fatal cases, the first few: "rank 3", "ranks 1 and 3", "node-0 and rank 5"
    from_buddies: int = 0  # of the fatal ones, those in which buddy memory has all of it

    @property
    def survived(self) -> int:
        """True if replicas suffice, with no finished step lost."""
        return self.cases - self.fatal


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the state."""

    key: str
    ranks: tuple[int, ...]  # that hold it
    hosts: tuple[str, ...]  # of these
    parameter_bytes: int  # of the parameters in one copy


class TierCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of having one tier, and of needing it. Bytes and seconds are estimates."""

    tier: str  # "replica", "buddy memory", "checkpoint"
    in_use: bool
    steps_lost: int | None  # at most, of the finished ones; of buddies besides those while a snapshot is on its way
    copied_bytes: int  # to restore one lost rank
    copy_seconds: float  # for that, at COPY_BYTES_PER_SECOND
    devices: int = 0  # that one more replica needs
    host_bytes: int = 0  # of memory, for each rank


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """The losses that the layout of a job's state survives."""

    parts: tuple[Part, ...]
    losses: tuple[Loss, ...]
    tiers: tuple[TierCost, ...] = ()


# Parameters are known before the first step, the optimizer's state is not: that of Adam is taken, two moments each.
STATE_PER_PARAMETER = 3
COPY_BYTES_PER_SECOND = 2**30  # of one replacement; through memory it is more, over a slow network less


_EXAMPLES = 4
_Unit = int | str  # a rank, or a host


def coverage(
    groups: Mapping[str, Sequence[int]],
    hosts: Sequence[str],
    part_bytes: Mapping[str, int],
    buddies: Sequence[int] = (),
    buddy_every: int = 0,
    checkpoint_every: int = 0,
) -> Coverage:
    """Count the losses that are survived.

    Args:
        groups: the holders of each part.
        hosts: of each rank.
        part_bytes: of each part's parameters.
        buddies: for each rank, who keeps its snapshots; empty if there are none.
        buddy_every: steps from snapshot to snapshot.
        checkpoint_every: steps from checkpoint to checkpoint; 0: there are none.
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
    mixed: set[tuple[str, int]] = set()
    if len(names) > 1:
        mixed = {pair for part in parts for pair in _host_and_rank(part, hosts)}
        losses += [
            _two("two hosts", names, lone_hosts, host_pairs),
            _both(hosts, lone_hosts, lone_ranks, mixed),
        ]
    if buddies:
        pairs: list[tuple[int | str, ...]] = [*rank_pairs, *host_pairs, *mixed]
        fatal = _Fatal(lone_ranks, lone_hosts, {frozenset(pair) for pair in pairs})
        losses = [_with_buddies(loss, fatal, hosts, buddies) for loss in losses]
    return Coverage(parts=parts, losses=tuple(losses), tiers=_costs(parts, hosts, buddy_every, checkpoint_every))


def _costs(
    parts: Sequence[Part], hosts: Sequence[str], buddy_every: int, checkpoint_every: int
) -> tuple[TierCost, ...]:
    copied = STATE_PER_PARAMETER * max(part.parameter_bytes for part in parts)
    seconds = copied / COPY_BYTES_PER_SECOND
    fewest = min(len(part.ranks) for part in parts)
    buddy, checkpoint = buddy_every or None, checkpoint_every or None
    return (
        TierCost(
            tier="replica",
            in_use=fewest > 1,
            steps_lost=0,
            copied_bytes=copied,
            copy_seconds=seconds,
            devices=len(hosts) // max(1, fewest),
        ),
        TierCost(
            tier="buddy memory",
            in_use=buddy is not None,
            steps_lost=buddy,
            copied_bytes=copied,
            copy_seconds=seconds,
            host_bytes=4 * copied,
        ),
        TierCost(
            tier="checkpoint",
            in_use=checkpoint is not None,
            steps_lost=checkpoint,
            copied_bytes=copied,
            copy_seconds=seconds,
            host_bytes=copied,
        ),
    )


class _Fatal(msgspec.Struct, frozen=True):
    """Losses that are not survived from replicas."""

    ranks: set[int]  # alone
    hosts: set[str]  # alone
    pairs: set[frozenset[int | str]]  # together

    def __call__(self, case: Iterable[int | str]) -> bool:
        lost = frozenset(case)
        return bool(lost & self.ranks or lost & self.hosts) or lost in self.pairs


def _with_buddies(loss: Loss, fatal: _Fatal, hosts: Sequence[str], buddies: Sequence[int]) -> Loss:
    """Count the fatal cases for which buddy memory has all of the state: those that take no rank with its buddy."""
    links = list(enumerate(buddies))
    together = {hosts[rank] for rank, buddy in links if hosts[rank] == hosts[buddy]}  # hosts that take both
    names = list(dict.fromkeys(hosts))
    ends: set[frozenset[int | str]] = set()
    if loss.what == "two devices":
        ends = {frozenset(link) for link in links}
    elif loss.what == "a host":
        ends = {frozenset((name,)) for name in together}
    elif loss.what == "two hosts":
        ends = {frozenset((hosts[rank], hosts[buddy])) for rank, buddy in links if hosts[rank] != hosts[buddy]}
        ends |= {frozenset((name, other)) for name in together for other in names if name != other}
    elif loss.what == "a host and a device elsewhere":
        for one, other in (*links, *((buddy, rank) for rank, buddy in links)):
            if hosts[one] != hosts[other]:
                ends.add(frozenset((hosts[one], other)))
        ends |= {frozenset((name, rank)) for name in together for rank, host in enumerate(hosts) if host != name}
    lost = sum(map(fatal, ends))
    return msgspec.structs.replace(loss, from_buddies=loss.fatal - lost)


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


def _both(hosts: Sequence[str], lone_hosts: set[str], lone_ranks: set[int], pairs: set[tuple[str, int]]) -> Loss:
    """A host, and a device on another host: fatal if either is alone, or if they are together."""
    together = sorted(pair for pair in pairs if pair[0] not in lone_hosts and pair[1] not in lone_ranks)
    cases = fatal = 0
    for name in dict.fromkeys(hosts):
        elsewhere = len(hosts) - hosts.count(name)
        cases += elsewhere
        fatal += elsewhere if name in lone_hosts else sum(hosts[rank] != name for rank in lone_ranks)
    return _loss("a host and a device elsewhere", cases, fatal + len(together), together)


def _loss(what: str, cases: int, fatal: int, examples: Sequence[tuple[_Unit, ...]]) -> Loss:
    return Loss(what=what, cases=cases, fatal=fatal, examples=tuple(_named(case) for case in examples[:_EXAMPLES]))


def _named(case: tuple[_Unit, ...]) -> str:
    if all(isinstance(unit, int) for unit in case):
        return f"rank{'s' if len(case) > 1 else ''} {' and '.join(map(str, case))}"
    return " and ".join(f"rank {unit}" if isinstance(unit, int) else unit for unit in case)


def describe(covered: Coverage) -> tuple[str, ...]:
    """Lines for people, before the first step: what is held how often, what is survived, and what more would cost."""
    fewest, most = min(len(part.ranks) for part in covered.parts), max(len(part.ranks) for part in covered.parts)
    often = f"{most} rank{'s' if most > 1 else ''}" if fewest == most else f"{fewest} to {most} ranks"
    size = max(part.parameter_bytes for part in covered.parts) / 2**20
    head = (
        f"the state is divided into {len(covered.parts)} parts, up to {size:.1f} MiB of parameters each, each held by "
        f"{often}; a loss is survived if each part keeps a holder:"
    )
    below = {cost.tier: cost for cost in covered.tiers if cost.in_use and cost.steps_lost}
    return (
        head,
        *(
            f"  losing {loss.what}: {_describe_loss(loss, below)}"
            for loss in covered.losses
            if not _says_nothing(loss, below)
        ),
        *(f"  {line}" for line in _describe_costs(covered)),
    )


def _says_nothing(loss: Loss, below: Mapping[str, TierCost]) -> bool:
    """Return whether a loss is obvious: that of the only host, without checkpoints."""
    return loss.what == "a host" and loss.cases == loss.fatal == 1 and "checkpoint" not in below


def _describe_loss(loss: Loss, below: Mapping[str, TierCost]) -> str:
    if not loss.fatal:
        return "always survived"
    if not below:
        if loss.fatal == loss.cases:
            return "never survived: the job ends"
        which = f", not if it is {_among(loss)}" if loss.examples else ""
        return f"survived in {loss.survived} of {loss.cases} cases{which}"
    rest = loss.fatal - loss.from_buddies
    counts = {"replicas": loss.survived, "buddy memory": loss.from_buddies}
    if "checkpoint" in below:
        counts["a checkpoint"], rest = rest, 0
    said = [f"{count} from {source}" for source, count in counts.items() if count]
    if loss.cases in counts.values():
        return f"always survived, {said[0].partition(' ')[2]}"
    if rest == loss.cases:
        return "never survived: the job ends"
    ends = f", in {rest} the job ends" if rest else ""
    return f"of {loss.cases} cases {', '.join(said)}{ends}"


def _describe_costs(covered: Coverage) -> Iterable[str]:
    """Describe what tiers in use lose and take; if a loss is not survived, also what the others would cost."""
    worst = covered.losses[0].fatal or covered.losses[1].fatal
    for cost in covered.tiers:
        copied = f"{cost.copied_bytes / 2**20:.1f} MiB"
        if cost.tier == "replica" and worst:
            yield f"one more replica would need {cost.devices} devices, with {copied} of state each"
        elif cost.tier == "buddy memory" and (cost.in_use or worst):
            memory = f"{cost.host_bytes / 2**20:.1f} MiB of host memory for each rank"
            if cost.in_use:
                yield (
                    f"from buddy memory at most about {cost.steps_lost} steps are computed again, and {copied} copied "
                    f"for each lost rank (about {cost.copy_seconds:.2g} s at 1 GiB/s); it takes {memory}"
                )
            else:
                yield f"training.buddy(every=...) would take {memory}, and survive the loss of any one device"
        elif cost.tier == "checkpoint" and cost.in_use and worst:
            yield f"from a checkpoint at most {cost.steps_lost} steps are computed again, and each part is read once"


def _among(loss: Loss) -> str:
    return "; ".join(loss.examples) + ("; ..." if loss.fatal > len(loss.examples) else "")
