"""The time a failure went unnoticed, planned or not; and how far a job is known to have got, however it ends."""

import msgspec
import pytest

from relight.core.account.job_stats import JobStats
from relight.core.account.noticing import PLANNED, detect_seconds
from relight.core.controller import Stage
from relight.core.protocol import events as ev
from relight.core.protocol.commands import FallbackTier, Notice
from relight.core.protocol.position import Phase, Position
from relight.core.recovery.decision import Decision
from tests.core.test_controller import Desk

NS = 10**9
STEP = Position(  # 2 s for a step; it went into this one at 100 s
    step=5, version=5, phase=Phase.BACKWARD, stamp_ns=100 * NS, commits=4, work_ns=(2 * NS, 5 * NS, 1 * NS)
)


def at(**changes: object) -> Position:
    return msgspec.structs.replace(STEP, **changes)


def test_the_time_of_a_planned_fault_is_known() -> None:
    assert detect_seconds("frozen", at(fault_ns=101 * NS), 111 * NS, 9.5) == (10.0, PLANNED)


@pytest.mark.parametrize(
    ("kind", "position", "waited_seconds", "expected"),
    [
        ("hang", STEP, 0.0, 28.0),  # 30 s, of which a step takes 2 s
        ("hang", at(commits=0, work_ns=(0, 0, 0)), 0.0, 30.0),
        ("frozen", at(phase=Phase.OUTSIDE), 10.0, 10.0),  # an evaluation before it was stopped is no loss
        ("host lost", Position(), 15.0, 15.0),
        ("killed", STEP, 0.0, 28.0),  # no agent was there to notice it
        ("killed", at(stamp_ns=127 * NS), 0.0, None),  # within what steps take
        ("killed", at(phase=Phase.OUTSIDE), 0.0, None),  # that may have been an evaluation
        ("killed", at(commits=0), 0.0, None),
        ("exited", Position(), 0.0, None),
        ("corruption", STEP, 0.0, None),
    ],
)
def test_of_any_other_the_last_progress_tells(
    kind: str, position: Position, waited_seconds: float, expected: float | None
) -> None:
    seconds, how = detect_seconds(kind, position, 130 * NS, waited_seconds)
    assert seconds == expected
    assert how.startswith("estimated: ") == (expected is not None)


def frozen(position: Position = STEP) -> ev.Event:
    return ev.ProcessSuspected(
        process="w1", kind="frozen", evidence="stopped", position=position, noticed_ns=111 * NS, stopped_seconds=10.0
    )


def test_the_wait_for_noticing_is_lost_time_of_a_real_failure_too() -> None:
    desk = Desk(world_size=2, standbys=1).train()
    desk.tell(frozen())
    desk.exits("w1", step=5)
    desk.recover(5)
    (said,) = [order.why for order in desk.said if isinstance(order, Notice) and "recovered in" in order.why]
    assert said.startswith("recovered in 10.0")
    assert "(about 10.000 s of it until it was noticed)" in said
    report = desk.controller.report()
    (failure,), (recovery,) = report.failures, report.recoveries
    assert (failure.detect_seconds, failure.estimated) == (10.0, True)
    assert recovery.stages.detect_seconds == 10.0
    assert report.time_lost_seconds >= recovery.stages.total_seconds >= 10.0


def test_the_live_line_counts_from_a_planned_fault_as_the_report_does() -> None:
    desk = Desk(world_size=2, standbys=1).train()
    desk.tell(frozen(at(fault_ns=110 * NS)))
    desk.exits("w1", step=5)
    desk.recover(5)
    (said,) = [order.why for order in desk.said if isinstance(order, Notice) and "recovered in" in order.why]
    assert "(1.000 s of it until it was noticed)" in said
    assert not desk.controller.report().failures[0].estimated


# --- how far it got ---------------------------------------------------------------------------------------------
def test_a_job_that_ends_early_knows_how_far_it_got() -> None:
    stopped = Desk(world_size=2).train()
    stopped.tell(ev.ShutdownRequested(reason="SIGINT", version=4))
    assert stopped.controller.report().steps == stopped.controller.report().final_version == 4

    killed = Desk(world_size=1).train()
    killed.exits("w0", step=6)
    assert (killed.controller.stage, killed.controller.report().steps) == (Stage.ENDED, 6)

    raised = Desk(world_size=2).train()
    raised.raises("w0", "RelightError: no", step=3, kind="usage")
    assert (raised.controller.stage, raised.controller.report().steps) == (Stage.ENDED, 3)


def test_of_a_job_that_failed_nobody_has_compared_the_last_state() -> None:
    desk = Desk(world_size=2).train()
    desk.tell(ev.ShutdownRequested(reason="SIGINT", version=4))
    assert desk.controller.report().final_state_digest == ""


def test_steps_that_were_undone_are_not_counted() -> None:
    job_stats = JobStats(world_size=2, standbys=0)
    job_stats.committed(9, 1)
    job_stats.failures.add(None, "communication", "", None, 0, 1, 1.0)
    job_stats.recoveries.stopping(2, 1.0)
    decision = Decision(target=4, direction="back", reason="", sources=(), finishers=(), targets=())
    job_stats.decided(decision, [], 1.0, FallbackTier.CHECKPOINT, 5)
    assert job_stats.report().steps == 4
    job_stats.committed(9, 1)  # the page of a process of before
    assert job_stats.report().steps == 4
    job_stats.committed(5, 2)
    assert job_stats.report().steps == 5
