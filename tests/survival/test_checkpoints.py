"""A job that ended and is started again goes on from its last checkpoint, and ends as if it had never ended."""

from pathlib import Path

import pytest

from relight.training.checkpoint_files import place_of, published
from tests.survival.harness import Bench, Outcome, Training
from tests.survival.judge import check_protocol

ALL_LOST = ("kill rank 1 in FORWARD of step 5", "kill rank 0 in STOP of recovery 1")
# Everything that a rank may have of its own, and everything that all share.
RICH = ("--local-buffers", "--batchnorm", "--data", "stateful", "--streams", "preserve", "--scheduler")


def keeping(root: Path, *arguments: str, steps: int = 8) -> Training:
    return Training(ranks=2, steps=steps, arguments=(*arguments, "--checkpoint", str(root), "--checkpoint-every", "4"))


def check_same_end(outcome: Outcome, reference: Outcome) -> None:
    assert (outcome.status, outcome.report.error) == (0, ""), outcome.describe()
    assert outcome.report.final_state_digest == reference.report.final_state_digest
    assert outcome.report.final_lineage == reference.report.final_lineage
    assert outcome.finals == reference.finals
    assert not check_protocol(outcome), outcome.describe()


@pytest.mark.parametrize("arguments", [(), pytest.param(RICH, marks=pytest.mark.all)], ids=["plain", "rich"])
def test_every_replica_is_lost_and_the_job_started_again(
    bench: Bench, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    root = tmp_path / "checkpoints"
    with bench.start(keeping(root, *arguments, "--hold-at", "4"), faults=ALL_LOST, standbys=0) as job:
        job.wait_until(lambda: published(root)[:1] == [4], "the checkpoint of step 4 was written")
        job.release()
        lost = job.wait()
    assert lost.status == 1, lost.describe()
    assert "every replica of the state is lost" in lost.report.error
    again = bench.run(keeping(root, *arguments), standbys=0)
    assert "training goes on from the checkpoint of step 4" in again.stderr
    check_same_end(again, bench.reference(Training(ranks=2, steps=8, arguments=arguments)))
    assert published(root) == [8, 4]
    assert sorted(path.name for path in root.iterdir()) == [place_of(root, v).name for v in (4, 8)]


@pytest.mark.all
def test_a_failure_after_a_start_from_a_checkpoint_is_survived(bench: Bench, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    bench.run(keeping(root, steps=4), standbys=0)
    again = bench.run(keeping(root), faults=["kill rank 0 in OPTIMIZER of step 6"])
    check_same_end(again, bench.reference(Training(ranks=2, steps=8)))
    assert published(root)[0] == 8


@pytest.mark.all
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(bench: Bench, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    bench.run(keeping(root, steps=4), standbys=0)
    bench.run(keeping(root, steps=6), standbys=0)
    assert published(root) == [6, 4]
    (data,) = place_of(root, 6).glob("*.distcp")
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    again = bench.run(keeping(root), standbys=0)
    assert "the checkpoint of step 6 cannot be used" in again.stderr
    assert "training goes on from the checkpoint of step 4" in again.stderr
    check_same_end(again, bench.reference(Training(ranks=2, steps=8)))


@pytest.mark.all
def test_checkpoints_none_of_which_can_be_used_end_the_job(bench: Bench, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    bench.run(keeping(root, steps=4), standbys=0)
    other = bench.run(keeping(root, "--width", "32"), standbys=0)
    assert other.status == 1
    assert "it is of another model or optimizer" in other.stderr
    assert "no checkpoint in" in other.report.error
    assert published(root) == [4]


@pytest.mark.all
def test_a_directory_that_cannot_be_written_is_told_at_once(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = bench.run(keeping(tmp_path / "file" / "checkpoints"), standbys=0)
    assert outcome.status == 1
    assert "no checkpoint can be written to" in outcome.report.error
    assert outcome.report.final_version == 0


@pytest.mark.all
def test_a_checkpoint_that_cannot_be_written_does_not_stop_the_training(bench: Bench, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    place_of(root, 4, complete=False).touch()
    outcome = bench.run(keeping(root, steps=6), standbys=0)
    assert outcome.status == 0, outcome.describe()
    assert "no checkpoint of step 4" in outcome.stderr
    assert "Training goes on" in outcome.stderr
    assert published(root) == [6]


@pytest.mark.all
def test_starting_anew_among_the_checkpoints_of_another_run_is_refused(bench: Bench, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    bench.run(keeping(root, steps=4), standbys=0)
    outcome = bench.run(keeping(root, "--checkpoint-anew"), standbys=0)
    assert outcome.status == 1
    assert "holds checkpoints of another run (the newest of step 4)" in outcome.report.error
