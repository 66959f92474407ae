"""A job that ended and is started again goes on from its last checkpoint, and ends as if it had never ended."""

import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from relight.training.checkpoint.files import place_of, published
from relight.wire.settings import read_settings
from tests.disk import fill
from tests.survival.harness import Bench, Outcome, Training, send
from tests.survival.judge import check_protocol

ALL_LOST = ("kill rank 1 in FORWARD of step 5", "kill rank 0 in STOP of recovery 1")
# Everything that a rank may have of its own, and everything that all share.
RICH = (
    "--ema",
    "--ema-kind",
    "buffers",
    "--local-buffers",
    "--batchnorm",
    "--data",
    "stateful",
    "--streams",
    "preserve",
    "--scheduler",
)


def with_checkpoints(training: Training, root: Path, every: int, *more: str) -> Training:
    arguments = (*training.arguments, "--checkpoint", str(root), "--checkpoint-every", str(every), *more)
    return replace(training, arguments=arguments)


def keeping(root: Path, *arguments: str, steps: int = 8) -> Training:
    return with_checkpoints(Training(ranks=2, steps=steps, arguments=arguments), root, 4)


def check_same_end(outcome: Outcome, reference: Outcome) -> None:
    assert (outcome.status, outcome.report.error) == (0, ""), outcome.describe()
    assert outcome.report.final_state_digest == reference.report.final_state_digest
    assert outcome.report.final_lineage == reference.report.final_lineage
    assert outcome.finals == reference.finals
    assert not check_protocol(outcome), outcome.describe()


@pytest.mark.parametrize("arguments", [(), pytest.param(RICH, marks=pytest.mark.all)], ids=["plain", "rich"])
def test_a_job_that_was_ended_is_started_again(bench: Bench, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    root = tmp_path / "checkpoints"
    with bench.start(keeping(root, *arguments, "--hold-at", "4"), standbys=0) as job:
        job.wait_until(lambda: published(root)[:1] == [4], "the checkpoint of step 4 was written")
        job.kill()
    again = bench.run(keeping(root, *arguments), standbys=0)
    assert "training goes on from the checkpoint of step 4" in again.stderr
    check_same_end(again, bench.reference(Training(ranks=2, steps=8, arguments=arguments)))
    assert published(root) == [8, 4]
    assert sorted(path.name for path in root.iterdir()) == [place_of(root, v).name for v in (4, 8)]


def test_a_rank_without_memory_for_a_copy_trains_on(bench: Bench, tmp_path: Path) -> None:
    """Neither the checkpoint in the middle nor the last one can be written, and no other rank waits for them."""
    training = Training(ranks=2, steps=7, program="short_of_memory.py", arguments=("--checkpoint", str(tmp_path / "c")))
    outcome = bench.run(training, standbys=0)
    assert (outcome.status, outcome.report.error) == (0, ""), outcome.describe()
    assert "no checkpoint can be written: " in outcome.stderr, outcome.describe()
    assert not outcome.report.failures, outcome.describe()
    assert published(tmp_path / "c") == []


@pytest.mark.all
@pytest.mark.parametrize("arguments", [(), RICH], ids=["plain", "rich"])
def test_every_replica_is_lost_and_the_job_goes_back_to_its_checkpoint(
    bench: Bench, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """No rank is left: processes that never trained read it."""
    root = tmp_path / "checkpoints"
    with bench.start(keeping(root, *arguments, "--hold-at", "4"), faults=ALL_LOST, standbys=1) as job:
        job.wait_until(lambda: published(root)[:1] == [4], "the checkpoint of step 4 was written")
        job.release()
        outcome = job.wait()
    check_same_end(outcome, bench.reference(Training(ranks=2, steps=8, arguments=arguments)))
    (recovery,) = outcome.report.recoveries
    assert (recovery.tier, recovery.target_version, recovery.steps_undone) == ("checkpoint", 4, 1), outcome.describe()
    assert recovery.replaced == (0, 1)


@pytest.mark.all
def test_every_replica_is_lost_before_the_first_checkpoint(bench: Bench, tmp_path: Path) -> None:
    faults = ("kill rank 1 in FORWARD of step 2", "kill rank 0 in STOP of recovery 1")
    lost = bench.run(keeping(tmp_path / "checkpoints"), faults=faults, standbys=1)
    assert lost.status == 1, lost.describe()
    assert "every replica of the state is lost" in lost.report.error


# --- divided state ------------------------------------------------------------------------------------------------
def divided(layout: str, *arguments: str, steps: int = 10) -> Training:
    return Training(ranks=4, steps=steps, program="divided.py", arguments=("--layout", layout, *arguments))


def divided_keeping(root: Path, layout: str, *arguments: str, steps: int = 10) -> Training:
    return with_checkpoints(divided(layout, *arguments, steps=steps), root, 4)


@pytest.mark.all
@pytest.mark.parametrize("arguments", ["fsdp", "hsdp --batchnorm", "tp_dp --clip", "tp_fsdp"])
def test_divided_state_is_started_again(bench: Bench, tmp_path: Path, arguments: str) -> None:
    root = tmp_path / "checkpoints"
    layout, *more = arguments.split()
    bench.run(divided_keeping(root, layout, *more, steps=6), standbys=0)
    again = bench.run(divided_keeping(root, layout, *more), standbys=0)
    assert "training goes on from the checkpoint of step 6" in again.stderr
    check_same_end(again, bench.reference(divided(layout, *more)))


@pytest.mark.all
@pytest.mark.parametrize("arguments", ["fsdp", "fsdp --batchnorm --scheduler", "tp_fsdp"])
def test_without_holders_and_buddies_the_job_goes_back_to_its_checkpoint(
    bench: Bench, tmp_path: Path, arguments: str
) -> None:
    root = tmp_path / "checkpoints"
    layout, *more = arguments.split()
    with bench.start(
        divided_keeping(root, layout, *more, "--hold-at", "5"), faults=["kill rank 2 in BACKWARD of step 7"]
    ) as job:
        job.wait_until(lambda: published(root)[:1] == [4], "the checkpoint of step 4 was written")
        job.release()
        outcome = job.wait()
    check_same_end(outcome, bench.reference(divided(layout, *more)))
    (recovery,) = outcome.report.recoveries
    assert (recovery.tier, recovery.target_version, recovery.steps_undone) == ("checkpoint", 4, 3), outcome.describe()


@pytest.mark.all
def test_both_holders_of_a_part_are_lost_and_the_checkpoint_is_read_once_a_part(bench: Bench, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    faults = ["kill rank 1 in BACKWARD of step 7", "kill rank 3 in BACKWARD of step 7"]
    training = divided_keeping(root, "hsdp", "--hold-at", "5")
    with bench.start(training, faults=faults, standbys=2) as job:
        job.wait_until(lambda: published(root)[:1] == [4], "the checkpoint of step 4 was written")
        job.release()
        outcome = job.wait()
    check_same_end(outcome, bench.reference(divided("hsdp")))
    (recovery,) = outcome.report.recoveries
    assert (recovery.tier, recovery.target_version) == ("checkpoint", 4), outcome.describe()
    assert recovery.sources == (0, 1)


@pytest.mark.all
def test_a_checkpoint_that_cannot_be_read_is_passed_over_in_a_recovery(bench: Bench, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    training = divided_keeping(root, "fsdp", "--hold-at", "9", steps=12)
    with bench.start(training, faults=["kill rank 2 in BACKWARD of step 10"]) as job:
        job.wait_until(lambda: published(root)[:2] == [8, 4], "the checkpoints of steps 4 and 8 were written")
        (data,) = place_of(root, 8).glob("__3_0.distcp")
        data.write_bytes(b"")
        job.release()
        outcome = job.wait()
    check_same_end(outcome, bench.reference(divided("fsdp", steps=12)))
    (recovery,) = outcome.report.recoveries
    assert (recovery.tier, recovery.target_version) == ("checkpoint", 4), outcome.describe()


@pytest.mark.all
def test_a_job_of_another_layout_goes_on(bench: Bench, tmp_path: Path) -> None:
    """Other sums, so other bits from then on; what it starts from is the same."""
    root = tmp_path / "checkpoints"
    first = bench.run(divided_keeping(root, "fsdp", steps=4), standbys=0)
    again = bench.run(divided_keeping(root, "hsdp", steps=4), standbys=0)
    assert "training goes on from the checkpoint of step 4" in again.stderr
    assert (first.status, again.status) == (0, 0), again.describe()
    back = bench.run(divided_keeping(root, "fsdp", steps=4), standbys=0)
    assert back.finals == first.finals


@pytest.mark.all
def test_a_failure_after_a_start_from_a_checkpoint_is_survived(bench: Bench, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    bench.run(keeping(root, steps=4), standbys=0)
    again = bench.run(keeping(root), faults=["kill rank 0 in OPTIMIZER of step 6"])
    check_same_end(again, bench.reference(Training(ranks=2, steps=8)))
    assert published(root)[0] == 8


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("__0_0.distcp", (), marks=pytest.mark.all),
        pytest.param("part-0.msgpack", (), marks=pytest.mark.all),
        pytest.param("relight.msgpack", (), marks=pytest.mark.all),
        pytest.param("rank-0.msgpack", RICH, marks=pytest.mark.all),
        ("rank-1.msgpack", RICH),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    bench: Bench, tmp_path: Path, name: str, arguments: tuple[str, ...]
) -> None:
    root = tmp_path / "checkpoints"
    training = Training(ranks=2, steps=8, arguments=arguments)
    write_two(bench, training, root)
    damage(place_of(root, 6) / name)
    again = bench.run(with_checkpoints(training, root, 4), standbys=0)
    assert "the checkpoint of step 6 cannot be used" in again.stderr
    assert ("cannot be used: rank 1: " in again.stderr) == name.startswith("rank-1")
    assert "the checkpoint of step 6 is kept as step-0000000006.unused" in again.stderr
    assert "training goes on from the checkpoint of step 4" in again.stderr
    check_same_end(again, bench.reference(training))


@pytest.mark.all
@pytest.mark.parametrize("name", ["__1_0.distcp", "part-1.msgpack", "rank-3.msgpack"])
def test_a_damaged_part_of_a_divided_checkpoint_is_passed_over_by_every_rank(
    bench: Bench, tmp_path: Path, name: str
) -> None:
    root = tmp_path / "checkpoints"
    training = Training(ranks=4, steps=8, program="divided.py", arguments=("--counters", "--batchnorm"))
    write_two(bench, training, root)
    damage(place_of(root, 6) / name)
    again = bench.run(with_checkpoints(training, root, 4), standbys=0)
    rank = next(filter(str.isdecimal, name))
    assert f"the checkpoint of step 6 cannot be used: rank {rank}: " in again.stderr, again.describe()
    assert "training goes on from the checkpoint of step 4" in again.stderr
    check_same_end(again, bench.reference(training))


@pytest.mark.all
def test_a_rank_that_dies_while_it_reads_its_part_reads_it_again(bench: Bench, tmp_path: Path) -> None:
    """The start waits for what every rank says of the checkpoint."""
    training, root = Training(ranks=2, steps=8, arguments=RICH), tmp_path / "checkpoints"
    write_two(bench, training, root)
    part = place_of(root, 6) / "rank-1.msgpack"
    content = part.read_bytes()
    part.unlink()
    os.mkfifo(part)  # whose reader waits
    with bench.start(with_checkpoints(training, root, 4)) as job:
        writers: list[int] = []

        def is_read() -> bool:
            with contextlib.suppress(OSError):  # no reader yet
                writers.append(os.open(part, os.O_WRONLY | os.O_NONBLOCK))
            return bool(writers)

        job.wait_until(is_read, "rank 1 reads its part")
        part.unlink()
        part.write_bytes(content)
        send(job.workers()["w1"], signal.SIGKILL)
        os.close(writers[0])
        outcome = job.wait()
    assert "training goes on from the checkpoint of step 6" in outcome.stderr
    check_same_end(outcome, bench.reference(training))


def write_two(bench: Bench, training: Training, root: Path) -> None:
    """Leave the checkpoints of steps 4 and 6, of a job that was killed after each."""
    for version in (4, 6):
        write_one(bench, training, root, version)
    assert published(root) == [6, 4]


def write_one(bench: Bench, training: Training, root: Path, version: int) -> None:
    with bench.start(with_checkpoints(training, root, version, "--hold-at", str(version)), standbys=0) as job:
        job.wait_until(lambda: published(root)[:1] == [version], "the checkpoint was written")
        job.kill()


def damage(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


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
    with bench.start(keeping(root, "--hold-at", "2", steps=6), standbys=0) as job:
        job.wait_until(root.exists, "the directory of the checkpoints was made")
        (settings,) = job.temporary.rglob("settings.json")
        (root / f"step-0000000004.{read_settings(settings.parent).run_id}-0.incomplete").touch()
        job.release()
        outcome = job.wait()
    assert outcome.status == 0, outcome.describe()
    assert "no checkpoint of step 4" in outcome.stderr
    assert "Training goes on" in outcome.stderr
    assert published(root) == [6]


def test_checkpoints_that_a_full_disk_has_no_room_for_leave_nothing_there(
    bench: Bench, tmp_path: Path, small_disk: Path
) -> None:
    root = small_disk / "checkpoints"
    training = Training(ranks=2, steps=205, arguments=("--pause", "0.1", "--hold-at", "200"))
    with bench.start(with_checkpoints(training, root, 2), standbys=0) as job:
        job.wait_until(lambda: bool(published(root)), "a checkpoint was written")
        ballast = fill(small_disk)
        job.wait_until(lambda: "No space left on device. Training goes on" in job.messages(), "one was not")
        full = published(root)[0]
        ballast.unlink()
        job.wait_until(lambda: published(root)[0] > full + 2, "there is room again")
        job.release()
        outcome = job.wait()
    check_same_end(outcome, bench.reference(replace(training, arguments=())))
    assert published(root)[0] == 205
    assert [path.name for path in root.iterdir() if path.name.endswith("incomplete")] == []


def test_a_rank_that_leaves_a_checkpoint_out_is_not_waited_for(bench: Bench, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    training = Training(ranks=2, steps=6, program="slow_disk.py", arguments=("--checkpoint", str(root)))
    outcome = bench.run(training, standbys=0)
    assert outcome.status == 0, outcome.describe()
    for left_out, written in ((2, 1), (3, 2)):
        said = f"no checkpoint of step {left_out}: the one of step {written} is still being written"
        assert said in outcome.stderr, outcome.describe()
    assert published(root)[0] == 6
    assert sorted(path.name for path in place_of(root, 6).iterdir() if path.name.startswith("left-out")) == []


def test_a_rank_that_died_while_it_wrote_its_part_is_not_waited_for(bench: Bench, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    training = Training(ranks=2, steps=6, program="slow_disk.py", arguments=("--checkpoint", str(root), "--stuck"))
    outcome = bench.run(training, faults=["kill rank 1 in FORWARD of step 3"])
    assert outcome.status == 0, outcome.describe()
    assert published(root)[0] == 6
    assert 1 not in published(root)


@pytest.mark.all
def test_starting_anew_among_the_checkpoints_of_another_run_is_refused(bench: Bench, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    bench.run(keeping(root, steps=4), standbys=0)
    outcome = bench.run(keeping(root, "--checkpoint-anew"), standbys=0)
    assert outcome.status == 1
    assert "holds checkpoints of another run (the newest of step 4)" in outcome.report.error
