"""The recovery rule, line by line, and over every set of reports that a step with one fence can leave."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relight.core.protocol.events import Stopped
from relight.core.recovery.decision import Decision, Halt, decide

BASE = 7  # the step under way in all tables


def stopped(
    rank: int, version: int = BASE, *, prepared: bool = False, blank: bool = False, torn: bool = False, step: int = BASE
) -> Stopped:
    return Stopped(
        process=f"w{rank}",
        rank=rank,
        generation=2,
        step=step,
        version=0 if blank else version,
        lineage="" if blank else f"lineage {version}",
        prepared=version if prepared else -1,
        torn=torn,
        blank=blank,
        stop_seconds=0.0,
        restore_address=f"address {rank}",
    )


def ready(rank: int, version: int = BASE) -> Stopped:
    return stopped(rank, version, prepared=True)


def blank(rank: int) -> Stopped:
    return stopped(rank, blank=True)


def decided(
    reports: list[Stopped], private: Mapping[int, set[int]] | None = None, world_size: int | None = None
) -> Decision:
    decision = decide(reports, private or {}, world_size or len(reports))
    assert isinstance(decision, Decision), decision
    return decision


def halted(reports: list[Stopped], private: Mapping[int, set[int]] | None = None, world_size: int = 3) -> str:
    decision = decide(reports, private or {}, world_size)
    assert isinstance(decision, Halt), decision
    return decision.reason


HELD = {BASE, BASE + 1}  # what a process that died prepared leaves


@pytest.mark.parametrize(
    ("reports", "private", "target", "direction", "finishers"),
    [
        # none is prepared: none can have written
        ([stopped(0), stopped(1), blank(2)], {2: {BASE}}, BASE, "back", ()),
        # a dead rank that was prepared does not change that
        ([stopped(0), stopped(1), blank(2)], {2: HELD}, BASE, "back", ()),
        # one unprepared survivor: no rank passed the barrier
        ([ready(0), stopped(1), blank(2)], {2: HELD}, BASE, "back", ()),
        ([ready(0), ready(1), stopped(2)], {}, BASE, "back", ()),
        # everyone prepared
        ([ready(0), ready(1), blank(2)], {2: HELD}, BASE + 1, "forward", (0, 1)),
        ([ready(0), ready(1), ready(2)], {}, BASE + 1, "forward", (0, 1, 2)),
        # some are through already
        ([ready(0), stopped(1, BASE + 1), blank(2)], {2: HELD}, BASE + 1, "forward", (0,)),
        # all are through: base is their version, and no rank has begun the next step
        ([stopped(0, BASE + 1), stopped(1, BASE + 1), blank(2)], {2: HELD}, BASE + 1, "as they are", ()),
        # ... or some have
        ([stopped(0, step=BASE), stopped(1, step=BASE - 1)], {}, BASE, "back", ()),
        # all prepared, but a dead rank was not: its private state for BASE + 1 does not exist, so no rank passed
        ([ready(0), ready(1), blank(2)], {2: {BASE}}, BASE, "back", ()),
        ([ready(0), blank(1), blank(2)], {1: HELD, 2: {BASE}}, BASE, "back", ()),
        # a torn rank is worth as much as a blank one
        ([ready(0), stopped(1, torn=True)], {1: HELD}, BASE + 1, "forward", (0,)),
        ([stopped(0), stopped(1, BASE + 1, torn=True)], {}, BASE, "back", ()),
        # one survivor of many
        ([stopped(3), blank(0), blank(1), blank(2)], {0: {BASE}, 1: {BASE}, 2: HELD}, BASE, "back", ()),
        # a restored replacement counts like a survivor, and its predecessor's private state is not asked for
        ([blank(0), stopped(1, BASE + 1)], {0: {BASE + 1}}, BASE + 1, "as they are", ()),
    ],
)
def test_the_rule(
    reports: list[Stopped], private: dict[int, set[int]], target: int, direction: str, finishers: tuple[int, ...]
) -> None:
    decision = decided(reports, private)
    assert (decision.target, decision.direction, decision.finishers) == (target, direction, finishers)
    intact = tuple(sorted(r.rank for r in reports if not r.blank and not r.torn))
    assert decision.sources == intact
    assert set(decision.targets) == set(range(len(reports))) - set(intact)


def test_ranks_that_sent_no_report_are_targets() -> None:
    assert decided([stopped(1)], {0: {BASE}, 2: {BASE}}, world_size=3).targets == (0, 2)


def test_the_order_of_reports_does_not_matter() -> None:
    reports = [ready(0), stopped(1, BASE + 1), blank(2), ready(3)]
    assert decided(reports, {2: HELD}) == decided(list(reversed(reports)), {2: HELD})


def test_halt_if_nobody_is_intact() -> None:
    reason = halted([blank(0), stopped(1, torn=True)])
    assert "no intact replica" in reason
    assert "1 dead, 1 interrupted inside a write, 1 blank" in reason
    late = msgspec.structs.replace(stopped(1, torn=True), torn_by="in step 7 a collective came late at train.py:3")
    assert "1 blank: in step 7 a collective came late at train.py:3" in halted([blank(0), late])


def test_halt_if_a_rank_is_two_versions_ahead() -> None:
    assert "rank 1 is at version 9 while another is at 7" in halted([stopped(0), stopped(1, BASE + 2)])


def test_halt_if_two_histories_lead_to_one_version() -> None:
    other = Stopped(
        process="w1",
        rank=1,
        generation=2,
        step=BASE,
        version=BASE,
        lineage="another",
        prepared=-1,
        torn=False,
        blank=False,
        stop_seconds=0.0,
        restore_address="",
    )
    assert "another history" in halted([stopped(0), other])


def test_halt_if_the_barrier_let_somebody_through_alone() -> None:
    assert "must not happen" in halted([stopped(0), stopped(1, BASE + 1), ready(2)])


def test_halt_if_the_private_state_of_the_base_is_gone() -> None:
    assert "rank 2 for version 7" in halted([stopped(0), stopped(1), blank(2)], {2: set()})
    assert "rank 2 for version 7" in halted([stopped(0), ready(1), blank(2)], {2: {BASE + 1}})
    # lost together with its agent: that there is none for version 8 does not prove that no rank finished step 7
    assert "rank 2 for version 7" in halted([ready(0), ready(1), blank(2)], {2: set()})


def test_halt_if_the_private_state_of_a_finished_version_is_gone() -> None:
    assert "rank 2 for version 8" in halted([ready(0), stopped(1, BASE + 1), blank(2)], {2: {BASE}})


# --- every situation that can arise -------------------------------------------------------------------------------
# Stages of one rank in step BASE. Two gates make the rest: no gradient is complete before all ranks contributed,
# and no rank passes the barrier before all entered it. Apart from that each rank goes on, or stays, as it pleases:
# that is what "an all-reduce is not atomic" means.
COMPUTING, CONTRIBUTED, REDUCED, PREPARED, ENTERED, PASSED, FINISHED = range(7)
_GATES = {REDUCED: CONTRIBUTED, PASSED: ENTERED}


@dataclass
class Rank:
    stage: int = COMPUTING
    alive: bool = True
    blank: bool = False
    private: set[int] = field(default_factory=lambda: {BASE})
    left_behind: set[int] = field(default_factory=set)  # by dead holders of this rank

    @property
    def intact(self) -> bool:
        return self.alive and not self.blank

    @property
    def version(self) -> int:
        return BASE + (self.stage == FINISHED)


class Step:
    """Step BASE on some ranks, up to a stop, and what the recovery does to them afterwards."""

    def __init__(self, world_size: int) -> None:
        self.ranks = [Rank() for _ in range(world_size)]
        self.finished = BASE  # newest version that anyone finished, dead or alive

    def move(self, number: int) -> None:
        """One rank takes its next step, if the gate in front of it is open."""
        rank = self.ranks[number % len(self.ranks)]
        if not rank.intact or rank.stage == FINISHED:
            return
        needed = _GATES.get(rank.stage + 1, COMPUTING)
        if all(other.stage >= needed for other in self.ranks):
            rank.stage += 1
        if rank.stage == PREPARED:
            rank.private.add(BASE + 1)
        if rank.stage == FINISHED:
            self.finished = BASE + 1

    def kill(self, number: int) -> None:
        """Unless it is the last one that holds anything."""
        rank = self.ranks[number % len(self.ranks)]
        if rank.alive and (rank.blank or sum(r.intact for r in self.ranks) > 1):
            rank.alive = False
            rank.left_behind |= rank.private

    def stop(self) -> None:
        """A write in progress ends first; every dead rank gets a blank replacement."""
        for rank in self.ranks:
            if rank.intact and rank.stage == PASSED:
                rank.stage, self.finished = FINISHED, BASE + 1
            elif not rank.alive:
                rank.alive, rank.blank, rank.private = True, True, set()

    def reports(self) -> list[Stopped]:
        return [
            blank(number) if rank.blank else stopped(number, rank.version, prepared=PREPARED <= rank.stage < FINISHED)
            for number, rank in enumerate(self.ranks)
        ]

    def private(self) -> dict[int, set[int]]:
        return {number: rank.left_behind for number, rank in enumerate(self.ranks) if rank.blank}

    def obey(self, decision: Decision, number: int) -> None:
        """One rank carries out the decision, as far as it concerns it."""
        number %= len(self.ranks)
        rank = self.ranks[number]
        if rank.blank and any(self.ranks[source].version == decision.target for source in decision.sources):
            rank.blank, rank.private = False, {decision.target}
            rank.stage = FINISHED if decision.target > BASE else COMPUTING
        elif rank.intact and number in decision.finishers:
            rank.stage, self.finished = FINISHED, BASE + 1
        elif rank.intact and decision.target == BASE:
            rank.stage = COMPUTING  # its gradient is dropped; the private state that it kept is still there


ranks = st.integers(0, 5)
some = st.lists(ranks, max_size=40)


def check(step: Step) -> Decision:
    decision = decide(step.reports(), step.private(), len(step.ranks))
    assert isinstance(decision, Decision), decision
    intact = {number for number, rank in enumerate(step.ranks) if rank.intact}
    assert decision.target >= step.finished, "a version that some rank finished is lost"
    assert not intact & set(decision.targets), "a good copy is a target"
    assert set(decision.sources) == intact
    assert intact | set(decision.targets) == set(range(len(step.ranks)))
    for number in intact:
        rank = step.ranks[number]
        if rank.version == decision.target:
            assert number not in decision.finishers
        else:
            assert rank.version == decision.target - 1, "a survivor can reach the target by one step only"
            assert rank.stage >= PREPARED, "a survivor must not go forward unprepared"
            assert number in decision.finishers
    for number, versions in step.private().items():
        assert decision.target in versions, f"the private state of rank {number} does not exist"
    return decision


@settings(max_examples=400, deadline=None)
@given(st.integers(2, 6), some, st.lists(ranks, min_size=1, max_size=5), some)
def test_no_situation_loses_a_finished_version(
    world_size: int, before: list[int], dead: list[int], after: list[int]
) -> None:
    step = Step(world_size)
    for rank in before:
        step.move(rank)
    for rank in dead:
        step.kill(rank)
    for rank in after:  # survivors go on until Stop reaches them
        step.move(rank)
    step.stop()
    check(step)


@settings(max_examples=400, deadline=None)
@given(
    st.integers(2, 5),
    some,
    st.lists(st.tuples(st.lists(ranks, min_size=1, max_size=4), some, st.lists(ranks, max_size=8)), max_size=4),
)
def test_nor_do_failures_during_the_recovery(
    world_size: int, before: list[int], rounds: list[tuple[list[int], list[int], list[int]]]
) -> None:
    step = Step(world_size)
    for rank in before:
        step.move(rank)
    decision: Decision | None = None
    for dead, after, obedient in rounds:
        for rank in dead:
            step.kill(rank)
        if decision is None:
            for rank in after:
                step.move(rank)
        step.stop()
        decision = check(step)
        for rank in obedient:
            step.obey(decision, rank)


def test_the_situations_are_not_all_alike() -> None:
    """The generator reaches both sides of the rule, and the case that the published one loses."""
    step = Step(3)
    for rank in [*range(3)] * ENTERED + [2] * 2:
        step.move(rank)
    assert step.finished == BASE + 1
    step.kill(2)
    step.stop()
    assert [r.prepared for r in step.reports()] == [BASE, BASE, -1]
    assert check(step).target == BASE + 1
    step = Step(3)
    for rank in [0, 1, 2, 0, 0]:
        step.move(rank)
    step.kill(2)
    step.stop()
    assert [r.prepared for r in step.reports()] == [BASE, -1, -1]
    assert check(step).target == BASE
