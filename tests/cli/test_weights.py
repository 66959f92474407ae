"""`relight weights plan` as its user runs it: what it prints, and one clear line for every mistake."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from relight.cli import main
from tests.cli.command import Result
from tests.cli.test_bad_input import check

Relight = Callable[..., Result]

SMALL = "dense:layers=2,hidden=512,ffn=1024,vocab=8000"
RATES = (
    *("--h2d-seconds-per-gib", "0.1"),
    *("--broadcast-seconds-per-gib", "0.2"),
    *("--reload-seconds-per-gib", "0.1"),
)
GIVEN = ("--model", SMALL, "--bucket-bytes", "1MiB", "--devices", "4", *RATES)


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["weights", "plan", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# --- what it says ----------------------------------------------------------------------------------------------
def test_a_described_model(relight: Relight) -> None:
    result = relight("weights", "plan", *GIVEN)
    assert result.status == 0, result.errors
    assert not result.errors
    lines = result.output.splitlines()
    words = " ".join(result.output.split())
    for fact in (
        f"model {SMALL}: 21 tensors, 25.6 MiB",
        "buckets 26 of 1.0 MiB, in 7 rounds on 4 devices",
        "sends 6.0 MiB to 7.0 MiB by each device, all of it received by every other",
        "buffers 3.0 MiB on each device: H2D, I0, I1 of 1.0 MiB, however large the model is",
    ):
        assert fact in words
    assert "(as given; every stage has hardware of its own)" in words
    assert "three-stage: the reloads (2.5 ms in all) hide behind the broadcasts (5.01 ms)" in words
    assert sum(line.startswith("D") and " H2D " in line for line in lines) == 4
    assert "S0SS" in result.output
    assert "R0R" in result.output
    assert "The first 8 of 26 buckets; the last is over after" in result.output
    assert "\x1b" not in result.output  # piped: no colours, and nothing depends on them


def test_a_real_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a": torch.zeros(300, dtype=torch.bfloat16), "b": torch.zeros(5)}, tmp_path / "model.safetensors")
    plan = as_json(capsys, str(tmp_path), "--bucket-bytes", "256", "--devices", "2", *RATES)
    assert plan["total_bytes"] == 620
    assert plan["tensors"] == 2
    assert plan["buckets"] == 3
    assert plan["rounds"] == 2
    assert sum(plan["bytes_by_device"]) == 620
    assert main(["weights", "plan", str(tmp_path / "model.safetensors"), *RATES]) == 0
    assert "2 tensors, 620 B" in " ".join(capsys.readouterr().out.split())  # a long path wraps


def test_numbers_for_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    plan = as_json(capsys, *GIVEN, "--rounds-shown", "1")
    assert plan["form"] in plan["seconds_by_form"]
    assert plan["seconds"] == plan["seconds_by_form"][plan["form"]]
    assert plan["seconds_by_form"]["serial"] >= plan["seconds_by_form"]["two-stage"]
    assert plan["buffer_bytes_per_device"] == 3 * 2**20
    assert plan["measured"] == []
    assert plan["shared_cores"] is None
    assert [operation["round"] for operation in plan["operations_shown"]] == [0] * 12
    first = plan["operations_shown"][0]
    assert (first["kind"], first["bucket"], first["source"], first["buffer"]) == ("h2d", 0, 0, -1)
    assert first["end_seconds"] - first["start_seconds"] == pytest.approx(0.1 / 1024)


def test_the_same_plan_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(capsys, *GIVEN) == as_json(capsys, *GIVEN)


def test_a_form_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    plan = as_json(capsys, *GIVEN, "--form", "serial")
    assert plan["form"] == "serial"
    assert plan["why"].startswith("serial, as asked for: ")


def test_from_host_there_are_two_buffers(capsys: pytest.CaptureFixture[str]) -> None:
    plan = as_json(capsys, *GIVEN, "--from-host")
    assert plan["buffers"] == ["I0", "I1"]
    assert plan["form"] == "two-stage"
    assert main(["weights", "plan", *GIVEN, "--from-host"]) == 0
    assert "H2D" not in capsys.readouterr().out


def test_without_rates_a_memory_copy_is_measured_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    plan = as_json(capsys, "--model", SMALL)
    assert plan["measured"] == ["h2d", "broadcast", "reload"]
    assert plan["shared_cores"] == len(os.sched_getaffinity(0))
    assert plan["seconds_per_gib"]["h2d"] == plan["seconds_per_gib"]["reload"] > 0
    assert main(["weights", "plan", "--model", SMALL]) == 0
    assert "measured: one plain memory copy on this machine" in " ".join(capsys.readouterr().out.split())
    plan = as_json(capsys, "--model", SMALL, "--h2d-seconds-per-gib", "1")
    assert plan["measured"] == ["broadcast", "reload"]
    assert plan["shared_cores"] is None


def test_a_terminal_without_utf_8_and_almost_without_width(relight: Relight, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setenv("COLUMNS", "30")
    result = relight("weights", "plan", *GIVEN, "--rounds-shown", "1")
    assert result.status == 0, result.errors
    assert result.output.isascii()
    assert all(len(line) <= 30 for line in result.output.splitlines())


def test_nothing_to_draw(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "plan", *GIVEN, "--rounds-shown", "0"]) == 0
    assert "still to be read" not in capsys.readouterr().out


def test_a_checkpoint_without_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"empty": torch.zeros(0)}, tmp_path / "model.safetensors")
    assert main(["weights", "plan", str(tmp_path), *RATES]) == 0
    assert "there is nothing to overlap in 0 buckets" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [("weights", "--help"), ("weights", "plan", "--help")])
def test_help_teaches(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "plan" in shown
    if "plan" in words:
        assert "examples:\n  relight weights plan model.safetensors --devices 4" in shown


def test_each_example_of_the_help_works(capsys: pytest.CaptureFixture[str]) -> None:
    from relight.transfer.plan.model_spec import EXAMPLES

    for example in EXAMPLES:
        assert as_json(capsys, "--model", example, "--bucket-bytes", "1GiB", *RATES)["total_bytes"] > 2**30


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from relight.cli import main; status = main(sys.argv[1:]); "
        "sys.exit(status or 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "weights", "plan", *GIVEN]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.run(command, capture_output=True, env=environment, check=False).returncode == 0


# --- mistakes --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "CHECKPOINT"),
        (("x.safetensors", "--model", SMALL), "one of the two"),
        (("missing.safetensors",), "there is no file missing.safetensors"),
        (("--model", "tiny"), "dense:... or moe:..."),
        (("--model", SMALL, "--devices", "0"), "--devices 0: expected a number of devices from 1"),
        (("--model", SMALL, "--engines", "-1"), "--engines -1: expected a number of engines from 1"),
        (("--model", SMALL, "--rounds-shown", "-1"), "--rounds-shown -1: expected a number of rounds from 0"),
        (("--model", SMALL, "--bucket-bytes", "8MB"), "--bucket-bytes 8MB: write a size such as 8MiB"),
        (("--model", SMALL, "--bucket-bytes", "100"), "positive multiple of 64"),
        (("--model", SMALL, "--bucket-bytes", "-8MiB"), "--bucket-bytes"),
        (("--model", SMALL, "--bucket-bytes", "64"), "are more than 100000 buckets"),
        (("--model", SMALL, "--reload-seconds-per-gib", "-1"), "--reload-seconds-per-gib -1: expected a number"),
        (("--model", SMALL, "--h2d-seconds-per-gib", "nan"), "--h2d-seconds-per-gib nan: expected a number"),
        (("--model", SMALL, "--form", "four-stage"), "'four-stage'"),
        (("--model", SMALL, "--device", "4"), "unknown argument --device; did you mean --devices? --help lists all"),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = main(["weights", "plan", *arguments])
    except SystemExit as error:
        status = int(error.code or 0)
    shown = capsys.readouterr()
    check(Result(status, shown.out, shown.err), words)


def test_no_subcommand(relight: Relight) -> None:
    check(relight("weights"), "SUBCOMMAND")
    check(relight("weights", "plann"), "'plann'")


def test_garbage_for_a_checkpoint(relight: Relight, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    check(relight("weights", "plan", "model.safetensors"), "is no safetensors file")
