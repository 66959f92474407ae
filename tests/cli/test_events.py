"""`relight events`, as programs read it."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from relight.core.protocol.events import ShutdownRequested
from relight.server.records.journal import SILENT_SECONDS
from tests.cli.command import Command
from tests.cli.conftest import Relight
from tests.dashboard.made_up import MadeUpJob


def test_events_come_until_the_job_ends(begin: Callable[..., Command], tmp_path: Path) -> None:
    """The journal need not be there when a program begins to listen."""
    command = begin("events", "--follow", "run")
    made = MadeUpJob(tmp_path / "run", ranks=2, wall=time.time(), until=50)
    command.wait_for_output("training_started")
    made.steps(2)
    made.fail(1)
    command.wait_for_output("recovery_finished")
    made.tell(made.at, ShutdownRequested(reason="SIGTERM"))
    result = command.finish()
    assert result.status == 0
    events = [json.loads(line) for line in result.output.splitlines()]
    assert [events[0]["event"], events[-1]["event"]] == ["job_started", "job_ended"]


def test_a_job_that_nobody_runs_any_more_is_not_waited_for(relight: Relight, tmp_path: Path) -> None:
    MadeUpJob(tmp_path / "run", ranks=2, wall=time.time(), until=50)
    then = time.time() - SILENT_SECONDS - 1
    os.utime(tmp_path / "run" / "journal.jsonl", (then, then))
    result = relight("events", "--follow", "run")
    assert result.status == 4
    assert "no controller runs this job" in result.errors
    assert "training_started" in result.output


def test_a_reader_that_goes_away_is_no_error(begin: Callable[..., Command], tmp_path: Path) -> None:
    MadeUpJob(tmp_path / "run", ranks=300, wall=time.time(), until=50)
    reading, writing = os.pipe()
    command = begin("events", "run", output=writing)
    os.close(writing)
    assert os.read(reading, 10) == b'{"event":"'
    os.close(reading)
    result = command.finish()
    assert (result.status, result.errors) == (0, "")


def test_a_journal_that_is_not_understood(relight: Relight, tmp_path: Path) -> None:
    MadeUpJob(tmp_path / "run", ranks=2, wall=time.time(), until=50)
    with (tmp_path / "run" / "journal.jsonl").open("ab") as file:
        file.write(b'{"now": 3, "event": {"type": "SomethingNew"}}\n')
    result = relight("events", "run")
    assert result.status == 2
    assert "another version of relight" in result.errors
