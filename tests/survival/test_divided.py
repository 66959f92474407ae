"""State that is divided over ranks, killed everywhere: HSDP on a 2 x 2 mesh (FSDP2 with replicas), TP x DP, ZeRO-1.

Each job is compared bit for bit with an undisturbed one, per rank. All of it is marked `all`; what runs always is the
example (tests/examples/test_hsdp.py).
"""

import json
import signal
from pathlib import Path

import msgspec
import pytest

from relight.chaos.plan import describe_fault
from relight.core.protocol.fault import Action, Fault, Point
from relight.core.recovery.coverage import Coverage
from tests.survival.harness import Bench, Training, finals_under_torchrun, send
from tests.survival.judge import check_faults, check_protocol, check_survived, traceback_of
from tests.survival.test_combinations import members, trains
from tests.survival.test_matrix import POINTS

STEP = 3
RANKS = (0, 1, 2, 3)
SHORT = (
    (Point.BACKWARD, 0),  # the standby was built as rank 3: other groups, other part, of another size
    (Point.OPTIMIZER, 3),
    (Point.FORWARD, 1),
    (Point.BARRIER, 2),
)


def hsdp(steps: int, *arguments: str) -> Training:
    return Training(ranks=4, steps=steps, program="divided.py", arguments=arguments)


def tensor_parallel(steps: int, *arguments: str) -> Training:
    """Pairs of ranks compute on one batch; two such pairs are replicas of each other."""
    return hsdp(steps, "--layout", "tp_dp", *arguments)


@pytest.mark.all
@pytest.mark.parametrize("layout", ["hsdp", "tp_dp", "zero_dp", "zero_dp --views --clip --scheduler"])
def test_kills_in_a_row(bench: Bench, layout: str) -> None:
    training = hsdp(2 + 2 * len(SHORT), "--layout", *layout.split())
    faults = [
        describe_fault(Fault(action=Action.KILL, point=point, rank=rank, step=1 + 2 * index))
        for index, (point, rank) in enumerate(SHORT)
    ]
    outcome = bench.run(training, faults=faults, standbys=2)
    check_survived(outcome, bench.reference(training))
    check_faults(outcome, faults)
    assert [sorted(recovery.sources) for recovery in outcome.report.recoveries] == [[2], [1], [3], [0]]


@pytest.mark.all
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("action", [Action.KILL, Action.FREEZE, Action.RAISE])
def test_one_fault(bench: Bench, action: Action, point: Point, rank: int) -> None:
    training = hsdp(7)
    fault = describe_fault(Fault(action=action, point=point, rank=rank, step=STEP))
    outcome = bench.run(training, faults=[fault])
    check_survived(outcome, bench.reference(training))
    check_faults(outcome, [fault])


@pytest.mark.all
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("point", POINTS)
def test_one_kill_under_tensor_parallelism(bench: Bench, point: Point, rank: int) -> None:
    training = tensor_parallel(7)
    fault = describe_fault(Fault(action=Action.KILL, point=point, rank=rank, step=STEP))
    outcome = bench.run(training, faults=[fault])
    check_survived(outcome, bench.reference(training))
    check_faults(outcome, [fault])


@pytest.mark.all
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("point", POINTS)
def test_one_kill_with_a_divided_optimizer(bench: Bench, point: Point, rank: int) -> None:
    training = hsdp(7, "--layout", "zero_dp")
    fault = describe_fault(Fault(action=Action.KILL, point=point, rank=rank, step=STEP))
    outcome = bench.run(training, faults=[fault])
    check_survived(outcome, bench.reference(training))
    check_faults(outcome, [fault])
    assert not outcome.report.notices, outcome.describe()  # no script is asked to move a collective


@pytest.mark.all
@pytest.mark.parametrize("point", [Point.FORWARD, Point.BACKWARD, Point.BARRIER, Point.OPTIMIZER])
@pytest.mark.parametrize(
    "arguments",
    [
        "--batchnorm",
        "--clip",
        "--accumulate 2",
        "--accumulate 3 --clip --scheduler",
        "--scaler",
        "--scaler --clip",
        "--evaluate",
        "--evaluate --batchnorm --accumulate 2 --clip --scheduler",
        "--layout tp_dp --batchnorm --clip --scheduler",
    ],
)
def test_features(bench: Bench, arguments: str, point: Point) -> None:
    training = hsdp(7, *arguments.split())
    fault = describe_fault(Fault(action=Action.KILL, point=point, rank=1, step=STEP))
    outcome = bench.run(training, faults=[fault])
    # After the barrier the others may reach their evaluation between steps before Stop comes: what is gathered there is
    # cut short, and relight cannot know that the result is of no importance.
    may_doubt = "--evaluate" in arguments and point is Point.OPTIMIZER
    check_survived(outcome, bench.reference(training), may_doubt=may_doubt)
    check_faults(outcome, [fault])


@pytest.mark.all
@pytest.mark.parametrize("layout", ["hsdp", "tp_dp", "zero_dp"])
@pytest.mark.parametrize("ranks", [(0, 1), (0, 3), (1, 2), (2, 3)])
def test_two_ranks_of_different_parts_at_once(bench: Bench, ranks: tuple[int, int], layout: str) -> None:
    """Also both ranks of one shard group: a whole replica is lost, and restored from the other."""
    training = hsdp(7, "--layout", layout)
    faults = [f"kill rank {rank} in OPTIMIZER of step {STEP}" for rank in ranks]
    outcome = bench.run(training, faults=faults, standbys=2)
    check_survived(outcome, bench.reference(training))
    assert sorted(failure.rank for failure in outcome.report.failures) == list(ranks)


@pytest.mark.all
@pytest.mark.parametrize("layout", ["hsdp", "zero_dp"])
@pytest.mark.parametrize("ranks", [(0, 1), (0, 3), (1, 2), (2, 3)])
def test_two_ranks_of_different_parts_killed_at_any_moment(bench: Bench, ranks: tuple[int, int], layout: str) -> None:
    training = hsdp(30, "--pause", "0.05", "--layout", layout)
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
@pytest.mark.parametrize("point", ["the first stop", "restoring", "reforming"])
def test_a_second_failure_in_the_recovery(bench: Bench, point: str, rank: int) -> None:
    """Lose a survivor of another part, or the replacement."""
    training = hsdp(7)
    first = (rank + 1) % 4  # the neighbour: of the other part
    place = {"the first stop": Point.STOP, "restoring": Point.ROLLBACK, "reforming": Point.REFORM}[point]
    faults = [
        describe_fault(Fault(action=Action.KILL, point=Point.BACKWARD, rank=first, step=STEP)),
        describe_fault(Fault(action=Action.KILL, point=place, rank=rank, recovery=1)),
    ]
    outcome = bench.run(training, faults=faults, standbys=2)
    check_survived(outcome, bench.reference(training))
    assert sorted(failure.rank for failure in outcome.report.failures) == sorted((first, rank))


@pytest.mark.all
@pytest.mark.parametrize("point", [Point.BACKWARD, Point.OPTIMIZER])
def test_three_dimensions(bench: Bench, point: Point) -> None:
    """FSDP2 with a replicate dimension over tensor parallelism: eight ranks hold four parts, each twice."""
    training = Training(ranks=8, steps=5, program="divided.py", arguments=("--layout", "tp_hsdp"))
    fault = describe_fault(Fault(action=Action.KILL, point=point, rank=1, step=2))
    outcome = bench.run(training, faults=[fault])
    check_survived(outcome, bench.reference(training))
    check_faults(outcome, [fault])
    assert outcome.report.recoveries[0].sources == (5,)


@pytest.mark.all
def test_every_copy_of_one_part_lost(bench: Bench) -> None:
    """The job ends at once, says what is lost, and had said beforehand that it would."""
    faults = ["kill rank 1 in OPTIMIZER of step 3", "kill rank 3 in OPTIMIZER of step 3"]
    outcome = bench.run(hsdp(7), faults=faults, standbys=2)
    assert outcome.status == 1, outcome.describe()
    assert "part shard 2/2 of the state, held by ranks 1, 3 only: every copy is lost" in outcome.report.error
    assert "Resume from your last checkpoint" in outcome.report.error
    assert not outcome.finals
    assert not check_protocol(outcome), outcome.describe()
    assert not traceback_of(outcome), outcome.describe()
    check_coverage(outcome.run_dir)
    assert "losing two devices: survived in 4 of 6 cases, not if it is ranks 0 and 2; ranks 1 and 3" in outcome.stderr


@pytest.mark.all
@pytest.mark.parametrize("layout", ["hsdp", "tp_dp", "zero_dp"])
def test_undisturbed_is_plain_torch(bench: Bench, tmp_path: Path, layout: str) -> None:
    """Relight itself changes no bit: the same steps under torchrun end with the same parts on each rank."""
    training = hsdp(7, "--layout", layout, "--dropout", "0", "--clip")
    plain = finals_under_torchrun(tmp_path, 4, training.program, "--plain", "--steps", "7", *training.arguments)
    assert plain == bench.reference(training).finals


@pytest.mark.all
@pytest.mark.parametrize("layout", ["fsdp", "tp_fsdp", "zero"])
def test_without_replicas_the_first_loss_ends_the_job(bench: Bench, layout: str) -> None:
    outcome = bench.run(hsdp(7, "--layout", layout), faults=["kill rank 2 in FORWARD of step 3"])
    assert outcome.status == 1, outcome.describe()
    assert "held by rank 2 only: every copy is lost" in outcome.report.error, outcome.describe()
    assert "losing a device: never survived" in outcome.stderr
    assert not check_protocol(outcome), outcome.describe()


@pytest.mark.all
def test_an_average_of_what_a_divided_optimizer_sends_is_refused(bench: Bench) -> None:
    outcome = bench.run(hsdp(7, "--layout", "zero_dp", "--ema"))
    assert outcome.status == 1, outcome.describe()
    assert "ema averages parameters that a ZeroRedundancyOptimizer sends" in outcome.report.error


def check_coverage(run_dir: Path) -> None:
    found = msgspec.json.decode((run_dir / "coverage.json").read_bytes(), type=Coverage)
    assert [(part.key, part.ranks) for part in found.parts] == [("shard 1/2", (0, 2)), ("shard 2/2", (1, 3))]
    assert {loss.what: (loss.survived, loss.cases) for loss in found.losses} == {
        "a device": (4, 4),
        "two devices": (4, 6),
        "a host": (0, 1),
    }
    assert json.loads((run_dir / "coverage.json").read_text())["parts"][0]["parameter_bytes"] > 0
