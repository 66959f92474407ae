"""Every mistake: one clear message, exit status 2, no process left running and no file left."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import Command, Result

Relight = Callable[..., Result]


def check(result: Result, *words: str) -> None:
    """One line of ours, with these words, and no traceback."""
    assert result.status == 2, result
    lines = [line for line in result.errors.splitlines() if line.startswith("relight: ")]
    assert len(lines) == 1, result.errors
    for word in words:
        assert word in lines[0]
    assert "Traceback" not in result.errors
    assert not result.output


def test_no_command(relight: Relight) -> None:
    check(relight(), "COMMAND")


def test_unknown_command(relight: Relight) -> None:
    check(relight("rum"), "'rum'", "'run'")


def test_unknown_flag(relight: Relight, script: Path) -> None:
    check(relight("run", "--stanby", "1", str(script)), "--stanby", "did you mean --standby?", "after its name")


def test_a_flag_shortened(relight: Relight, script: Path) -> None:
    check(relight("run", "--nproc", "1", str(script)), "--nproc", "did you mean --nproc-per-node?")


def test_a_flag_without_its_number(relight: Relight, script: Path) -> None:
    check(relight("run", "--standby", "one", str(script)), "--standby", "'one'")


def test_no_script(relight: Relight) -> None:
    check(relight("run", "--nproc-per-node", "2"), "no script given", "relight run")


def test_a_script_that_does_not_exist(relight: Relight, tmp_path: Path) -> None:
    check(
        relight("run", "trian.py", "--lr", "1"),
        "there is no script trian.py",
        str(tmp_path / "trian.py"),
        "check the path",
    )
    assert not (tmp_path / "runs").exists()


def test_a_script_that_is_a_directory(relight: Relight, tmp_path: Path) -> None:
    check(relight("run", str(tmp_path)), "is a directory")


def test_a_program_that_cannot_be_run(relight: Relight, script: Path) -> None:
    check(relight("run", "--no-python", str(script)), "--no-python", "can be run", str(script), "chmod +x")
    check(relight("run", "--no-python", "-m", "json"), "-m", "--no-python", "one of them")


def test_a_module_that_does_not_exist(relight: Relight) -> None:
    check(relight("run", "-m", "no_such_package.train"), "no module no_such_package")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nproc-per-node", "0"], ["at least one worker"]),
        (["--nproc-per-node", "-1"], ["at least one worker"]),
        (["--nproc-per-node", "many"], ["'many'", "'auto', 'cpu' or 'gpu'"]),
        (["--nproc-per-node", "100000"], ["100000 workers", "cores", "--oversubscribe"]),
        (["--nnodes", "2"], ["--nnodes 2", "--rdzv-endpoint HOST:PORT"]),
        (["--nnodes", "1:4"], ["--nnodes 1:4", "neither grow nor shrink"]),
        (["--nnodes", "2", "--master-addr", "10.0.0.1"], ["--token-file", "chmod 600"]),
        (
            ["--rdzv-endpoint", "10.0.0.1:port", "--token-file", "/nowhere"],
            ["--rdzv-endpoint 10.0.0.1:port", "HOST:PORT"],
        ),
        (["--rdzv-endpoint", "10.0.0.1:5", "--token-file", "/nowhere"], ["--token-file /nowhere"]),
        (["--token-file", "/nowhere"], ["--token-file /nowhere"]),
        (["--dashboard-address", "no-such-host.invalid:7117"], ["no-such-host.invalid"]),
        (["--tls-ca", "ca.pem"], ["--tls-cert and --tls-key are missing"]),
        (["--tee", "3"], ["--tee is torchrun's", "RUN_DIR/logs"]),
        (["--log_dir=logs"], ["is torchrun's", "--run-dir"]),
        (["--standby", "-1"], ["--standby -1", "0 or more"]),
        (["--hang-timeout-seconds", "0"], ["--hang-timeout-seconds 0", "above 0"]),
        (["--frozen-timeout-seconds", "inf"], ["--frozen-timeout-seconds", "above 0"]),
        (["--startup-timeout-seconds", "nan"], ["--startup-timeout-seconds", "above 0"]),
        (["--max-failures", "-1"], ["--max-failures -1"]),
        (["--max-failures-per-step", "0"], ["--max-failures-per-step 0"]),
        (["--controller-port", "70000"], ["--controller-port 70000", "65535"]),
        (["--master-port", "0"], ["--master-port 0"]),
        (["--chaos", "kil rank 0 after step 1"], ["'kil' is no action", "did you mean 'kill'?"]),
        (["--chaos", "kill rank 5 after step 1"], ["no rank 5"]),
        (["--chaos-rate", "2"], ["--chaos-rate 2", "from 0 to 1"]),
        (["--run-dir", ""], ["--run-dir ''", "expected a directory"]),
    ],
)
def test_bad_values(relight: Relight, script: Path, flags: list[str], words: list[str]) -> None:
    check(relight("run", *flags, str(script)), *words)
    assert not (script.parent / "runs").exists()


def test_chaos_without_a_fault(relight: Relight, script: Path) -> None:
    check(relight("chaos", str(script)), "no fault given", "--explain")


def test_a_report_of_no_run(relight: Relight) -> None:
    check(relight("report", "runs/none"), "no run directory runs/none")
    check(relight("timeline", "runs/none"), "no run directory runs/none")


def test_a_port_in_use(relight: Relight, script: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        check(relight("run", "--controller-port", str(port), str(script)), f":{port} is in use", "--controller-port")
    assert not list((script.parent / "runs").iterdir())


# --- the run directory --------------------------------------------------------------------------------------------
def test_a_run_directory_on_a_read_only_disk(relight: Relight, script: Path, mount: Callable[[str], Path]) -> None:
    place = mount("size=64k,ro")
    check(relight("run", "--run-dir", str(place / "run"), str(script)), str(place / "run"), "read-only", "--run-dir")
    check(relight("run", "--run-dir", str(place), str(script)), str(place), "read-only", "--run-dir")


def test_a_run_directory_without_permission(relight: Relight, script: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    place = tmp_path / "locked"
    place.mkdir(mode=0o500)
    check(relight("run", "--run-dir", str(place / "run"), str(script)), "permission denied", "--run-dir")


def test_a_run_directory_on_a_full_disk(relight: Relight, script: Path, mount: Callable[[str], Path]) -> None:
    place = mount("size=64k")
    check(relight("run", "--run-dir", str(place / "run"), str(script)), "the disk is full", "--run-dir")
    assert not list(place.iterdir())


def test_a_run_directory_that_takes_no_large_file(relight: Relight, script: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk, where mounting is not allowed."""
    result = relight("run", "--run-dir", "run", str(script), file_bytes=64 * 1024)
    check(result, "cannot write the run directory", "--run-dir")
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_is_a_file(relight: Relight, script: Path) -> None:
    check(relight("run", "--run-dir", str(script), str(script)), "no directory is in the way", "--run-dir")


def test_a_run_directory_that_holds_a_run(relight: Relight, script: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "journal.jsonl").write_text("precious")
    check(relight("run", "--run-dir", "old", str(script)), "already holds a journal.jsonl that cannot be read")
    assert (tmp_path / "old" / "journal.jsonl").read_text() == "precious"


# --- what is no mistake -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["chaos", "--help"], ["--version"], ["chaos", "--explain"]]
)
def test_help_says_nothing_but_help(relight: Relight, arguments: list[str]) -> None:
    result = relight(*arguments)
    assert result.status == 0
    assert result.output
    assert not result.errors


def test_the_command_line_does_not_import_torch() -> None:
    rooms = "relight.cli, relight.launch.commands, relight.config, relight.server.server, relight.agent.agent"
    code = f"import sys, {rooms}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_help_teaches_every_flag(relight: Relight) -> None:
    text = relight("run", "--help").output
    for flag in ("--nproc-per-node", "--standby", "--hang-timeout-seconds", "--max-restarts", "--chaos", "--run-dir"):
        assert flag in text


# --- scripts that cannot train ------------------------------------------------------------------------------------
def test_a_script_that_never_trains(begin: Callable[..., Command], tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("print('hello')\n")
    result = begin("run", "--nproc-per-node", "2", "--run-dir", "run", "hello.py").finish()
    assert result.status == 1
    assert "before its first step" in result.errors
    assert f"logs: {tmp_path / 'run'}" in result.errors
    assert "Traceback" not in result.errors


def test_a_script_that_raises_shows_its_own_traceback(begin: Callable[..., Command], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('what a pity')\n")
    result = begin("run", "--run-dir", "run", "broken.py").finish()
    assert result.status == 1
    assert "ValueError: what a pity" in result.errors + result.output
    assert f"logs: {tmp_path / 'run'}" in result.errors
