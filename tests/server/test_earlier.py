"""A run directory that is used again."""

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from relight.core.protocol.commands import EndJob
from relight.errors import UsageError
from relight.server.records.earlier import going_on, has_finished, keep_aside
from relight.server.records.journal import SILENT_SECONDS, Journal
from relight.wire.settings import JobSettings


def write_run(run_dir: Path, *, ended: bool, error: str = "stopped: SIGTERM") -> Path:
    """Write the files that a run leaves there, and a checkpoint beside them."""
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "logs" / "rank-0.log").write_text("hello\n")
    (run_dir / "step-0000000020").mkdir(exist_ok=True)
    settings = JobSettings(job="mine", run_id="1", script="train.py", script_arguments=(), module=False, world_size=2)
    journal = Journal(run_dir, settings, lambda *_: None)
    if ended:
        journal.commands(1.0, [EndJob(error=error, details="", why=error)])
    journal.close()
    return run_dir / "journal.jsonl"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_files_of_runs_that_are_over_are_kept_aside(tmp_path: Path) -> None:
    assert keep_aside(tmp_path) is None
    for number in (1, 2):
        write_run(tmp_path, ended=True)
        assert keep_aside(tmp_path) == tmp_path / f"earlier-{number}"
    assert names(tmp_path) == ["earlier-1", "earlier-2", "step-0000000020"]
    for number in (1, 2):
        assert names(tmp_path / f"earlier-{number}") == ["journal.jsonl", "journal.reserve", "logs"]


def test_a_run_whose_journal_is_locked_is_alive(tmp_path: Path) -> None:
    with write_run(tmp_path, ended=True).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="still alive"):
            keep_aside(tmp_path)
    assert "logs" in names(tmp_path)


def test_a_run_without_an_end_is_over_when_nobody_has_touched_it_for_long(tmp_path: Path) -> None:
    journal = write_run(tmp_path, ended=False)
    then = time.time() - SILENT_SECONDS - 1
    os.utime(journal, (then, then))
    assert keep_aside(tmp_path) == tmp_path / "earlier-1"


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_wrong_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    """The clock of this host, that is: files are dated by that of their storage, which may be another host's."""
    silent = write_run(tmp_path / "silent", ended=False)
    then = time.time() - SILENT_SECONDS - 1
    os.utime(silent, (then, then))
    alive = write_run(tmp_path / "alive", ended=False)
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + hours * 3600)
    assert keep_aside(tmp_path / "silent") == tmp_path / "silent" / "earlier-1"
    stop = threading.Event()

    def show_life() -> None:
        while not stop.wait(0.1):
            os.utime(alive)

    thread = threading.Thread(target=show_life)
    thread.start()
    try:
        with pytest.raises(UsageError, match="still alive"):
            keep_aside(tmp_path / "alive")
    finally:
        stop.set()
        thread.join()


def test_who_was_interrupted_while_moving_goes_on_there(tmp_path: Path) -> None:
    write_run(tmp_path, ended=True)
    (tmp_path / "earlier-1").mkdir()
    (tmp_path / "logs").rename(tmp_path / "earlier-1" / "logs")
    assert keep_aside(tmp_path) == tmp_path / "earlier-1"
    assert names(tmp_path / "earlier-1") == ["journal.jsonl", "journal.reserve", "logs"]


def test_what_is_no_journal_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text("precious")
    with pytest.raises(UsageError, match="cannot be read"):
        keep_aside(tmp_path)
    assert names(tmp_path) == ["journal.jsonl"]


def test_a_host_that_comes_back_knows_whether_the_run_goes_on(tmp_path: Path) -> None:
    assert going_on(tmp_path) is None
    assert not has_finished(tmp_path)
    write_run(tmp_path / "goes on", ended=False)
    settings = going_on(tmp_path / "goes on")
    assert settings is not None
    assert settings.script == "train.py"
    assert not has_finished(tmp_path / "goes on")
    write_run(tmp_path / "failed", ended=True)
    assert (going_on(tmp_path / "failed"), has_finished(tmp_path / "failed")) == (None, False)
    write_run(tmp_path / "finished", ended=True, error="")
    assert (going_on(tmp_path / "finished"), has_finished(tmp_path / "finished")) == (None, True)
