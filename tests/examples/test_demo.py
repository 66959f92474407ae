"""Conclusions of the demo from two reports. The demo itself takes minutes and is run by `make demo`."""

import msgspec

from examples.demo import ACTIONS, PHASES, POINTS, find_failure, find_problems, make_plan
from relight.chaos.plan import describe_fault
from relight.core.account.report import FailureReport, JobReport, RecoveryReport
from relight.core.protocol.fault import Action, Fault, Point

KILL = Fault(action=Action.KILL, point=Point.BACKWARD, rank=1, step=3)
KILL_SOURCE = Fault(action=Action.KILL, point=Point.RESTORE_SEND, recovery=1)
KILLED = FailureReport(
    number=1,
    rank=1,
    process="w1",
    kind="killed",
    step=3,
    phase="BACKWARD",
    evidence="was killed by SIGKILL",
    generation=1,
    noticed_seconds=1.0,
)
SOURCE_KILLED = msgspec.structs.replace(KILLED, number=2, rank=0, process="w0", phase="PARKED", generation=2)
RECOVERY = RecoveryReport(
    number=1, generation=3, failures=(1, 2), decision="back", target_version=3, reason="", replaced=(0, 1)
)
REPORT = JobReport(job="a", steps=8, final_version=8, final_state_digest="1234", final_lineage="5678")
DISTURBED = msgspec.structs.replace(REPORT, failures=(KILLED, SOURCE_KILLED), recoveries=(RECOVERY,))


def test_the_plan_has_every_action_at_every_point_once() -> None:
    plan = make_plan()
    inside_steps = [(fault.action, fault.point) for fault in plan if fault.recovery is None]
    assert sorted(inside_steps) == sorted((action, point) for action in ACTIONS for point in POINTS)
    assert len({describe_fault(fault) for fault in plan}) == len(plan) == len(inside_steps) + 2


def test_points_and_phases_name_the_same_places() -> None:
    assert PHASES.keys() == POINTS.keys()


def test_a_fault_is_found_in_the_report() -> None:
    assert find_failure(KILL, DISTURBED) == KILLED
    assert find_failure(KILL_SOURCE, DISTURBED) == SOURCE_KILLED


def test_another_rank_step_phase_or_action_is_another_failure() -> None:
    for change in ({"rank": 2}, {"step": 4}, {"point": Point.FORWARD}, {"action": Action.SEGFAULT}):
        assert find_failure(msgspec.structs.replace(KILL, **change), DISTURBED) is None


def test_nothing_speaks_against_equal_runs() -> None:
    assert find_problems((KILL, KILL_SOURCE), DISTURBED, REPORT) == []


def test_a_fault_that_did_not_strike_is_a_problem() -> None:
    report = msgspec.structs.replace(DISTURBED, failures=(KILLED,))
    assert find_problems((KILL, KILL_SOURCE), report, REPORT) == [
        "planned, but did not strike: kill the restore source during restore 1"
    ]


def test_another_final_state_is_a_problem() -> None:
    other = msgspec.structs.replace(REPORT, final_state_digest="1235")
    assert find_problems((KILL,), DISTURBED, other) == ["DIFFERENT: the final states are not the same"]


def test_an_undisturbed_run_in_which_something_failed_is_a_problem() -> None:
    other = msgspec.structs.replace(REPORT, failures=(KILLED,))
    assert len(find_problems((KILL,), DISTURBED, other)) == 1
