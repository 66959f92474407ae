"""The parts of a proof: which failures strike, how two attempts are compared, which variables are suspected."""

import itertools

import msgspec
import pytest

from relight.chaos.plan import check_fault, describe_fault, parse_fault
from relight.core.account.report import JobReport, RecoveryReport
from relight.core.protocol.fault import Action
from relight.prove.compare import Change, Difference, collect, compared, first_difference, first_divergence
from relight.prove.faults import POINTS, plan_rounds
from relight.prove.names import uses_of
from relight.prove.result import DIFFERENT, EQUAL, FAILED, NOTHING, Proof, RoundResult, explain_proof, verdict_of
from relight.wire.records.evidence import Operation, StepEvidence


# --- failures -------------------------------------------------------------------------------------------------------
def test_the_same_seed_plans_the_same_failures() -> None:
    assert plan_rounds(3, 4, 20, 4) == plan_rounds(3, 4, 20, 4)
    assert plan_rounds(3, 4, 20, 4) != plan_rounds(4, 4, 20, 4)


@pytest.mark.parametrize("seed", range(20))
def test_two_rounds_of_twenty_steps_strike_every_kind_of_place(seed: int) -> None:
    rounds = plan_rounds(seed, 2, 20, 3)
    assert {fault.point for faults in rounds for fault in faults} == set(POINTS)
    for fault in (fault for faults in rounds for fault in faults):
        check_fault(fault, 3, 1)
        assert parse_fault(describe_fault(fault)) == fault
    assert {Action.KILL, Action.FREEZE} <= {fault.action for faults in rounds for fault in faults}


def test_failures_are_apart_and_leave_a_step_to_compare() -> None:
    for faults in plan_rounds(0, 5, 9, 2):
        steps = [fault.step or 0 for fault in faults]
        assert all(b - a >= 2 for a, b in itertools.pairwise(steps))
        assert 1 <= min(steps) <= max(steps) <= 7


# --- comparing ------------------------------------------------------------------------------------------------------
def evidence(step: int, rank: int, **changes: object) -> StepEvidence:
    one = StepEvidence(
        step=step,
        rank=rank,
        process=f"w{rank}",
        generation=1,
        attempt=0,
        state={"model.a": f"a{step}", "model.b": f"b{step}"},
        names={"hidden": f"{step}", "clock": f"{step}"},
    )
    return msgspec.structs.replace(one, **changes)


def attempt(steps: int, *others: StepEvidence) -> dict[tuple[int, int], StepEvidence]:
    return collect([*(evidence(step, rank) for step in range(steps) for rank in range(2)), *others])


def report(*recoveries: RecoveryReport) -> JobReport:
    return JobReport(job="j", recoveries=recoveries)


def recovery(number: int, target: int, replaced: int) -> RecoveryReport:
    return RecoveryReport(
        number=number,
        generation=number + 1,
        failures=(number,),
        decision="back",
        target_version=target,
        reason="",
        replaced=(replaced,),
    )


def test_what_is_equal_has_no_difference() -> None:
    repeated = evidence(3, 1, process="w2", generation=2, attempt=1, names={"hidden": "9"})
    now = attempt(6, repeated)
    assert first_difference(attempt(6), now, report(recovery(1, 3, 1)), 6, 2) is None
    assert compared(attempt(6), now, 6, 2) == 6
    assert compared(attempt(6), attempt(4), 6, 2) == 4


def test_the_first_step_that_differs_is_named_with_who_and_what() -> None:
    other = {"model.a": "a3", "model.b": "x"}
    now = attempt(
        6,
        evidence(3, 0, generation=2, attempt=1, state=other),
        evidence(3, 1, process="w2", generation=2, attempt=1, state=other, names={"hidden": "9", "clock": "3"}),
        evidence(4, 1, process="w2", generation=2, state={"model.a": "y", "model.b": "y"}),
    )
    recoveries = (recovery(1, 3, 1), recovery(2, 5, 1))
    found = first_difference(attempt(6), now, report(*recoveries), 6, 2)
    assert isinstance(found, Difference)
    assert (found.step, found.recovery) == (3, 1)
    survivor, replacement = found.ranks
    assert (survivor.role, replacement.role) == (
        "survivor, repeated this step",
        "replacement since recovery 1, repeated this step",
    )
    assert survivor.state == replacement.state == (Change(name="model.b", before="b3", now="x"),)
    assert survivor.names == ()
    assert replacement.names == (Change(name="hidden", before="3", now="9"),)


def test_names_that_differ_without_a_failure_are_no_suspects() -> None:
    now = attempt(
        6,
        evidence(1, 1, names={"hidden": "1", "clock": "another time"}),
        evidence(3, 1, generation=2, attempt=1, state={}, names={"hidden": "9", "clock": "later"}),
    )
    found = first_difference(attempt(6), now, report(recovery(1, 3, 0)), 6, 2)
    assert found is not None
    assert [change.name for change in found.ranks[1].names] == ["hidden"]


def test_a_step_that_was_undone_counts_as_it_was_computed_last() -> None:
    wrong = evidence(2, 0, state={"model.a": "wrong", "model.b": "b2"})
    assert (
        first_difference(
            attempt(4),
            collect([wrong, *attempt(4, evidence(2, 0, generation=2)).values()]),
            report(recovery(1, 1, 0)),
            4,
            2,
        )
        is None
    )


def test_a_difference_before_any_failure_is_the_scripts() -> None:
    now = attempt(4, evidence(0, 0, state={"model.a": "x", "model.b": "b0"}))
    found = first_difference(attempt(4), now, report(recovery(1, 3, 0)), 4, 2)
    assert found is not None
    assert (found.step, found.recovery) == (0, 0)
    said = " ".join(explain_proof(proof(difference=found)))
    assert "before any failure struck: the script computes something else each time" in said


# --- operations -----------------------------------------------------------------------------------------------------
def call(place: str, name: str, *given: str, result: str = "r") -> Operation:
    return Operation(place=place, name=name, given=given, result=result)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (call("t.py:2", "Tensor.mul", "d1", "0.5"), "got 0.5 instead of 0.25 as value 2"),
        (call("t.py:2", "Tensor.mul", "d1", "0.25", result="s"), "gave s instead of r for the same values"),
        (call("t.py:3", "Tensor.add", "d1"), "was called where the undisturbed run called Tensor.mul at t.py:2"),
    ],
)
def test_the_first_operation_that_differs(second: Operation, words: str) -> None:
    before = [call("t.py:1", "relu", "d0"), call("t.py:2", "Tensor.mul", "d1", "0.25"), call("t.py:9", "x", "d2")]
    found = first_divergence(1, before, [before[0], second, call("t.py:9", "x", "d3")])
    assert found is not None
    assert (found.what, found.after) == (words, "t.py:1")
    assert first_divergence(1, before, before) is None


def test_an_operation_too_much_or_too_few() -> None:
    before = [call("t.py:1", "relu", "d0")]
    more = first_divergence(0, before, [*before, call("t.py:2", "x")])
    less = first_divergence(0, before, [])
    assert more is not None
    assert less is not None
    assert (more.place, more.what) == ("t.py:2", "was called, and was not in the undisturbed run")
    assert (less.place, less.what) == ("t.py:1", "was not called")


# --- names ----------------------------------------------------------------------------------------------------------
SCRIPT = """
import relight
total = 0.0
history = []

def weigh(loss):
    global total
    total = 0.9 * total + loss
    return loss / total

def main():
    hidden = None
    for step in tqdm(training.steps(until=10)):
        with step as batch:
            out, hidden = model(batch, hidden)
            loss = weigh(out)
            if step.number > 3:
                late = loss
            history.append(loss)
        print(late)
"""


def test_what_a_step_sets_before_it_reads_it_is_not_carried() -> None:
    found = uses_of(SCRIPT, ["total", "history", "hidden", "out", "loss", "step", "batch", "late"])
    carried = {name for name, uses in found.items() if uses.carried}
    assert carried == {"total", "history", "hidden", "late"}
    assert found["total"].lines == (8, 3)
    assert found["history"].lines == (19, 4)
    assert found["hidden"].lines[0] == 15


def test_a_script_that_cannot_be_read_gives_no_lines() -> None:
    assert uses_of("this is no Python", ["x"]) == {}


# --- the verdict ----------------------------------------------------------------------------------------------------
def round_(**changes: object) -> RoundResult:
    one = RoundResult(number=1, run_dir="d", seconds=1.0, faults=(), struck=2, recoveries=2, steps_compared=8)
    return msgspec.structs.replace(one, **changes)


def proof(**changes: object) -> Proof:
    rounds = (round_(**changes),)
    return Proof(script="t.py", ranks=2, steps=8, seed=0, run_dir="d", rounds=rounds, verdict=verdict_of("", rounds))


def test_the_verdict() -> None:
    assert proof().verdict == EQUAL
    assert proof(struck=0).verdict == NOTHING
    assert proof(steps_compared=0).verdict == NOTHING
    assert proof(error="every replica is lost").verdict == FAILED
    assert proof(difference=Difference(step=1, recovery=1, ranks=())).verdict == DIFFERENT
    assert verdict_of("broken", ()) == FAILED
    assert explain_proof(proof(doubts="rank 0 in step 3: x"))[0].endswith("because rank 0 in step 3: x.")
    assert explain_proof(proof())[-1].startswith("EQUAL: after 2 failures in 1 round, each of 8 steps")
