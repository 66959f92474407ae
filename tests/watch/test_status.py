"""The state of a job, told from the files of its run directory."""

import io
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from relight.core.protocol.events import BitsDoubted, ProcessSuspected, ShutdownRequested
from relight.core.protocol.position import Position
from relight.errors import UsageError
from relight.server.records.journal import SILENT_SECONDS
from relight.watch.run import Run
from relight.watch.run_dir import State, find_run
from relight.watch.status import Status
from relight.watch.tables import whole
from relight.watch.top import Looker, page, scrolled
from tests.dashboard.made_up import MadeUpJob


def make(tmp_path: Path, ranks: int = 4, *, ago: float = 12.0, until: int = 100, **given: float) -> MadeUpJob:
    """A job that began so many seconds ago."""
    return MadeUpJob(tmp_path / "run", ranks=ranks, wall=time.time() - ago, until=until, step_seconds=0.5, **given)  # type: ignore[arg-type]


def look(tmp_path: Path) -> Status:
    run = Run(tmp_path / "run")
    try:
        return Looker(run).look()
    finally:
        run.close()


def shown(status: Status, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(whole(status))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_job_that_trains(tmp_path: Path) -> None:
    made = make(tmp_path)
    made.steps(10)
    status = look(tmp_path)
    assert (status.state, status.stage, status.waiting) == (State.RUNNING, "training", "")
    assert (status.version, status.until, status.failures, status.may_fail) == (10, 100, 0, 3)
    assert (status.standbys_ready, status.standbys_asked) == (1, 1)
    assert status.steps_per_second == pytest.approx(2.0, rel=0.05)
    assert status.left_seconds == pytest.approx(45, rel=0.05)
    assert [(line.rank, line.host, line.step, line.version) for line in status.ranks] == [
        (rank, "node-0", 9, 10) for rank in range(4)
    ]
    text = shown(status)
    assert "running, training" in text
    assert "10 of 100, 2 steps/s, about 45.0 s left" in text
    assert "3 more ranks may fail at once" in text


def test_a_job_that_waits_says_for_whom(tmp_path: Path) -> None:
    made = make(tmp_path)
    made.steps(4)
    made.die(1)
    status = look(tmp_path)
    assert status.stage == "stopping"
    assert status.waiting.startswith("waiting for ranks 0, 1, 2, 3 to pause, for ")
    assert status.ranks[1].phase != "DEAD"  # a standby holds it
    assert "last failure" in shown(status)
    made.recover()
    assert look(tmp_path).waiting == ""


def test_without_a_standby_it_waits_for_a_process_and_says_why(tmp_path: Path) -> None:
    made = make(tmp_path, standbys=0)
    made.steps(4)
    made.die(2)
    status = look(tmp_path)
    assert status.waiting == (
        "waiting for a replacement of rank 2: no standby was left; a process was ordered from node-0 "
        + status.waiting.rpartition("node-0 ")[2]
    )
    assert status.ranks[2].phase == "DEAD"
    assert status.may_fail == 2


def test_a_job_that_is_over(tmp_path: Path) -> None:
    made = make(tmp_path)
    made.steps(4)
    made.tell(made.at, ShutdownRequested(reason="SIGTERM"))
    status = look(tmp_path)
    assert (status.state, status.error) == (State.FAILED, "stopped: SIGTERM")
    assert status.seconds == pytest.approx(made.at, abs=0.5)
    assert "nothing failed" not in shown(status)
    assert "then it ended early" in shown(status)


def test_a_job_that_was_killed_is_lost(tmp_path: Path) -> None:
    made = make(tmp_path, ago=1000.0)
    made.steps(4)
    then = time.time() - 990
    os.utime(tmp_path / "run" / "journal.jsonl", (then, then))
    status = look(tmp_path)
    assert status.state is State.LOST
    assert status.seconds == pytest.approx(10, abs=1)
    assert (status.may_fail, status.standbys_ready) == (0, 0)
    assert "no controller has written it for 16 min 30 s" in shown(status)


def test_a_controller_that_touches_its_journal_lives(tmp_path: Path) -> None:
    """A job may do nothing that its journal tells for hours."""
    made = make(tmp_path, ago=1000.0)
    made.steps(4)
    now = time.time()
    os.utime(tmp_path / "run" / "journal.jsonl", (now - SILENT_SECONDS / 2,) * 2)
    assert look(tmp_path).state is State.RUNNING


def test_half_written_files_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    made = make(tmp_path)
    made.steps(4)
    for name in ("journal.jsonl", "trace.jsonl"):
        path = tmp_path / "run" / name
        path.write_bytes(path.read_bytes()[:-7])
    assert look(tmp_path).version > 0


def test_of_a_long_trace_only_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path, ago=2000.0, until=10_000)
    made.steps(3000, chunk_steps=10)
    monkeypatch.setattr("relight.watch.run.TRACE_BYTES", 40_000)
    monkeypatch.setattr("relight.watch.run.TRACE_BYTES_PER_RANK", 0)
    run = Run(tmp_path / "run")
    run.read()
    assert run.job.version() == 3000
    assert len(run.job.rows[0]._times) < 1000
    # Begun anew a moment ago: the file before has the rest.
    os.rename(tmp_path / "run" / "trace.jsonl", tmp_path / "run" / "trace.1.jsonl")
    made.steps(1)
    assert look(tmp_path).ranks[0].step_seconds == pytest.approx(0.5, abs=0.1)
    run.read()
    assert run.job.version() == 3001
    run.close()


def test_what_a_script_is_called_cannot_move_the_cursor(tmp_path: Path) -> None:
    made = make(tmp_path, job="\x1b[2J")  # type: ignore[arg-type]
    made.steps(2)
    made.tell(
        made.at,
        ProcessSuspected(
            process="w1", kind="hang", evidence="\x1b]0;x\x07[bold]", position=Position(step=2), noticed_ns=1
        ),
    )
    text = shown(look(tmp_path))
    assert "\x1b" not in text
    assert "[bold]" in text


def test_many_ranks_are_not_all_listed_and_the_odd_ones_are(tmp_path: Path) -> None:
    made = make(tmp_path, ranks=100, standbys=0)
    made.steps(2)
    made.die(77)
    text = shown(look(tmp_path))
    assert "DEAD" in text
    assert "68 more ranks" in text


def test_top_shows_what_fits_and_scrolls(tmp_path: Path) -> None:
    made = make(tmp_path, ranks=50)
    made.steps(2)
    status = look(tmp_path)
    console = Console(file=io.StringIO(), width=100, height=20)
    console.print(page(status, 7, console))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert len(text.splitlines()) <= 20
    assert "ranks 7 to " in text
    assert scrolled(7, "up", 50, 10) == 6
    assert scrolled(7, "page up", 50, 10) == 0
    assert scrolled(45, "page down", 50, 10) == 49
    assert scrolled(45, "home", 50, 10) == 0


def test_the_newest_run_is_the_one_that_was_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there is no run under"):
        find_run(None)
    for number, name in enumerate(("b", "c", "a")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "journal.jsonl").touch()
        os.utime(tmp_path / "runs" / name / "journal.jsonl", (number, number))
    (tmp_path / "runs" / "d").mkdir()
    assert find_run(None) == Path("runs/a")
    with pytest.raises(UsageError, match="holds no journal"):
        find_run(tmp_path)


def test_a_doubt_is_shown_while_the_job_runs(tmp_path: Path) -> None:
    made = make(tmp_path)
    made.steps(3)
    assert "bits as undisturbed" not in shown(look(tmp_path))
    made.tell(made.at, BitsDoubted(process="w1", rank=1, step=2, reason="a collective was cut short"))
    status = look(tmp_path)
    assert (status.bits_as_undisturbed, len(status.doubts)) == ("", 1)
    assert "not known, because rank 1 in step 2: a collective was cut short" in shown(status)
