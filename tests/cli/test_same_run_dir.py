"""One run directory, two `relight run` at the same moment: one has it, the other one is refused by name."""

import time
from pathlib import Path

import pytest

from relight.server.records.journal import read_journal
from tests.cli.command import DEADLINE_SECONDS, Command

# It trains nothing, so a round is short; it holds the directory until the other one has been refused.
PROGRAM = "#!/bin/sh\nwhile [ ! -e go ]; do sleep 0.02; done\nexit 3\n"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rounds", [5, pytest.param(20, marks=pytest.mark.all)])
def test_two_at_one_instant(tmp_path: Path, rounds: int) -> None:
    for number in range(rounds):
        place = tmp_path / str(number)
        place.mkdir()
        program = place / "program.sh"
        program.write_text(PROGRAM)
        program.chmod(0o755)
        command = ("run", "--nproc-per-node", "1", "--run-dir", "mine", "--no-python", str(program))
        both = [Command(*command, cwd=place) for _ in range(2)]
        loser = _first_to_end(both)
        result = loser.finish()
        (place / "go").touch()
        (other,) = [one for one in both if one is not loser]
        winner = other.finish()
        assert result.status == 2, (number, result)
        lines = [line for line in result.errors.splitlines() if line.startswith("relight: ")]
        assert len(lines) == 1, result.errors
        assert f"--run-dir {place / 'mine'} is in use by another `relight run`" in lines[0]
        assert winner.status == 1, (number, winner)
        assert "exited with code 3 before its first step" in winner.errors, winner.errors
        assert sorted(path.name for path in (place / "mine").glob("earlier-*")) == []
        _, told = read_journal(place / "mine" / "journal.jsonl")
        assert sum(type(line.command).__name__ == "EndJob" for line in told) == 1


def test_runs_without_a_name_get_a_directory_each(tmp_path: Path) -> None:
    program = tmp_path / "program.sh"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    several = [Command("run", "--no-python", str(program), cwd=tmp_path) for _ in range(3)]
    for one in several:
        one.wait_for(lambda: len(list((tmp_path / "runs").glob("*/journal.jsonl"))) == 3, "all have a directory")
    (tmp_path / "go").touch()
    assert [one.finish().status for one in several] == [1, 1, 1]
    assert len(list((tmp_path / "runs").glob("*/report.json"))) == 3


def _first_to_end(both: list[Command]) -> Command:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while all(one.process.poll() is None for one in both):
        assert time.monotonic() < deadline, "both go on"
        time.sleep(0.01)
    return next(one for one in both if one.process.poll() is not None)
