"""Stages of a pipeline on different ranks (PP x DP), killed everywhere, under several schedules and wrappers.

Each job is compared bit for bit with an undisturbed one, per rank. All of it is marked `all`; what runs always is the
example (tests/examples/test_pipeline.py).
"""

import signal
from pathlib import Path

import pytest

from relight.chaos.plan import describe_fault
from relight.core.protocol.fault import Action, Fault, Point
from tests.survival.harness import Bench, Training, finals_under_torchrun, send
from tests.survival.judge import check_faults, check_protocol, check_survived, traceback_of
from tests.survival.test_combinations import members, trains
from tests.survival.test_matrix import POINTS

STEP = 3
RANKS = (0, 1, 2, 3)  # 0 and 1 run the first stage, 2 and 3 the second
SHORT = ((Point.BACKWARD, 0), (Point.OPTIMIZER, 3), (Point.FORWARD, 1), (Point.BARRIER, 2))


def pipeline(steps: int, *arguments: str, ranks: int = 4) -> Training:
    return Training(ranks=ranks, steps=steps, program="pipeline.py", arguments=arguments)


@pytest.mark.all
@pytest.mark.parametrize(
    "arguments",
    [
        "--schedule 1f1b",
        "--schedule gpipe --static",
        "--schedule interleaved",
        "--layout ddp --schedule gpipe",
        "--batchnorm --scheduler",
        "--layout ddp --batchnorm --static",
    ],
)
def test_kills_in_a_row(bench: Bench, arguments: str) -> None:
    training = pipeline(2 + 2 * len(SHORT), *arguments.split())
    faults = [
        describe_fault(Fault(action=Action.KILL, point=point, rank=rank, step=1 + 2 * index))
        for index, (point, rank) in enumerate(SHORT)
    ]
    outcome = bench.run(training, faults=faults, standbys=2)
    check_survived(outcome, bench.reference(training))
    check_faults(outcome, faults)
    assert [sorted(recovery.sources) for recovery in outcome.report.recoveries] == [[1], [2], [0], [3]]


def test_a_replacement_that_has_rehearsed_nothing_finds_its_place_in_a_loader(bench: Bench) -> None:
    training = pipeline(6, "--loader", "--layout", "ddp")
    fault = describe_fault(Fault(action=Action.KILL, point=Point.BACKWARD, rank=2, step=4))
    outcome = bench.run(training, faults=[fault])
    check_survived(outcome, bench.reference(training))
    check_faults(outcome, [fault])


@pytest.mark.all
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("action", [Action.KILL, Action.FREEZE, Action.RAISE, Action.LOOP])
def test_one_fault(bench: Bench, action: Action, point: Point, rank: int) -> None:
    training = pipeline(7)
    fault = describe_fault(Fault(action=action, point=point, rank=rank, step=STEP))
    outcome = bench.run(training, faults=[fault])
    check_survived(outcome, bench.reference(training))
    check_faults(outcome, [fault])


@pytest.mark.all
@pytest.mark.parametrize("point", [Point.BACKWARD, Point.OPTIMIZER])
def test_three_dimensions(bench: Bench, point: Point) -> None:
    """PP x DP x TP: eight ranks hold four parts, each twice."""
    training = pipeline(5, "--layout", "tp", ranks=8)
    fault = describe_fault(Fault(action=Action.KILL, point=point, rank=5, step=2))
    outcome = bench.run(training, faults=[fault])
    check_survived(outcome, bench.reference(training))
    check_faults(outcome, [fault])
    assert outcome.report.recoveries[0].sources == (7,)


@pytest.mark.all
@pytest.mark.parametrize("ranks", [(0, 2), (0, 3), (1, 2), (1, 3)])
def test_two_stages_killed_at_any_moment(bench: Bench, ranks: tuple[int, int]) -> None:
    """Also both ranks of one pipeline: a whole replica is lost, and restored from the other."""
    training = pipeline(30, "--pause", "0.05")
    with bench.start(training, standbys=2) as job:
        job.wait_until(lambda: trains(job), "training has begun")
        holders = members(job)
        for rank in ranks:
            send(holders[rank], signal.SIGKILL)
        outcome = job.wait()
    check_survived(outcome, bench.reference(training))
    assert sorted(failure.rank for failure in outcome.report.failures) == list(ranks)


@pytest.mark.all
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("place", [Point.STOP, Point.PROMOTED, Point.ROLLBACK, Point.REFORM])
def test_a_second_failure_in_the_recovery(bench: Bench, place: Point, rank: int) -> None:
    """Lose a survivor of another stage, or the replacement, which has just built its modules."""
    training = pipeline(7)
    first = rank if place is Point.PROMOTED else (rank + 2) % 4
    faults = [
        describe_fault(Fault(action=Action.KILL, point=Point.BACKWARD, rank=first, step=STEP)),
        describe_fault(Fault(action=Action.KILL, point=place, rank=rank, recovery=1)),
    ]
    outcome = bench.run(training, faults=faults, standbys=2)
    check_survived(outcome, bench.reference(training))
    assert sorted(failure.rank for failure in outcome.report.failures) == sorted((first, rank))


@pytest.mark.all
def test_every_rank_of_one_stage_lost(bench: Bench) -> None:
    faults = [f"kill rank {rank} in OPTIMIZER of step 3" for rank in (2, 3)]
    outcome = bench.run(pipeline(7), faults=faults, standbys=2)
    assert outcome.status == 1, outcome.describe()
    assert "part stage 2/2 of the state, held by ranks 2, 3 only: every copy is lost" in outcome.report.error
    assert not check_protocol(outcome), outcome.describe()
    assert not traceback_of(outcome), outcome.describe()


@pytest.mark.all
def test_without_replicas_the_first_loss_ends_the_job(bench: Bench) -> None:
    outcome = bench.run(pipeline(7, "--layout", "none"), faults=["kill rank 2 in FORWARD of step 3"])
    assert outcome.status == 1, outcome.describe()
    assert "part stage 3/4 of the state, held by rank 2 only: every copy is lost" in outcome.report.error
    assert "losing a device: never survived" in outcome.stderr


@pytest.mark.all
@pytest.mark.parametrize(
    ("argument", "advice"), [("--early", "relight.init(late_standby=True)"), ("--hide", "pipeline=schedule")]
)
def test_what_is_missing_is_said_before_the_first_step(bench: Bench, argument: str, advice: str) -> None:
    outcome = bench.run(pipeline(7, argument))
    assert outcome.status == 1, outcome.describe()
    assert advice in outcome.report.error, outcome.describe()


@pytest.mark.all
@pytest.mark.parametrize("arguments", ["--schedule 1f1b", "--schedule gpipe --static", "--schedule interleaved"])
def test_undisturbed_is_plain_torch(bench: Bench, tmp_path: Path, arguments: str) -> None:
    """Relight itself changes no bit: the same steps under torchrun end with the same stages."""
    training = pipeline(7, "--dropout", "0", *arguments.split())
    plain = finals_under_torchrun(tmp_path, 4, training.program, "--plain", "--steps", "7", *training.arguments)
    assert plain == bench.reference(training).finals
