"""Sentences about a job: each names what happened and what would have helped, and nothing that is not known."""

from typing import Any

import msgspec
import pytest

from relight.core.account.report import (
    DoubtReport,
    FailureReport,
    JobReport,
    RecoveryReport,
    RecoveryStages,
    StorageWait,
)
from relight.timeline.explain import explain


def failure(number: int = 1, rank: int = 1, kind: str = "killed", evidence: str = "was killed") -> FailureReport:
    return FailureReport(
        number=number,
        rank=rank,
        process=f"w{rank}",
        kind=kind,
        evidence=evidence,
        step=7,
        phase="FORWARD",
        generation=1,
        noticed_seconds=1.0,
    )


def recovery(number: int = 1, kind: str = "standby", **stages: Any) -> RecoveryReport:
    return RecoveryReport(
        number=number,
        generation=number + 1,
        failures=(number,),
        decision="back",
        target_version=7,
        reason="",
        replaced=(1,),
        replacement_kind=kind,
        stages=RecoveryStages(**stages),
        moved_bytes=2**30,
    )


def job(failures: list[FailureReport], recoveries: list[RecoveryReport], **fields: Any) -> JobReport:
    given: dict[str, Any] = {"world_size": 4, "standbys": 1, "steps": 10, "until": 10}
    given |= {"wall_seconds": 100.0, "time_lost_seconds": 5.0}
    return JobReport(job="j", failures=tuple(failures), recoveries=tuple(recoveries), **(given | fields))


def test_nothing_failed() -> None:
    assert explain(job([], [])) == ["All 10 steps are done in 1 min 40 s, and nothing failed."]


def test_a_quick_recovery_needs_no_advice() -> None:
    outcome, one = explain(job([failure()], [recovery(detect_seconds=0.001, total_seconds=0.04)]))
    assert "1 failure cost 5.00 s (5.00% of the time) and 0 steps computed again" in outcome
    assert one == ("Recovery 1: rank 1 was lost in FORWARD of step 7 (was killed). Training went on after 40.0 ms.")


def test_the_rate_of_a_small_copy_tells_nothing() -> None:
    small = msgspec.structs.replace(recovery(copy_seconds=2.0, total_seconds=2.0), moved_bytes=16_000)
    assert explain(job([failure()], [small]))[1].endswith("2.00 s of it went into copying the state.")


@pytest.mark.parametrize(
    ("failed", "kind", "stages", "expected"),
    [
        ({"kind": "hang"}, "standby", {"detect_seconds": 30.0}, "--hang-timeout-seconds"),
        ({"kind": "frozen"}, "standby", {"detect_seconds": 1.0}, "--frozen-timeout-seconds"),
        ({}, "fresh process", {"replace_seconds": 4.0}, "--standby 2 keeps one warm"),
        ({}, "standby", {"replace_seconds": 4.0}, "--standby 2 keeps another one warm"),
        ({}, "standby", {"stop_seconds": 2.0}, "long work between two steps"),
        ({}, "standby", {"copy_seconds": 10.0}, "1,024 MiB at 102 MiB/s, far below what memory gives"),
        ({}, "standby", {"copy_seconds": 1.0}, "1,024 MiB at 1,024 MiB/s."),
        ({}, "standby", {"reform_seconds": 3.0}, "connects 4 ranks"),
    ],
)
def test_the_slowest_stage_is_named_with_what_would_have_helped(
    failed: dict[str, Any], kind: str, stages: dict[str, Any], expected: str
) -> None:
    seconds = sum(stages.values())
    (_, one) = explain(job([failure(**failed)], [recovery(kind=kind, total_seconds=seconds + 0.01, **stages)]))
    assert expected in one
    assert one.count(" of it went into ") == 1


def test_failures_that_struck_during_a_recovery() -> None:
    restarted = msgspec.structs.replace(recovery(total_seconds=0.1), restarts=2)
    assert "2 more failures struck while it recovered" in explain(job([failure()], [restarted]))[1]


def test_one_rank_that_fails_again_and_again() -> None:
    failures = [failure(number) for number in range(1, 5)]
    recoveries = [recovery(number, total_seconds=0.1) for number in range(1, 5)]
    assert "4 of 4 failures are rank 1's" in explain(job(failures, recoveries))[-1]
    spread = [failure(number, rank=number % 4) for number in range(1, 5)]
    assert "failures are rank" not in " ".join(explain(job(spread, recoveries)))


def test_what_a_warm_standby_is_worth() -> None:
    recoveries = [recovery(1, total_seconds=0.1), recovery(2, kind="fresh process", total_seconds=3.1)]
    failures = [failure(1), failure(2, rank=2)]
    assert "1 recovery without a warm standby took 3.00 s longer" in explain(job(failures, recoveries))[-1]


def test_a_job_that_ended_early() -> None:
    outcome, rest = explain(job([failure()], [], error="every replica is lost\nResume from a checkpoint", steps=4))
    assert outcome == "The job ended early, after 4 of 10 steps: every replica is lost"
    assert rest.startswith("Without a recovery: rank 1 was lost in FORWARD of step 7")


def test_what_a_script_printed_cannot_move_the_cursor() -> None:
    said = explain(job([failure(evidence="\x1b[2J")], [recovery(total_seconds=0.1)]))
    assert "\x1b" not in "".join(said)


def test_slow_storage_is_named_where_it_held_a_recovery_up() -> None:
    waits = (StorageWait(at_seconds=1.0, seconds=1.8), StorageWait(at_seconds=50.0, seconds=9.0))
    stages = recovery(stop_seconds=2.0, total_seconds=2.1)
    said = explain(job([failure()], [stages], storage_waits=waits))[1]
    assert "1.80 s of it passed until the journal was safe on the disk" in said
    assert "--run-dir on a local disk" in said
    assert "a rank pauses" not in said
    assert "a rank pauses" in explain(job([failure()], [stages], storage_waits=waits[1:]))[1]


def test_a_hang_whose_begin_nobody_knows_is_told_by_its_last_sign_of_progress() -> None:
    hung = msgspec.structs.replace(failure(kind="hang"), idle_seconds=31.5)
    said = explain(job([hung], [recovery(total_seconds=0.2)]))[1]
    assert "31.5 s had passed since the last sign of progress" in said
    assert "--hang-timeout-seconds" in said
    known = explain(job([hung], [recovery(detect_seconds=31.0, total_seconds=31.2)]))[1]
    assert known.count("--hang-timeout-seconds") == 1
    assert "last sign of progress" not in known
    frozen = msgspec.structs.replace(failure(kind="frozen"), idle_seconds=1.2)
    assert "--frozen-timeout-seconds" in explain(job([frozen], [recovery(total_seconds=0.2)]))[1]


def test_what_else_would_have_helped() -> None:
    lost = explain(job([failure(kind="host lost")], [recovery(total_seconds=0.2)]))[-1]
    assert "--agent-timeout-seconds" in lost
    hungry = explain(job([failure(kind="out of memory", rank=3)], [recovery(total_seconds=0.2)]))[-1]
    assert "Memory ran out on rank 3" in hungry
    wrong = explain(job([failure(kind="corruption", rank=2)], [recovery(total_seconds=0.2)]))[-1]
    assert "The state of rank 2 had changed by itself" in wrong
    cut = explain(job([failure()], [recovery(total_seconds=0.2)], cut_collectives=2))[-1]
    assert "2 collectives" in cut
    assert "before optimizer.step()" in cut


def test_where_several_recoveries_lost_most() -> None:
    failures = [failure(number, rank=number) for number in range(1, 4)]
    cold = [recovery(number, kind="fresh process", replace_seconds=4.0, total_seconds=4.2) for number in range(1, 4)]
    said = explain(job(failures, cold, time_lost_seconds=12.6))[-1]
    assert said == (
        "Over all 3 recoveries most of the time, 12.0 s of 12.6 s, went into finding a process for the lost rank."
    )
    again = [
        msgspec.structs.replace(recovery(number, total_seconds=0.1, redo_seconds=9.0), steps_repeated=1)
        for number in range(1, 4)
    ]
    assert "only shorter steps lose less" in explain(job(failures, again, time_lost_seconds=27.3))[-1]


def test_a_job_that_has_no_end_yet() -> None:
    first, _ = explain(job([failure()], [recovery(total_seconds=0.1)], steps=4), "is still running")
    assert first == (
        "The job is still running, after 4 of 10 steps and 1 min 40 s. So far 1 failure cost 5.00 s and 0 steps "
        "computed again."
    )


def test_where_a_rank_hung_is_shown() -> None:
    stack = (
        'rank 1 (w1):\nCurrent thread 0x1 (most recent call first):\n  File "/job/train.py", line 8 in load\n'
        + "".join(f'  File "/job/train.py", line {line} in main\n' for line in range(20))
    )
    hung = msgspec.structs.replace(failure(kind="hang"), stack=stack)
    said = explain(job([hung], [recovery(total_seconds=0.2)]))[2].splitlines()
    assert said[0] == "When it was given up, rank 1 was here, innermost call first:"
    assert said[1].strip() == "train.py, line 8 in load"
    assert said[-1].strip() == "and 9 more"


def test_whether_the_bits_are_known_comes_last() -> None:
    assert explain(job([], [], bits_as_undisturbed="yes"))[-1] == "Bits as undisturbed: yes."
    doubt = DoubtReport(rank=0, process="w0", step=3, reason="a collective was cut short")
    said = explain(job([failure()], [recovery(total_seconds=0.1)], bits_as_undisturbed="not known", doubts=(doubt,)))
    assert said[-1] == "Bits as undisturbed: not known, because rank 0 in step 3: a collective was cut short."
    assert "the state at the end is what it would have been" not in " ".join(said)
