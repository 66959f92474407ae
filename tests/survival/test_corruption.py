"""Bits that change by themselves: found by comparing replicas, and repaired from the majority."""

from pathlib import Path

import pytest

from relight.core.account.verdict import NOT_KNOWN
from relight.training.checkpoint.files import published
from tests.survival.harness import Bench, Outcome, Training
from tests.survival.judge import check_protocol, check_survived

VERIFY = ("--verify-every", "2")
PATIENT = ("--outside-hang-timeout-seconds", "60")  # with a job that is held


def check_doubted(outcome: Outcome, rank: int) -> None:
    """The step since which that rank contributed wrong gradients is not known, and the job says so."""
    report = outcome.report
    assert report.bits_as_undisturbed == NOT_KNOWN, outcome.describe()
    assert [doubt.rank for doubt in report.doubts] == [rank], outcome.describe()
    assert f"relight: bits as undisturbed: not known, because rank {rank} in step" in outcome.stderr


# With DDP's own broadcast of buffers, rank 0's would be everybody's before anybody could compare.
@pytest.mark.parametrize(
    ("what", "rank", "arguments"),
    [
        ("flip-parameter", 0, ()),
        pytest.param("flip-optimizer", 2, (), marks=pytest.mark.all),
        pytest.param("flip-buffer", 1, ("--local-buffers",), marks=pytest.mark.all),
    ],
)
def test_a_bit_that_flips_in_a_step_that_is_verified_is_as_if_it_had_not(
    bench: Bench, what: str, rank: int, arguments: tuple[str, ...]
) -> None:
    training = Training(steps=7, arguments=arguments)
    outcome = bench.run(training, faults=[f"{what} rank {rank} in FORWARD of step 4"], flags=VERIFY)
    check_survived(outcome, bench.reference(training), may_doubt=True)  # it could have been in step 3 as well
    check_doubted(outcome, rank)
    (failure,) = outcome.report.failures
    assert (failure.kind, failure.rank, failure.step, failure.phase) == ("corruption", rank, 4, "BARRIER")
    (recovery,) = outcome.report.recoveries
    assert (recovery.replaced, recovery.target_version) == ((rank,), 4)


def test_a_bit_that_flips_between_two_comparisons_is_found_at_the_next(bench: Bench) -> None:
    """Its gradients have entered the step before; but from the comparison on all ranks hold the same again."""
    outcome = bench.run(Training(), faults=["flip-parameter rank 1 in FORWARD of step 3"], flags=VERIFY)
    assert (outcome.status, outcome.report.error) == (0, ""), outcome.describe()
    (failure,) = outcome.report.failures
    assert (failure.kind, failure.rank, failure.step) == ("corruption", 1, 4)
    assert len({final["parameters"] for final in outcome.finals.values()}) == 1
    assert len(outcome.finals) == 3
    check_doubted(outcome, 1)
    assert not check_protocol(outcome), outcome.describe()


@pytest.mark.all
def test_a_doubt_outlives_the_job(bench: Bench, tmp_path: Path) -> None:
    """All of the job is killed behind a checkpoint; the one that goes on from it cannot vouch for its bits either."""
    root = tmp_path / "checkpoints"
    keeping = ("--checkpoint", str(root), "--checkpoint-every", "2")
    training = Training(steps=8, arguments=(*keeping, "--hold-at", "6"))
    faults = ["flip-parameter rank 1 in FORWARD of step 3"]
    with bench.start(training, faults=faults, flags=(*VERIFY, *PATIENT)) as job:
        job.wait_until(lambda: published(root)[:1] == [6], "the checkpoint of step 6 was written")
        job.kill()
    again = bench.run(Training(steps=8, arguments=keeping), standbys=0)
    assert (again.status, again.report.error, again.report.failures) == (0, "", ()), again.describe()
    assert "training goes on from the checkpoint of step 6" in again.stderr, again.describe()
    assert again.report.bits_as_undisturbed == NOT_KNOWN, again.describe()
    (doubt,) = {doubt.reason for doubt in again.report.doubts}
    assert doubt.startswith("the checkpoint that it went on from is of a job that said: "), again.describe()
    assert f"{doubt}" in again.stderr.replace("\n", " "), again.describe()


def test_who_compares_in_each_step_has_lost_nothing(bench: Bench) -> None:
    outcome = bench.run(
        Training(), faults=["flip-parameter rank 1 in FORWARD of step 3"], flags=("--verify-every", "1")
    )
    check_survived(outcome, bench.reference(Training()))


@pytest.mark.parametrize(
    ("fault", "arguments"),
    [
        ("flip-parameter rank 1 in FORWARD of step 0", ("--batchnorm", "--local-buffers")),
        pytest.param(
            "flip-buffer rank 1 in FORWARD of step 0", ("--batchnorm", "--local-buffers"), marks=pytest.mark.all
        ),
        ("flip-buffer rank 1 in FORWARD of step 0", ("--local-buffers",)),
    ],
)
def test_a_bit_that_flips_in_the_first_step(bench: Bench, fault: str, arguments: tuple[str, ...]) -> None:
    """BatchNorm's buffers differ between ranks by then; a buffer that no step changes must not."""
    outcome = bench.run(Training(arguments=arguments), faults=[fault], flags=("--verify-every", "1"))
    check_survived(outcome, bench.reference(Training(arguments=arguments)))


@pytest.mark.all
def test_a_bit_that_flips_after_the_last_comparison_is_found_at_the_end(bench: Bench) -> None:
    outcome = bench.run(Training(), faults=["flip-parameter rank 1 in FORWARD of step 5"])
    assert (outcome.status, outcome.report.error) == (0, ""), outcome.describe()
    (failure,) = outcome.report.failures
    assert (failure.kind, failure.rank) == ("corruption", 1)
    assert len({final["parameters"] for final in outcome.finals.values()}) == 1
    check_doubted(outcome, 1)


def test_two_ranks_cannot_tell_who_is_right(bench: Bench) -> None:
    outcome = bench.run(Training(ranks=2), faults=["flip-parameter rank 1 in FORWARD of step 4"], flags=VERIFY)
    assert outcome.status == 1, outcome.describe()
    assert "the state of version 4 differs between rank 0; rank 1, and no majority" in outcome.report.error
    assert "Resume from your last checkpoint" in outcome.stderr


# --- no majority, and a fallback tier --------------------------------------------------------------------------------
def check_fell(outcome: Outcome, reference: Outcome, tier: str, target: int, compared: int) -> None:
    """All went back to a version at which the replicas still agreed, and ended with the bits of an undisturbed run."""
    assert (outcome.status, outcome.report.error) == (0, ""), outcome.describe()
    assert outcome.report.final_state_digest == reference.report.final_state_digest, outcome.describe()
    assert outcome.report.final_lineage == reference.report.final_lineage
    assert outcome.finals == reference.finals
    (failure,) = outcome.report.failures
    assert (failure.kind, failure.rank, failure.step) == ("corruption", -1, compared), outcome.describe()
    assert "and no majority tells which is right" in failure.evidence
    (recovery,) = outcome.report.recoveries
    assert (recovery.tier, recovery.target_version, recovery.replaced) == (tier, target, ()), outcome.describe()
    assert recovery.steps_undone == compared - target
    assert f"fallback to the {tier}: all ranks go back to version {target}" in outcome.stderr
    assert not check_protocol(outcome), outcome.describe()


@pytest.mark.all
# A moment's lowest bit may be rounded away again in the next steps.
@pytest.mark.parametrize(
    ("what", "step", "arguments"),
    [
        ("flip-parameter", 7, ()),
        pytest.param("flip-optimizer", 8, ("--batchnorm", "--data", "stateful"), marks=pytest.mark.all),
        pytest.param("flip-buffer", 5, ("--local-buffers",), marks=pytest.mark.all),
    ],
)
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.all), 1])
def test_two_ranks_that_cannot_tell_go_back_to_a_checkpoint_from_before(
    bench: Bench, tmp_path: Path, what: str, step: int, rank: int, arguments: tuple[str, ...]
) -> None:
    """The newest checkpoint, of step 6, may hold the flipped bit, and is removed. So they go back to that of step 3."""
    root = tmp_path / "checkpoints"
    keeping = (*arguments, "--checkpoint", str(root), "--checkpoint-every", "3")
    bench.run(Training(ranks=2, steps=3, arguments=keeping), standbys=0)
    training = Training(ranks=2, steps=10, arguments=(*keeping, "--hold-at", "6"))
    faults, flags = [f"{what} rank {rank} in FORWARD of step {step}"], ("--verify-every", "4", *PATIENT)
    with bench.start(training, faults=faults, flags=flags) as job:
        job.wait_until(lambda: published(root) == [6, 3], "the checkpoint of step 6 was written")
        job.release()
        outcome = job.wait()
    check_fell(outcome, bench.reference(Training(ranks=2, steps=10, arguments=arguments)), "checkpoint", 3, 8)
    if rank == 1:
        return
    again = bench.run(Training(ranks=2, steps=12, arguments=keeping), standbys=0)
    assert "training goes on from the checkpoint of step 10" in again.stderr
    assert again.finals == bench.reference(Training(ranks=2, steps=12, arguments=arguments)).finals


@pytest.mark.all
@pytest.mark.parametrize("what", ["flip-parameter", "flip-optimizer"])
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("layout", ["hsdp", "tp_dp", "zero_dp"])
def test_two_holders_of_a_part_go_back_to_buddy_memory(bench: Bench, what: str, rank: int, layout: str) -> None:
    arguments = ("--layout", layout)
    snapshots = ("--buddy", "4", "--pause", "0.2")
    outcome = bench.run(
        Training(ranks=4, steps=9, program="divided.py", arguments=(*arguments, *snapshots)),
        faults=[f"{what} rank {rank} in FORWARD of step 8"],
        flags=("--verify-every", "2"),
    )
    reference = bench.reference(Training(ranks=4, steps=9, program="divided.py", arguments=arguments))
    check_fell(outcome, reference, "buddy memory", 4, 8)
    (failure,) = outcome.report.failures
    part = "modules.model." if what == "flip-parameter" else "optimizers."
    assert f"(first in {part}" in failure.evidence, outcome.describe()


@pytest.mark.all
def test_nothing_is_left_from_before(bench: Bench, tmp_path: Path) -> None:
    """Both ranks agreed last behind the first step."""
    root = tmp_path / "checkpoints"
    keeping = ("--checkpoint", str(root), "--checkpoint-every", "3")
    outcome = bench.run(
        Training(ranks=2, steps=8, arguments=keeping), faults=["flip-parameter rank 1 in FORWARD of step 2"]
    )
    assert outcome.status == 1, outcome.describe()
    error = outcome.report.error
    assert "the state of version 8 differs between rank 0; rank 1, and no majority" in error
    assert "No buddy and no checkpoint holds a version from before that (replicas agreed last at version 1)" in error
    assert outcome.report.saved_version == -1


@pytest.mark.all
def test_a_script_whose_ranks_compute_different_things_is_a_bug(bench: Bench, tmp_path: Path) -> None:
    """Again and again at the same place: going back does not help."""
    root = tmp_path / "checkpoints"
    keeping = ("--checkpoint", str(root), "--checkpoint-every", "2", "--hold-at", "3")
    faults = [
        f"flip-parameter rank 1 in FORWARD of step 4{f' attempt {attempt}' if attempt else ''}" for attempt in range(3)
    ]
    training = Training(ranks=2, steps=8, arguments=keeping)
    with bench.start(training, faults=faults, flags=(*VERIFY, *PATIENT)) as job:
        job.wait_until(lambda: published(root)[:1] == [2], "the checkpoint of step 2 was written")
        job.release()
        outcome = job.wait()
    assert outcome.status == 1, outcome.describe()
    assert "(3 times in the same place, so it is a bug, not a failure)" in outcome.report.error, outcome.describe()
    assert outcome.report.saved_version == -1
