"""Whole jobs on the late device: killed, frozen, broken, and compared bit for bit with an undisturbed one."""

import itertools

import pytest

import relight
from tests.device_extension.build import is_built
from tests.device_extension.jobs import CASES, LAZY, RACES, check, ddp, races_of, reference, run
from tests.idioms.trial import DEVICE_VARIABLE, early_kills, killed_in_phases, phase_kills, undisturbed
from tests.idioms.verdict import Verdict, judge
from tests.programs.train import Net
from tests.survival.harness import DEADLINE_SECONDS, Bench
from tests.survival.judge import check_survived

pytestmark = [pytest.mark.late, pytest.mark.skipif(not is_built(), reason="not built: make test-device")]

ENDS = ("kill", "freeze", "raise")
PLACES = ("FORWARD", "BACKWARD", "BARRIER", "OPTIMIZER")
EVERY = list(itertools.product(ENDS, PLACES))
# What `make test-device` runs of each case; the rest is marked `all`.
SHORT = {
    "ddp": EVERY,
    "hsdp": [("kill", "FORWARD"), ("raise", "BACKWARD"), ("freeze", "BARRIER"), ("kill", "OPTIMIZER")],
    "autocast-scaler": [("kill", "BACKWARD"), ("raise", "OPTIMIZER")],
    "own-stream": [("kill", "BACKWARD"), ("raise", "OPTIMIZER")],
    "hsdp-mixed": [("kill", "BACKWARD"), ("raise", "OPTIMIZER")],
}
ONE = [("kill", "BACKWARD")]
MATRIX = [
    pytest.param(name, end, place, marks=() if (end, place) in SHORT.get(name, ONE) else pytest.mark.all)
    for name in CASES
    for end, place in EVERY
]


@pytest.mark.parametrize(("name", "end", "place"), MATRIX)
def test_a_rank_is_replaced(bench: Bench, name: str, end: str, place: str) -> None:
    case = CASES[name]
    # Checkpoints and snapshots need a few steps before one of them can be gone back to.
    step = 5 if case.recovers_from else 3
    check(bench, case, f"{end} rank {case.rank} in {place} of step {step}")


@pytest.mark.parametrize("place", [pytest.param("FORWARD", marks=pytest.mark.all), "BARRIER", "OPTIMIZER"])
@pytest.mark.parametrize("name", ["ddp", pytest.param("hsdp", marks=pytest.mark.all)])
def test_a_device_that_does_only_what_is_waited_for(bench: Bench, name: str, place: str) -> None:
    check(bench, CASES[name], f"kill rank 1 in {place} of step 3", microseconds=LAZY)


def test_a_standby_without_a_device_takes_that_of_the_rank(bench: Bench) -> None:
    faults = ("kill rank 1 in BACKWARD of step 2", "kill rank 0 in OPTIMIZER of step 4")
    outcome = check(bench, CASES["ddp"], *faults, devices=2)
    assert "it builds its modules only when it takes a rank" in outcome.stderr


def test_too_few_devices_are_refused_before_the_first_step(bench: Bench) -> None:
    outcome = run(bench, ddp(), devices=1)
    assert outcome.status != 0
    assert "2 ranks and 0 standbys have 1 devices of type 'late'" in outcome.stdout + outcome.stderr


def test_an_engine_on_a_device_ends_with_the_trainers_weights(bench: Bench) -> None:
    case = CASES["publish"]
    steps = case.training.steps
    undisturbed = reference(bench, case)
    pytest.importorskip("tests.device_extension.late", exc_type=ImportError)
    model = Net(64, 0.1, True).to("late")
    environment = {"LATE_DEVICES": "3", "LATE_RACES": RACES}
    with (
        bench.start(case.training, faults=["kill rank 0 in BACKWARD of step 5"], environment=environment) as job,
        relight.Receiver(job.run_dir, model=model) as receiver,
    ):
        while job.launcher.poll() is None and not receiver.wait_for(steps, 0.02):
            with receiver.serving():
                model.state_dict()
        outcome = job.wait(DEADLINE_SECONDS)
        digest = receiver.digest()
    check_survived(outcome, undisturbed)
    assert (receiver.version, digest) == (steps, outcome.finals[0]["weights"]), outcome.describe()
    assert not races_of(outcome), races_of(outcome)


def test_tensors_of_state_are_on_the_device_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """LBFGS keeps a history, whose tensors have no parameter's shape."""
    monkeypatch.setenv(DEVICE_VARIABLE, "late")
    name = "pinn_two_optimizers"
    expected = undisturbed(name).digests
    for faults in (phase_kills(name, seed=0, kills=6), early_kills(name, seed=0)):
        verdict, words = judge(killed_in_phases(name, faults), expected)
        assert verdict is Verdict.EQUAL, words
