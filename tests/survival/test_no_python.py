"""`relight run --no-python`: workers are programs that relight starts as they are, and that become Python."""

import sys

import pytest

from tests.survival.harness import Bench, Outcome, Training
from tests.survival.judge import check_faults, check_survived

PYTHON = {"PYTHON": sys.executable}
KILL = ("kill rank 1 in OPTIMIZER of step 4",)
RAISE_AND_KILL = ("raise in rank 0 in FORWARD of step 2", *KILL)


def run(
    bench: Bench,
    *arguments: str,
    program: str = "train.sh",
    faults: tuple[str, ...] = (),
    environment: dict[str, str] = PYTHON,
) -> Outcome:
    training = Training(ranks=2, program=program, arguments=arguments)
    return bench.run(
        training, faults=faults, flags=("--no-python",), standbys=1 if faults == KILL else 2, environment=environment
    )


@pytest.mark.parametrize("faults", [KILL, pytest.param(RAISE_AND_KILL, marks=pytest.mark.all)], ids=len)
def test_such_a_worker_is_replaced_like_any_other(bench: Bench, faults: tuple[str, ...]) -> None:
    outcome = run(bench, faults=faults)
    check_survived(outcome, bench.reference(Training(ranks=2)))
    check_faults(outcome, faults)


@pytest.mark.all
def test_it_can_be_asked_where_it_hangs(bench: Bench) -> None:
    outcome = run(bench, faults=("loop in rank 1 in FORWARD of step 3",))
    check_survived(outcome, bench.reference(Training(ranks=2)))
    (failure,) = outcome.report.failures
    assert "rank 1 is at train.py, line " in failure.evidence, outcome.describe()


@pytest.mark.all
def test_the_same_exception_twice_is_a_bug(bench: Bench) -> None:
    outcome = run(bench, "--how", "exception", program="broken.sh")
    assert outcome.status == 1, outcome.describe()
    assert "bug" in outcome.report.error, outcome.describe()
    shown = outcome.stdout + outcome.stderr
    assert shown.count("Traceback (most recent call last)") == 1, outcome.describe()
    assert "\nValueError: sample 17 is broken on rank 1" in shown


@pytest.mark.all
def test_the_same_exit_twice_is_a_bug(bench: Bench) -> None:
    outcome = run(bench, "--how", "exit_code", program="broken.sh")
    assert outcome.status == 1, outcome.describe()
    assert [(f.rank, f.step) for f in outcome.report.failures] == [(1, 3)] * 2, outcome.describe()


@pytest.mark.all
def test_relight_is_not_called_in_a_child_of_the_program(bench: Bench) -> None:
    outcome = run(bench, environment={**PYTHON, "AS_CHILD": "1"})
    assert outcome.status == 1, outcome.describe()
    assert "must become Python (`exec python train.py` in a shell script)" in outcome.stderr + outcome.stdout
