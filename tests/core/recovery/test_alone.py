"""Ranks that went on alone after a collective between two steps: one is followed, in every mixture of reports."""

import msgspec
import pytest

from relight.core.protocol.events import Stopped
from relight.core.recovery.alone import follow_one, where_all_meet
from relight.core.recovery.decision import Decision, decide
from relight.core.recovery.shards import Shards
from tests.core.recovery.test_decision import blank, ready, stopped

BASE = 7


def alone(rank: int) -> Stopped:
    return msgspec.structs.replace(stopped(rank, step=BASE - 1), alone=True)


def followed(
    *reports: Stopped, differ: bool, copies: tuple[int, ...] = (), parts: tuple[str, ...] = ()
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    private = {report.rank: {BASE, BASE + 1} for report in reports if report.blank}
    decision = follow_one(decide(reports, private, len(reports)), reports, copies, Shards(parts), differ=differ)
    assert isinstance(decision, Decision)
    return decision.sources, decision.targets


def test_copies_come_from_a_rank_that_has_completed_the_collective() -> None:
    assert followed(alone(0), blank(1), stopped(2), differ=False) == ((2,), (1,))


def test_where_states_differ_the_others_copy_it_too() -> None:
    assert followed(alone(0), blank(1), stopped(2), differ=True) == ((2,), (0, 1))


def test_if_no_rank_has_completed_it_all_follow_the_lowest() -> None:
    assert followed(blank(0), alone(1), alone(2), differ=False) == ((1,), (0,))
    assert followed(blank(0), alone(1), alone(2), differ=True) == ((1,), (0, 2))


def test_a_rank_that_finishes_its_step_only_now_may_go_alone_after_it() -> None:
    ahead = msgspec.structs.replace(stopped(1, BASE + 1), alone=True)
    assert followed(ready(0), ahead, blank(2), differ=False) == ((0,), (2,))


def test_a_copy_of_this_recovery_is_followed_last() -> None:
    assert followed(stopped(0), alone(1), alone(2), copies=(0,), differ=True) == ((1,), (0, 2))


def test_each_part_of_a_divided_state_has_a_rank_to_follow() -> None:
    reports = alone(0), alone(1), blank(2), stopped(3)
    assert followed(*reports, differ=True, parts=("a", "b", "a", "b")) == ((0, 3), (1, 2))


def test_nothing_changes_where_no_rank_went_alone() -> None:
    assert followed(stopped(0), stopped(1), blank(2), differ=True) == ((0, 1), (2,))


def waiting(rank: int, version: int = BASE, *, at: int = 1) -> Stopped:
    return msgspec.structs.replace(stopped(rank, version, step=version - 1), at_collective=at)


def coming(rank: int) -> Stopped:
    return msgspec.structs.replace(ready(rank), comes=True)


def giving(rank: int, results: int, version: int = BASE) -> Stopped:
    return msgspec.structs.replace(stopped(rank, version), gives=results)


@pytest.mark.parametrize(
    ("reports", "meeting"),
    [
        # All wait in one collective, or come to the first one.
        ((waiting(0), blank(1), waiting(2)), (1, (), (0, 2))),
        ((waiting(0, BASE + 1), blank(1), ready(2)), (1, (), (0,))),  # rank 2 comes to it once it has finished
        ((ready(0), blank(1), ready(2)), None),  # whether the code has a collective is not known
        ((coming(0), blank(1), coming(2)), (1, (), (0, 2))),
        ((coming(0), blank(1), ready(2)), None),
        ((blank(0), waiting(1)), (1, (), (1,))),
        ((waiting(0, at=3), blank(1), waiting(2, at=3)), (3, (), (0, 2))),
        # Some lack results that others have.
        ((waiting(0, at=3), blank(1), waiting(2)), (3, (2,), (0,))),
        ((waiting(0, BASE + 1, at=2), blank(1), ready(2)), (2, (2,), (0,))),
        ((waiting(0), blank(1), stopped(2)), None),  # rank 2 has completed the collective, and cannot give its result
        # All have run that code.
        ((giving(0, 2), blank(1), giving(2, 2)), (0, (), (0, 2))),
        ((giving(0, 0), blank(1), giving(2, 0)), (0, (), (0, 2))),  # code without collectives
        ((giving(0, 2), blank(1), giving(2, -1)), None),  # rank 2 has changed the state, or lacks a result
        ((giving(0, 2), blank(1), giving(2, 1)), None),
        ((giving(0, 0, BASE + 1), blank(1), ready(2)), (0, (), (0,))),  # rank 2 runs it once it has finished
        # Some have run it, and others wait or come.
        ((giving(0, 2), blank(1), waiting(2, at=2)), (0, (2,), (0,))),
        ((giving(0, 2), blank(1), waiting(2, at=3)), None),  # rank 0 has called no third one
        ((giving(0, 2, BASE + 1), blank(1), ready(2)), (0, (2,), (0,))),
        ((giving(0, -1), blank(1), waiting(2)), None),
    ],
)
def test_a_replacement_that_runs_the_code_before_a_step_meets_all_others(
    reports: tuple[Stopped, ...], meeting: tuple[int, tuple[int, ...], tuple[int, ...]] | None
) -> None:
    private = {report.rank: {BASE, BASE + 1} for report in reports if report.blank}
    decision = decide(reports, private, len(reports))
    assert isinstance(decision, Decision)
    assert where_all_meet(decision, reports, gone_on=False) == meeting
    assert where_all_meet(decision, reports, gone_on=True) is None  # the lost rank had run that code
