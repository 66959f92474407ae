"""Mistakes in the script end the job: one clear message, the user's own traceback once, nothing left running."""

import os
import re
from pathlib import Path

import pytest

from relight.core.account.verdict import YES
from tests.survival.harness import PATIENCE, PROGRAMS, Bench, Outcome, Training, plain_environment
from tests.survival.judge import check_faults, check_survived

THREE = 3


def broken(how: str, *arguments: str, ranks: int = THREE, steps: int = 6) -> Training:
    return Training(ranks=ranks, steps=steps, program="broken.py", arguments=("--how", how, *arguments))


def check_refused(outcome: Outcome, *words: str) -> None:
    """The job ended at once, with one message that has these words."""
    assert outcome.status == 1, outcome.describe()
    assert outcome.report.error, outcome.describe()
    for word in words:
        assert word in outcome.report.error, outcome.describe()
    assert outcome.stderr.count(f"relight: {outcome.report.error}") == 1, outcome.describe()


def check_traceback(outcome: Outcome, count: int) -> None:
    """The user's traceback is shown so often, with the user's frames and none of relight's."""
    shown = outcome.stdout + outcome.stderr
    assert shown.count("Traceback (most recent call last)") == count, outcome.describe()
    assert shown.count("\nValueError: sample 17 is broken on rank 1") == count, outcome.describe()
    assert "in raise_from_the_depths" in shown or not count, outcome.describe()
    assert "relight/training" not in shown, outcome.describe()


# --- exceptions -----------------------------------------------------------------------------------------------------
def test_the_same_exception_twice_is_a_bug(bench: Bench) -> None:
    outcome = bench.run(broken("exception"))
    check_refused(outcome, "rank 1", "step 3", "sample 17 is broken", "bug")
    check_traceback(outcome, 1)
    assert [(f.rank, f.kind, f.step) for f in outcome.report.failures] == [(1, "exception", 3)] * 2, outcome.describe()
    log = (outcome.run_dir / "logs").glob("*")
    assert sum(path.read_text().count("ValueError: sample 17") for path in log) == 2, outcome.describe()


def test_a_script_may_close_its_output(bench: Bench) -> None:
    outcome = bench.run(broken("closed_output", ranks=2, steps=2))
    assert (outcome.status, outcome.report.error, outcome.report.failures) == (0, "", ()), outcome.describe()


@pytest.mark.all
def test_an_exception_between_steps_is_not_repeated(bench: Bench) -> None:
    """The replacement begins with the step behind it."""
    outcome = bench.run(broken("exception_between"))
    assert outcome.status == 0, outcome.describe()
    (failure,) = outcome.report.failures
    assert (failure.rank, failure.kind, failure.step) == (1, "exception", 3), outcome.describe()
    said = re.search(
        r"sample 17 is broken on rank 1 at step 3 \(broken\.py:(\d+); (logs/rank-1\.log)\)", outcome.stderr
    )
    assert said is not None, outcome.describe()
    line = (PROGRAMS / "broken.py").read_text().splitlines()[int(said[1]) - 1]
    assert line.strip().startswith("raise ValueError"), line
    assert "ValueError: sample 17" in (outcome.run_dir / said[2]).read_text()
    check_traceback(outcome, 0)


@pytest.mark.all
@pytest.mark.parametrize("how", ["exit_code", "exit_0"])
def test_the_same_exit_twice_is_a_bug(bench: Bench, how: str) -> None:
    outcome = bench.run(broken(how))
    check_refused(outcome, "rank 1", "step 3", "bug")
    assert [(f.rank, f.kind) for f in outcome.report.failures] == [(1, "exited")] * 2, outcome.describe()


def test_an_exception_at_startup(bench: Bench) -> None:
    outcome = bench.run(broken("startup"))
    check_refused(outcome, "rank 1", "sample 17 is broken")
    check_traceback(outcome, 1)
    assert not outcome.report.failures, outcome.describe()


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_ends_while_others_form_a_group_with_it(bench: Bench, tmp_path: Path, how: str) -> None:
    """Its end is what is said, not that the group could not be formed."""
    training = Training(program="peer_dies_forming.py", arguments=("--how", how, "--marker", str(tmp_path / "pid")))
    outcome = bench.run(training)
    assert "process groups could not be formed" not in outcome.stdout + outcome.stderr, outcome.describe()
    if how == "raises":
        check_refused(outcome, "rank 1", "sample 17 is broken")
    else:
        assert outcome.status == 0, outcome.describe()
        assert "starting all ranks again" in outcome.stderr, outcome.describe()


@pytest.mark.all
def test_an_exception_after_the_last_step(bench: Bench) -> None:
    outcome = bench.run(broken("exception_after"))
    check_refused(outcome, "rank 1", "sample 17 is broken", "after the last step")
    check_traceback(outcome, 1)


@pytest.mark.all
def test_an_agent_that_cannot_be_started_ends_the_job(bench: Bench, tmp_path: Path) -> None:
    """Each one ends at once, with an error of its own: that is shown, and another one would not help."""
    end = "import sys\nif 'relight.agent' in sys.orig_argv:\n    sys.exit('no room for an agent here')\n"
    (tmp_path / "sitecustomize.py").write_text(end)
    path = os.pathsep.join([str(tmp_path), plain_environment()["PYTHONPATH"]])
    outcome = bench.run(Training(), environment={"PYTHONPATH": path})
    assert outcome.status == 1, outcome.describe()
    assert "no room for an agent here" in outcome.stdout + outcome.stderr, outcome.describe()
    assert "at its start; ending the job" in outcome.stderr, outcome.describe()


# --- scripts that do not train --------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["no_init", pytest.param("exit_0_at_startup", marks=pytest.mark.all)])
def test_ending_before_the_first_step(bench: Bench, how: str) -> None:
    outcome = bench.run(broken(how))
    check_refused(outcome, "before its first step", "relight.init()")
    check_traceback(outcome, 0)


@pytest.mark.all
def test_a_collective_that_only_one_rank_enters(bench: Bench) -> None:
    """Gloo decides what becomes of it; but the job ends."""
    outcome = bench.run(broken("extra_collective"), deadline_seconds=200 * PATIENCE)
    assert outcome.status == 1, outcome.describe()
    assert outcome.report.error, outcome.describe()


@pytest.mark.all
def test_too_many_failures(bench: Bench) -> None:
    faults = [f"kill rank 1 in BACKWARD of step {step}" for step in (2, 3)]
    outcome = bench.run(Training(), faults=faults, flags=("--max-failures", "1"))
    check_refused(outcome, "2 failures", "--max-failures 1")
    assert len(outcome.report.failures) == 2, outcome.describe()


@pytest.mark.all
def test_leaving_the_loop_early_on_one_rank(bench: Bench) -> None:
    outcome = bench.run(broken("break"))
    assert outcome.status == 1, outcome.describe()
    assert outcome.report.error, outcome.describe()


# --- ranks that disagree --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shape", ("same model",)),
        pytest.param("steps", ("6", "7", "steps"), marks=pytest.mark.all),
        pytest.param("weights", ("DDP", "seed"), marks=pytest.mark.all),
    ],
)
def test_ranks_disagree(bench: Bench, how: str, words: tuple[str, ...]) -> None:
    outcome = bench.run(broken(how))
    check_refused(outcome, "rank 1", *words)


# --- things that were not handed over, or cannot be -----------------------------------------------------------------
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("forgotten_scheduler", ("scheduler",)),
        pytest.param("forgotten_scaler", ("GradScaler", "scaler="), marks=pytest.mark.all),
        pytest.param("forgotten_ema", ("AveragedModel", "ema="), marks=pytest.mark.all),
        pytest.param("second_optimizer", ("SGD", "optimizer="), marks=pytest.mark.all),
        pytest.param("no_state_dict", ("counter", "Counter", "state_dict"), marks=pytest.mark.all),
    ],
)
def test_what_a_replacement_would_not_have(bench: Bench, how: str, words: tuple[str, ...]) -> None:
    outcome = bench.run(broken(how), standbys=0)
    check_refused(outcome, *words)
    assert not outcome.report.failures, outcome.describe()


@pytest.mark.parametrize(
    "how",
    [
        "parameters_between",
        pytest.param("rate_between", marks=pytest.mark.all),
        pytest.param("scheduler_between", marks=pytest.mark.all),
    ],
)
def test_what_code_between_steps_changes_reaches_a_replacement(bench: Bench, how: str) -> None:
    reference = bench.reference(broken(how))
    outcome = bench.run(broken(how), faults=["kill rank 1 after step 3"])
    check_survived(outcome, reference)
    assert not outcome.report.doubts, outcome.describe()


# --- things that are told, and go on --------------------------------------------------------------------------------
def test_nan_is_told_and_goes_on(bench: Bench) -> None:
    outcome = bench.run(broken("nan"), standbys=0)
    assert outcome.status == 0, outcome.describe()
    assert not outcome.report.failures, outcome.describe()
    assert any("NaN" in notice and "step 3" in notice for notice in outcome.report.notices), outcome.describe()
    assert "NaN" in outcome.stderr


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("collective_between", "kill rank 1 between steps at step 4"),
        pytest.param("collective_between", "freeze rank 0 after step 3", marks=pytest.mark.all),
    ],
)
def test_a_collective_that_cannot_be_repeated(bench: Bench, how: str, fault: str) -> None:
    """It is named once, and a failure just there costs its result, not the training."""
    training = broken(how)
    reference = bench.reference(training)
    told = [notice for notice in reference.report.notices if "allreduce" in notice]
    assert len(told) == 1, reference.describe()
    outcome = bench.run(training, faults=[fault])
    check_survived(outcome, reference, may_doubt=True)
    check_faults(outcome, [fault])
    assert reference.report.bits_as_undisturbed == YES
    # The program's own names are written in front of the block, so a rank that is lost just there is a doubt too.
    doubts = [doubt for doubt in outcome.report.doubts if "carried by the script" not in doubt.reason]
    assert bool(doubts) == (outcome.report.cut_collectives > 0), outcome.describe()
    assert all("was cut short by a recovery" in doubt.reason for doubt in doubts), outcome.describe()
    kept = [notice for notice in outcome.report.notices if "where a recovery cannot repeat it" in notice]
    assert len(kept) == 1, outcome.describe()


@pytest.mark.all
@pytest.mark.parametrize("fault", ["kill rank 2 in OPTIMIZER of step 3", "kill rank 0 in AFTER_WRITE of step 3"])
def test_a_collective_after_the_write_is_repeated(bench: Bench, fault: str) -> None:
    """It belongs to the step, whose barrier stands after it: nothing is told, and nothing is cut short."""
    training = broken("collective_after_write")
    reference = bench.reference(training)
    outcome = bench.run(training, faults=[fault])
    check_survived(outcome, reference, may_doubt=True)
    check_faults(outcome, [fault])
    assert not outcome.report.cut_collectives, outcome.describe()
    assert all("carried by the script" in doubt.reason for doubt in outcome.report.doubts), outcome.describe()
    for report in (reference.report, outcome.report):
        assert not [notice for notice in report.notices if "cannot repeat it" in notice], outcome.describe()


@pytest.mark.parametrize("step", [0, 3])
def test_gradients_that_are_carried_from_step_to_step(bench: Bench, step: int) -> None:
    """A recovery throws them away, and says so; in the first step, there are none yet."""
    training, fault = broken("carried_gradients"), f"kill rank 1 in FORWARD of step {step}"
    reference = bench.reference(training)
    outcome = bench.run(training, faults=[fault])
    check_faults(outcome, [fault])
    if step == 0:
        check_survived(outcome, reference)
    assert bool(step) == any("threw them away" in doubt.reason for doubt in outcome.report.doubts), outcome.describe()


@pytest.mark.all
def test_standbys_that_build_late_for_nothing(bench: Bench) -> None:
    training = broken("idle_import")
    reference = bench.reference(training)
    assert [notice for notice in reference.report.notices if "late_standby=False" in notice], reference.describe()
    outcome = bench.run(training, faults=["kill rank 1 in BACKWARD of step 3"])
    check_survived(outcome, reference)


@pytest.mark.all
@pytest.mark.parametrize("place", ["BACKWARD", "OPTIMIZER"])
def test_an_optimizer_that_communicates(bench: Bench, place: str) -> None:
    """Its step needs other ranks, so the barrier stands after it: it is undone and repeated like all else."""
    training = broken("communicating_optimizer")
    check_survived(bench.run(training, faults=[f"kill rank 1 in {place} of step 3"]), bench.reference(training))


# --- one rank -------------------------------------------------------------------------------------------------------
def test_one_rank_trains(bench: Bench) -> None:
    reference = bench.reference(Training(ranks=1))
    assert reference.report.world_size == 1


@pytest.mark.parametrize("standbys", [pytest.param(0, marks=pytest.mark.all), 1])
def test_one_rank_has_no_other_to_recover_from(bench: Bench, standbys: int) -> None:
    outcome = bench.run(Training(ranks=1), faults=["kill rank 0 in BACKWARD of step 3"], standbys=standbys)
    check_refused(outcome, "every replica of the state is lost", "checkpoint")


# --- ranks that do not compute the same -----------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.all)])
def test_a_model_that_is_not_wrapped_in_ddp(bench: Bench, ranks: int) -> None:
    """Found behind the first step, although nothing was asked to be verified."""
    outcome = bench.run(broken("no_ddp", ranks=ranks))
    check_refused(
        outcome, "the state of version 1 differs between rank 0; rank 1", "wrapped in DDP", "modules.model.tensors.0."
    )
    assert not outcome.report.failures, outcome.describe()


@pytest.mark.all
def test_one_rank_that_does_not_write(bench: Bench) -> None:
    """The others are more, but no rank is replaced for it: it is the script."""
    outcome = bench.run(broken("no_write", "--at", "0"))
    check_refused(outcome, "the state of version 1 differs between ranks 0, 2; rank 1", "optimizer.step()")
    assert "no majority" not in outcome.report.error
    assert not outcome.report.failures, outcome.describe()


@pytest.mark.all
def test_one_rank_that_does_not_write_later(bench: Bench) -> None:
    outcome = bench.run(broken("no_write", ranks=2))
    check_refused(outcome, "the state of version 6 differs between rank 0; rank 1", "optimizer.step()")
