"""`relight prove`, as its user meets it: with a script that is right, and with scripts that are not."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Command, Result
from tests.cli.conftest import Relight
from tests.survival.harness import PRELOADED

DEADLINE_SECONDS = 240.0 * float(os.environ.get("RELIGHT_TEST_PATIENCE", "1"))
PROGRAM = Path(__file__).parents[1] / "programs" / "proved.py"
Begin = Callable[..., Command]


def prove(begin: Begin, how: str, *flags: str) -> Result:
    flags = ("--nproc-per-node", "2", "--steps", "6", "--rounds", "1", "--run-dir", "proof", *PRELOADED, *flags)
    return begin("prove", *flags, str(PROGRAM), "--how", how).finish(DEADLINE_SECONDS)


def line_of(text: str) -> int:
    """Return the line where the program has this."""
    (number,) = [n for n, line in enumerate(PROGRAM.read_text().splitlines(), 1) if text in line]
    return number


def test_a_script_that_is_right_is_equal(begin: Begin, tmp_path: Path) -> None:
    result = prove(begin, "right")
    assert result.status == 0, result.errors + result.output
    said = (
        r"EQUAL: after [12] failures? in 1 round, each of 6 steps left the bits of the undisturbed run on all 2 ranks"
    )
    assert re.search(said, result.output), result.output
    assert re.search(r"relight: round 1: [12] (planned )?failures? struck", result.errors), result.errors
    # What the user has is as it was: the script's checkpoints lie elsewhere, and what follows its loop was not run.
    assert [path.name for path in tmp_path.iterdir()] == ["proof"]
    for attempt in ("undisturbed", "round-1"):
        assert "the code after the loop" not in (tmp_path / "proof" / attempt / "terminal.txt").read_text()
    again = begin("prove", "--run-dir", "proof", str(PROGRAM)).finish()
    assert again.status == 2
    assert "holds an earlier proof" in again.errors


def test_state_that_relight_cannot_know_of_is_found_and_its_line_named(begin: Begin) -> None:
    result = prove(begin, "hidden", "--json")
    assert result.status == 1, result.errors + result.output
    found = json.loads(result.output)
    assert found["verdict"] == "different"
    difference: dict[str, Any] = found["rounds"][-1]["difference"]
    assert difference["recovery"] == 1
    (replacement,) = [rank for rank in difference["ranks"] if rank["role"].startswith("replacement since recovery 1")]
    assert any(each["name"].startswith("model.module.") for each in replacement["state"])
    (divergence,) = [each for each in difference["divergences"] if each["rank"] == replacement["rank"]]
    assert divergence["place"] == f"proved.py:{line_of('scaled = loss / average')}", divergence
    assert " instead of " in divergence["what"]


@pytest.mark.all
def test_a_variable_that_the_loop_carries_is_no_hidden_state(begin: Begin) -> None:
    result = prove(begin, "local")
    assert result.status == 0, result.errors + result.output


@pytest.mark.all
def test_a_script_that_depends_on_the_time_is_told_so(begin: Begin) -> None:
    result = prove(begin, "clock")
    assert result.status == 1, result.errors + result.output
    assert "before any failure struck: the script computes something else each time it is started" in result.output


def test_a_script_that_fails_by_itself(begin: Begin) -> None:
    result = prove(begin, "fails")
    assert result.status == 1, result.errors + result.output
    assert "Without any failure the script ended with an error" in result.output
    assert "this script is broken" in result.output


def test_ctrl_c_ends_the_attempt_that_runs(begin: Begin) -> None:
    command = begin("prove", "--nproc-per-node", "2", "--run-dir", "proof", str(PROGRAM))
    command.wait_for(lambda: bool(command.children("relight.server")), "its first attempt runs")
    command.process.send_signal(signal.SIGINT)
    assert command.finish().status == 130


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nproc-per-node", "1", str(PROGRAM)), "needs two ranks or more"),
        (("--steps", "3", str(PROGRAM)), "--steps 3: expected 4 or more"),
        (("--rounds", "0", str(PROGRAM)), "--rounds 0: expected 1 or more"),
        (("nowhere.py",), "there is no script nowhere.py"),
        ((), "no script given"),
        (("--round", "2", str(PROGRAM)), "did you mean --rounds?"),
    ],
)
def test_misuse(relight: Relight, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    result = relight("prove", *arguments)
    assert result.status == 2
    assert words in result.errors
    assert not list(tmp_path.rglob("journal.jsonl"))


def test_its_help_says_what_it_does(relight: Relight) -> None:
    result = relight("prove", "--help")
    assert result.status == 0
    for words in ("runs for a few steps without a failure", "--rounds R", "status: 0 equal", "code after the loop"):
        assert words in result.output
