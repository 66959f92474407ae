"""`relight check`: what a run's journal says of the recovery protocol."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from relight.core.protocol.commands import Stop
from relight.sim.model.schedule import random_schedule
from relight.sim.timed.job import SimulatedJob
from relight.wire.settings import JobSettings
from tests.cli.command import Result
from tests.recorded import write_journal

Relight = Callable[..., Result]


def record(run_dir: Path, seed: int) -> Path:
    """The journal of a simulated job, as the server writes it."""
    job = SimulatedJob(random_schedule(seed))
    job.run()
    run_dir.mkdir()
    settings = JobSettings(job="simulated", script="none", world_size=job.world_size)
    write_journal(run_dir, settings, job.journal)
    (run_dir / "report.json").write_text("{}")
    return run_dir


def test_a_sound_run(relight: Relight, tmp_path: Path) -> None:
    result = relight("check", str(record(tmp_path / "run", 1)))
    assert result.status == 0, result
    assert "every invariant holds" in result.output


def test_a_run_that_went_wrong(relight: Relight, tmp_path: Path) -> None:
    run_dir = record(tmp_path / "run", 1)
    stop = {"now": 99.0, "command": msgspec.to_builtins(Stop(generation=1, why="planted"))}
    with (run_dir / "journal.jsonl").open("ab") as journal:
        journal.write(msgspec.json.encode(stop) + b"\n")
    result = relight("check", str(run_dir))
    assert result.status == 1, result
    assert "I10: generation 1 is opened after" in result.output


def test_no_journal(relight: Relight, tmp_path: Path) -> None:
    result = relight("check", str(tmp_path))
    assert result.status == 2
    assert "journal.jsonl cannot be read" in result.errors
