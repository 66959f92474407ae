"""Conditions that hold of every job that lived through planned faults."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from relight.chaos.plan import parse_fault
from relight.core.account.report import FailureReport, RecoveryReport
from relight.core.account.verdict import NOT_KNOWN, YES
from relight.core.protocol.fault import Action, Fault, Point
from relight.server.records.journal import read_journal
from relight.sim.judge.journal import check_journal
from tests.survival.harness import Outcome

KINDS = {
    Action.KILL: "killed",
    Action.SEGFAULT: "killed",
    Action.FREEZE: "frozen",
    Action.RAISE: "exception",
    Action.EXIT: "exited",
    Action.LOOP: "hang",
    Action.BLOCK: "hang",
}
# The phase that the rank has stamped last when a fault strikes it at this point.
PHASES = {
    Point.BETWEEN_STEPS: "OUTSIDE",
    Point.FORWARD: "FORWARD",
    Point.BACKWARD: "BACKWARD",
    Point.BEFORE_BARRIER: "BACKWARD",
    Point.BARRIER: "BARRIER",
    Point.OPTIMIZER: "OPTIMIZER",
    Point.AFTER_WRITE: "OPTIMIZER",
    Point.AFTER_STEP: "OUTSIDE",
}
# How many versions beyond the step's own the job may go on from. A gradient that is not complete everywhere cannot
# have been written by any rank; one that some rank has written must not be lost.
ADVANCES = {
    Point.BETWEEN_STEPS: {0},
    Point.FORWARD: {0},
    Point.BACKWARD: {0},
    Point.BEFORE_BARRIER: {0, 1},
    Point.BARRIER: {0, 1},
    Point.OPTIMIZER: {1},
    Point.AFTER_WRITE: {1},
    Point.AFTER_STEP: {1},
}
# Whether a step is repeated depends on the others: they may have begun the next step when this rank died behind the
# barrier, or not yet begun the step when it died ahead of them.


def check_survived(outcome: Outcome, reference: Outcome, *, may_doubt: bool = False) -> None:
    """The job ended as if nothing had happened, and says so; unless it `may_doubt` its own bits."""
    report, expected = outcome.report, reference.report
    assert outcome.status == 0, outcome.describe()
    assert report.error == "", outcome.describe()
    assert report.final_version == expected.final_version, outcome.describe()
    assert report.final_state_digest == expected.final_state_digest, outcome.describe()
    assert report.final_lineage == expected.final_lineage, outcome.describe()
    assert not check_protocol(outcome), outcome.describe()
    assert outcome.finals == reference.finals, f"{outcome.describe()}\n{outcome.finals}\n{reference.finals}"
    assert not traceback_of(outcome), f"{traceback_of(outcome)}\n{outcome.describe()}"
    for recovery in report.recoveries:
        assert recovery.steps_repeated in (0, 1), outcome.describe()
    assert report.bits_as_undisturbed == (NOT_KNOWN if report.doubts else YES), outcome.describe()
    assert may_doubt or not report.doubts, f"{report.doubts}\n{outcome.describe()}"


def check_protocol(outcome: Outcome) -> tuple[str, ...]:
    """Complaints of the judge of simulated jobs, which reads the journal, about a recovery."""
    header, lines = read_journal(outcome.run_dir / "journal.jsonl")
    return check_journal(lines, header.settings.world_size)


def traceback_of(outcome: Outcome) -> str:
    """Lines of the job from its first traceback on, wherever in a long output that is."""
    _, found, rest = (outcome.stdout + outcome.stderr).partition("Traceback")
    return (found + rest)[:6000]


def check_faults(outcome: Outcome, sentences: Sequence[str]) -> None:
    """Planned faults of steps, far enough apart to be survived one by one: each struck, and nothing else did."""
    faults = [parse_fault(sentence) for sentence in sentences]
    report = outcome.report
    assert [describe(failure) for failure in report.failures] == [expect(fault) for fault in faults], outcome.describe()
    assert [recovery.failures for recovery in report.recoveries] == [
        (number,) for number in range(1, len(faults) + 1)
    ], outcome.describe()
    for fault, recovery in zip(faults, report.recoveries, strict=True):
        assert recovery.replaced == (fault.rank,), outcome.describe()
        check_decision(outcome, fault, recovery)
    for fault, failure in zip(faults, report.failures, strict=True):
        if KINDS[fault.action] == "hang":  # what it was doing is part of the evidence
            script = next(Path(word).name for word in outcome.command if word.endswith(".py"))
            assert f"rank {fault.rank} is at {script}, line " in failure.evidence, outcome.describe()
            assert "_carry_out" in failure.stack, f"{failure.stack}\n{outcome.describe()}"


def check_decision(outcome: Outcome, fault: Fault, recovery: RecoveryReport) -> None:
    """The version that the job went on from is one that the fault's place in the step allows."""
    assert fault.step is not None
    assert recovery.target_version - fault.step in ADVANCES[fault.point], outcome.describe()
    assert recovery.steps_repeated in (0, 1), outcome.describe()


def check_struck(outcome: Outcome, sentences: Iterable[str]) -> None:
    """Planned faults of steps that may come in any order: each struck, and nothing else did."""
    expected = Counter(expect(parse_fault(sentence)) for sentence in sentences)
    assert Counter(describe(failure) for failure in outcome.report.failures) == expected, outcome.describe()


def expect(fault: Fault) -> tuple[int | None, str, str, int | None]:
    """Return the name that the report should give a fault."""
    return fault.rank, KINDS[fault.action], PHASES[fault.point], fault.step


def describe(failure: FailureReport) -> tuple[int | None, str, str, int | None]:
    """Return the name that the report gives a failure."""
    return failure.rank, failure.kind, failure.phase, failure.step
