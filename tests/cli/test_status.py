"""`relight status` and `relight top`, as their user meets them."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from relight.core.protocol.events import ShutdownRequested
from relight.server.records.journal import SILENT_SECONDS
from relight.watch.status import Status
from tests.cli.command import Command
from tests.cli.conftest import Relight
from tests.dashboard.made_up import MadeUpJob

DEADLINE_SECONDS = 60.0


def make(tmp_path: Path) -> MadeUpJob:
    made = MadeUpJob(tmp_path / "run", ranks=3, wall=time.time() - 12, until=100, step_seconds=0.5)
    made.steps(3)
    return made


def test_the_exit_status_tells_how_it_stands(relight: Relight, tmp_path: Path) -> None:
    made = make(tmp_path)
    result = relight("status", "run", "--json")
    assert result.status == 3
    assert json.loads(result.output)["state"] == "running"
    assert msgspec.json.decode(result.output, type=Status).version == 3
    made.tell(made.at, ShutdownRequested(reason="SIGTERM"))
    result = relight("status", "run")
    assert (result.status, "failed" in result.output) == (1, True)
    assert relight("status", "nowhere").status == 2


def test_a_real_job_from_its_start_to_its_murder(
    relight: Relight, begin: Callable[..., Command], script: Path, tmp_path: Path
) -> None:
    job = begin("run", "--run-dir", "runs/mine", str(script))
    job.wait_for_output("up as rank 0")
    result = relight("status")  # the newest run
    assert result.status == 3
    assert "waiting" in result.output
    assert "rank 0 to reach the first step" in result.output
    os.kill(job.process.pid, signal.SIGSTOP)  # lest it starts another controller, or this one is told to end
    for pid in (*job.children("relight.server"), *job.processes()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.process.wait(DEADLINE_SECONDS)
    journal = tmp_path / "runs" / "mine" / "journal.jsonl"
    os.utime(journal, (time.time() - SILENT_SECONDS - 1,) * 2)
    assert relight("status", "runs/mine").status == 4


def test_top_shows_the_ranks_until_q(tmp_path: Path) -> None:
    made = make(tmp_path)
    controlling, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    before = termios.tcgetattr(terminal)
    process = subprocess.Popen(
        [sys.executable, "-m", "relight.cli", "top", "run"],
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    shown = bytearray()

    def wait_for(text: bytes) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while text not in shown:
            assert time.monotonic() < deadline, shown[-4000:]
            if select.select([controlling], [], [], 0.1)[0]:
                shown.extend(os.read(controlling, 65536))

    try:
        wait_for(b"3 of 100")
        made.steps(4)
        wait_for(b"7 of 100")  # by itself
        os.write(controlling, b"q")
        deadline = time.monotonic() + DEADLINE_SECONDS
        while process.poll() is None:  # it waits until its last words are read
            assert time.monotonic() < deadline
            if select.select([controlling], [], [], 0.1)[0]:
                shown.extend(os.read(controlling, 65536))
        assert process.returncode == 0
        assert termios.tcgetattr(terminal) == before
        assert b"\x1b[?1049h" in shown  # a screen of its own
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(controlling)
        os.close(terminal)


def test_top_without_a_terminal_says_it_once(relight: Relight, tmp_path: Path) -> None:
    make(tmp_path)
    result = relight("top", "run")
    assert result.status == 0
    assert "\x1b" not in result.output
    assert result.output.count("node-0") == 3


def test_a_job_without_a_report_is_explained_by_its_journal(relight: Relight, tmp_path: Path) -> None:
    made = make(tmp_path)
    made.fail(1)
    result = relight("explain", "run")
    assert result.status == 0
    assert result.output.startswith("The job is still running, after 4 of 100 steps")
    assert "Recovery 1: rank 1 was lost in BACKWARD of step 3" in " ".join(result.output.split())
    (tmp_path / "empty").mkdir()
    assert relight("explain", "empty").status == 1


def test_commands_about_a_run_take_the_newest_one(relight: Relight, tmp_path: Path) -> None:
    result = relight("explain")
    assert result.status == 2
    assert "there is no run under" in result.errors
    make(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "run").rename(tmp_path / "runs" / "mine")
    assert relight("explain").output.startswith("The job is still running")
    assert "runs/mine/journal.jsonl: every invariant holds so far" in " ".join(relight("check").output.split())
