"""`relight doctor`, as its user meets it: real small jobs of scripts with nothing, and with something to change."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from relight.prove.doctor.source import trains_without_relight
from tests.cli.command import Command, Result
from tests.cli.conftest import Relight
from tests.survival.harness import PRELOADED

DEADLINE_SECONDS = 120.0 * float(os.environ.get("RELIGHT_TEST_PATIENCE", "1"))
PROGRAM = Path(__file__).parents[1] / "programs" / "examined.py"
PLAIN = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
open("was-run", "w").close()
"""
Begin = Callable[..., Command]


def doctor(begin: Begin, how: str, *flags: str) -> Result:
    return begin("doctor", *PRELOADED, *flags, str(PROGRAM), "--how", how).finish(DEADLINE_SECONDS)


def line_of(text: str) -> int:
    (number,) = [n for n, line in enumerate(PROGRAM.read_text().splitlines(), 1) if text in line]
    return number


def test_a_clean_script_has_nothing_to_change_and_leaves_nothing(begin: Begin, tmp_path: Path) -> None:
    command = begin("doctor", str(PROGRAM))
    result = command.finish(DEADLINE_SECONDS)
    assert result.status == 0, result.errors + result.output
    assert "NOTHING TO CHANGE in 6 steps on 2 ranks" in result.output
    assert "  model: DistributedDataParallel, 4 tensors," in result.output
    assert "smoothed (examined.py:" in result.output
    assert "the code after the loop" not in result.output + result.errors
    assert list(tmp_path.iterdir()) == []  # neither the script's checkpoints nor a run directory
    assert not list(command.output_path.parent.glob("relight-*"))


def test_json_names_what_is_protected_and_what_to_change(begin: Begin, tmp_path: Path) -> None:
    result = doctor(begin, "nan", "--json", "--run-dir", "kept")
    assert result.status == 1, result.errors + result.output
    found = json.loads(result.output)
    assert found["verdict"] == "something to change"
    assert [one["name"] for one in found["protected"]] == ["model", "optimizer"]
    assert any("the loss of step 0 is NaN" in each["text"] for each in found["findings"]), found["findings"]
    assert (tmp_path / "kept" / "journal.jsonl").exists()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("hidden", "was computed twice from the same start, and ended with other bits in"),
        ("counts", "average.calls: counted by steps, and not in the state_dict()"),
        pytest.param("nested", "training.steps() stands inside another loop", marks=pytest.mark.all),
        pytest.param("none", "took no step from training.steps()", marks=pytest.mark.all),
    ],
)
def test_a_refused_script_is_told_the_sentence(begin: Begin, how: str, words: str) -> None:
    result = doctor(begin, how)
    assert result.status == 2, result.errors + result.output
    assert words in result.output
    assert "REFUSED" in result.output


def test_a_script_that_fails_by_itself_shows_its_own_traceback(begin: Begin) -> None:
    result = doctor(begin, "fails")
    assert result.status == 2, result.errors + result.output
    line = line_of('raise ValueError("this script is broken")')
    assert f"line {line}, in main" in result.output
    assert f"examined.py:{line}: ValueError: this script is broken" in result.output
    assert "FAILED" in result.output


@pytest.mark.parametrize(
    ("first_line", "argument", "words"),
    [
        pytest.param(
            "import no_such_module",
            "--how=clean",
            "ModuleNotFoundError: No module named 'no_such_module'",
            marks=pytest.mark.all,
        ),
        ("", "--unknown", "unrecognized arguments: --unknown"),
    ],
)
def test_a_script_that_ends_before_init_shows_what_it_printed(
    begin: Begin, tmp_path: Path, first_line: str, argument: str, words: str
) -> None:
    script = tmp_path / "early.py"
    script.write_text(f"{first_line}\n{PROGRAM.read_text()}")
    result = begin("doctor", *PRELOADED, str(script), argument).finish(DEADLINE_SECONDS)
    assert result.status == 2, result.errors + result.output
    assert "The script failed by itself:" in result.output
    assert words in result.output
    assert "before its first step" in result.output


def test_a_checkpoint_that_is_late_on_another_disk_is_nothing_to_change(begin: Begin) -> None:
    result = doctor(begin, "every-step")
    assert result.status == 0, result.errors + result.output


def test_a_script_without_relight_is_told_the_four_lines_and_not_run(relight: Relight, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    result = relight("doctor", "plain.py")
    assert result.status == 2
    assert "plain.py does not use relight" in result.output
    assert "with step as batch:" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["plain.py"]


def test_a_file_beside_the_script_may_use_relight(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from parts.loop import train\n" + PLAIN)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "loop.py").write_text("from . import start\n")
    assert trains_without_relight(script)
    (tmp_path / "parts" / "start.py").write_text("import relight\n")
    assert not trains_without_relight(script)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.all)])
def test_an_interrupt_ends_the_job_and_leaves_nothing(begin: Begin, tmp_path: Path, number: signal.Signals) -> None:
    command = begin("doctor", "--steps", "1000", str(PROGRAM))
    command.wait_for(lambda: bool(command.children("relight.server")), "its job runs")
    command.process.send_signal(number)
    assert command.finish().status == 130
    assert list(tmp_path.iterdir()) == []
    assert not list(command.output_path.parent.glob("relight-*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--steps", "3", str(PROGRAM)), "--steps 3: expected 4 or more"),
        (("nowhere.py",), "there is no script nowhere.py"),
        ((), "no script given"),
    ],
)
def test_misuse(relight: Relight, arguments: tuple[str, ...], words: str) -> None:
    result = relight("doctor", *arguments)
    assert result.status == 2
    assert words in result.errors


def test_its_help_has_examples(relight: Relight) -> None:
    result = relight("doctor", "--help")
    assert result.status == 0
    for words in ("relight doctor train.py --lr 0.1", "status: 0 nothing to change", "is not run", "--steps K"):
        assert words in result.output
