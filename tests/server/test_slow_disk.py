"""A disk that takes its time is named in the report: every recovery waits for it."""

import os
import time
from pathlib import Path

import pytest

from relight.core.protocol.commands import Notice, Stop
from relight.server.records.journal import Journal
from relight.wire.settings import JobSettings

DISK_SECONDS = 0.05


def test_orders_that_waited_for_the_disk_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = JobSettings(job="j", script="s", run_dir=str(tmp_path))
    journal = Journal(tmp_path, settings, lambda level, text: None)
    slow = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        time.sleep(DISK_SECONDS)  # this is the disk
        slow(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    assert journal.commands(3.0, [Notice(why="nothing that must be safe", level="info")]) == ""
    assert journal.storage_waits == []
    assert journal.commands(4.0, [Stop(generation=2, why="a failure")]) == ""
    (wait,) = journal.storage_waits
    assert wait.at_seconds == 4.0
    assert wait.seconds >= DISK_SECONDS
    journal.close()


def test_a_journal_shows_that_its_controller_lives(tmp_path: Path) -> None:
    journal = Journal(tmp_path, JobSettings(job="j", script="s"), lambda level, text: None)
    path = tmp_path / "journal.jsonl"
    os.utime(path, (1, 1))
    journal.show_life()
    assert path.stat().st_mtime > 1
    journal.close()
    os.utime(path, (1, 1))
    journal.show_life()  # the dead say nothing
    assert path.stat().st_mtime == 1
