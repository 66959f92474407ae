"""Below replicas: a part of the state without any holder comes back from buddy memory, or from the disk.

Each job ends with the bits of one that nothing disturbed: what is gone back over is computed again, and is the same.
"""

import signal

import pytest

from tests.survival.harness import Bench, Outcome, Training, send
from tests.survival.judge import check_protocol, traceback_of

EVERY = 4


def divided(steps: int, *arguments: str, layout: str = "fsdp") -> Training:
    return Training(
        ranks=4,
        steps=steps,
        program="divided.py",
        arguments=("--layout", layout, "--buddy", str(EVERY), "--pause", "0.03", *arguments),
    )


def check_came_back(outcome: Outcome, reference: Outcome, tiers: tuple[str, ...]) -> None:
    """It ended as the reference did; each recovery came from the tier it should, and says what was undone."""
    report = outcome.report
    assert (outcome.status, report.error) == (0, ""), outcome.describe()
    assert report.final_state_digest == reference.report.final_state_digest, outcome.describe()
    assert report.final_lineage == reference.report.final_lineage, outcome.describe()
    assert outcome.finals == reference.finals, outcome.describe()
    assert not check_protocol(outcome), f"{check_protocol(outcome)}\n{outcome.describe()}"
    assert not traceback_of(outcome), outcome.describe()
    assert tuple(recovery.tier for recovery in report.recoveries) == tiers, outcome.describe()
    for recovery in report.recoveries:
        if recovery.tier == "buddy memory":
            # A snapshot is on its way for a few steps; if it has not arrived, the one before counts.
            assert recovery.steps_undone <= 2 * EVERY, outcome.describe()
            assert f"back to version {recovery.target_version} from version" in outcome.stderr, outcome.describe()


@pytest.mark.all
def test_fsdp_without_replicas_survives_the_loss_of_a_rank(bench: Bench) -> None:
    training = divided(12)
    outcome = bench.run(training, faults=["kill rank 2 in FORWARD of step 7"])
    check_came_back(outcome, bench.reference(training), ("buddy memory",))


@pytest.mark.all
def test_a_flag_will_do(bench: Bench) -> None:
    arguments = ("--layout", "fsdp", "--pause", "0.03")
    training = Training(ranks=4, steps=12, program="divided.py", arguments=arguments)
    flags = ("--buddy-every", str(EVERY))
    outcome = bench.run(training, faults=["kill rank 2 in FORWARD of step 7"], flags=flags)
    check_came_back(outcome, bench.reference(training), ("buddy memory",))


@pytest.mark.all
@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize(
    "point",
    ["BETWEEN_STEPS", "FORWARD", "BACKWARD", "BEFORE_BARRIER", "BARRIER", "OPTIMIZER", "AFTER_WRITE", "AFTER_STEP"],
)
def test_a_kill_anywhere(bench: Bench, point: str, rank: int) -> None:
    training = divided(14)
    outcome = bench.run(training, faults=[f"kill rank {rank} in {point} of step 9"])
    check_came_back(outcome, bench.reference(training), ("buddy memory",))


@pytest.mark.all
@pytest.mark.parametrize("point", ["FORWARD", "BACKWARD", "OPTIMIZER"])
@pytest.mark.parametrize("step", [4, 5, 8])  # snapshots are copied, or on their way
def test_a_kill_while_snapshots_are_made(bench: Bench, step: int, point: str) -> None:
    training = divided(12)
    outcome = bench.run(training, faults=[f"kill rank 1 in {point} of step {step}"])
    check_came_back(outcome, bench.reference(training), ("buddy memory",))


@pytest.mark.all
@pytest.mark.parametrize(
    "arguments",
    [
        "--batchnorm",
        "--clip --scheduler",
        "--accumulate 2",
        "--evaluate --batchnorm",
        "--layout tp_fsdp --batchnorm",
        "--layout zero --views",
    ],
)
def test_features(bench: Bench, arguments: str) -> None:
    training = divided(12, *arguments.split())
    outcome = bench.run(training, faults=["kill rank 2 in BACKWARD of step 7"])
    check_came_back(outcome, bench.reference(training), ("buddy memory",))


def test_a_part_of_an_optimizer_beside_a_wrapper_with_rebuilt_buckets(bench: Bench) -> None:
    """A replacement has taken the buckets' layout before it has the version that they are of."""
    training = divided(12, "--layout", "zero", "--clip")
    outcome = bench.run(training, faults=["kill rank 2 in BACKWARD of step 7"])
    check_came_back(outcome, bench.reference(training), ("buddy memory",))


@pytest.mark.all
@pytest.mark.parametrize("arguments", ["--schedule 1f1b", "--batchnorm --scheduler --static"])
def test_a_pipeline_without_replicas(bench: Bench, arguments: str) -> None:
    words = ("--layout", "none", "--buddy", str(EVERY), "--pause", "0.03", *arguments.split())
    training = Training(ranks=4, steps=12, program="pipeline.py", arguments=words)
    outcome = bench.run(training, faults=["kill rank 2 in BACKWARD of step 7"])
    check_came_back(outcome, bench.reference(training), ("buddy memory",))


@pytest.mark.all
def test_one_after_the_other(bench: Bench) -> None:
    """Buddies are assigned anew after each recovery."""
    training = divided(26)
    faults = [f"kill rank {rank} in BACKWARD of step {step}" for rank, step in ((2, 6), (3, 12), (0, 18), (2, 23))]
    outcome = bench.run(training, faults=faults, standbys=2)
    check_came_back(outcome, bench.reference(training), ("buddy memory",) * 4)


@pytest.mark.all
@pytest.mark.parametrize("ranks", [(0, 2), (1, 3)])
def test_hsdp_survives_the_loss_of_both_holders_of_a_part(bench: Bench, ranks: tuple[int, int]) -> None:
    training = divided(14, layout="hsdp")
    faults = [f"kill rank {rank} in OPTIMIZER of step 9" for rank in ranks]
    outcome = bench.run(training, faults=faults, standbys=2)
    check_came_back(outcome, bench.reference(training), ("buddy memory",))


@pytest.mark.all
def test_hsdp_with_one_holder_left_goes_on_from_it(bench: Bench) -> None:
    training = divided(14, layout="hsdp")
    outcome = bench.run(training, faults=["kill rank 2 in OPTIMIZER of step 9"])
    check_came_back(outcome, bench.reference(training), ("replica",))


@pytest.mark.all
@pytest.mark.parametrize("ranks", [(1, 3), (0, 2)])
def test_fsdp_survives_two_losses_that_are_not_each_others_buddies(bench: Bench, ranks: tuple[int, int]) -> None:
    training = divided(14)
    faults = [f"kill rank {rank} in BACKWARD of step 9" for rank in ranks]
    outcome = bench.run(training, faults=faults, standbys=2)
    check_came_back(outcome, bench.reference(training), ("buddy memory",))


@pytest.mark.all
@pytest.mark.parametrize("second", [0, 1, 3])
@pytest.mark.parametrize("point", ["STOP", "ROLLBACK", "REFORM", "RESTORE_RECEIVE"])
def test_a_second_failure_while_all_go_back(bench: Bench, point: str, second: int) -> None:
    """Rank 3 is rank 2's buddy, and rank 2 was rank 1's: if either dies before it has a new one, nothing is left."""
    training = divided(14)
    who = "target" if point == "RESTORE_RECEIVE" else ""
    later = "kill the restore target during the next restore" if who else f"kill rank {second} in {point} of recovery 1"
    outcome = bench.run(training, faults=["kill rank 2 in FORWARD of step 9", later], standbys=2)
    if outcome.status == 0:
        check_came_back(outcome, bench.reference(training), ("buddy memory",))
    else:
        assert second in (1, 3), outcome.describe()
        assert "Resume from your last checkpoint" in outcome.report.error
        assert not check_protocol(outcome), outcome.describe()


@pytest.mark.all
def test_a_buddy_that_dies_with_its_ward_ends_the_job(bench: Bench) -> None:
    """Both at once, from outside: of two that die in the same step, the second may hear of the first and stop."""
    with bench.start(divided(14, "--tell", "--hold-at", "8"), standbys=2) as job:
        job.wait_until(lambda: job.output().count("committed 8") == 4, "all ranks have taken step 8")
        holders = job.workers()
        for name in ("w2", "w3"):
            send(holders[name], signal.SIGKILL)
        job.release()
        outcome = job.wait()
    assert outcome.status == 1, outcome.describe()
    assert "part shard 3/4 of the state, held by rank 2 only" in outcome.report.error, outcome.describe()
    assert not check_protocol(outcome), outcome.describe()
