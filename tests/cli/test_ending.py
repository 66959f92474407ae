"""However `relight run` ends, no process and no secret of it is left. These scripts never come to train."""

import contextlib
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from relight.launch.launcher import INTERRUPT_SECONDS
from relight.launch.private_dir import make_private_dir
from relight.wire.settings import JobSettings
from tests.cli.command import Command

Begin = Callable[..., Command]
WORKER = "relight.training.bootstrap"


def start(begin: Begin, script: Path, *flags: str) -> Command:
    """Two workers that are up and wait."""
    command = begin("run", "--nproc-per-node", "2", "--run-dir", "run", *flags, str(script))
    command.wait_for_output("up as rank 0")
    command.wait_for_output("up as rank 1")
    return command


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_everything(begin: Begin, script: Path, number: signal.Signals, status: int) -> None:
    command = start(begin, script)
    assert len(command.children(WORKER)) == 2
    command.process.send_signal(number)
    result = command.finish()
    assert result.status == status
    assert f"relight: {number.name}: ending the job" in result.errors
    assert "Traceback" not in result.errors


def test_a_signal_before_anything_is_up(begin: Begin, script: Path) -> None:
    command = begin("run", "--run-dir", "run", str(script))
    command.wait_for(lambda: bool(command.private_dirs()), "it has begun")
    command.process.send_signal(signal.SIGINT)
    assert command.finish().status == 130


def test_a_second_signal_ends_it_at_once(begin: Begin, script: Path) -> None:
    command = start(begin, script)
    (controller,) = command.children("relight.server")
    os.kill(controller, signal.SIGSTOP)  # it will not hear the first
    command.process.send_signal(signal.SIGINT)
    command.wait_for(lambda: "again: at once" in command.errors_path.read_text(), "the first was heard")
    command.process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    assert command.finish().status == 130
    assert time.monotonic() - begun < INTERRUPT_SECONDS


def test_a_controller_that_does_not_answer_does_not_keep_ctrl_c_from_working(begin: Begin, script: Path) -> None:
    command = start(begin, script)
    (controller,) = command.children("relight.server")
    os.kill(controller, signal.SIGSTOP)
    command.process.send_signal(signal.SIGINT)  # it is replaced, and its successor asked
    result = command.finish()
    assert result.status == 130
    assert "the controller is stopped (process state T); killing it" in result.errors


def test_everything_above_the_workers_can_be_killed_at_once(begin: Begin, script: Path) -> None:
    """Both are replaced, and the new agent finds the workers by the list that the old one kept."""
    command = start(begin, script)
    workers = command.children(WORKER)
    (controller,), (agent,) = command.children("relight.server"), command.children("relight.agent")
    os.kill(controller, signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    command.wait_for(lambda: command.children("relight.agent") not in ([], [agent]), "another agent is there")
    command.wait_for(lambda: command.children("relight.server") not in ([], [controller]), "another controller is")
    assert command.children(WORKER) == workers
    command.process.send_signal(signal.SIGTERM)
    result = command.finish()
    assert result.status == 143
    assert "the controller died of SIGKILL; training goes on, and another takes over" in result.errors


def test_workers_end_by_the_list_that_their_dead_agent_kept(begin: Begin, script: Path) -> None:
    command = start(begin, script)
    (controller,), (agent,) = command.children("relight.server"), command.children("relight.agent")
    os.kill(controller, signal.SIGSTOP)
    os.kill(agent, signal.SIGSTOP)
    command.process.send_signal(signal.SIGTERM)
    command.process.send_signal(signal.SIGTERM)  # at once
    assert command.finish().status == 143


def test_a_dead_agent_is_replaced_and_its_workers_live_on(begin: Begin, script: Path) -> None:
    command = start(begin, script)
    workers = command.children(WORKER)
    (agent,) = command.children("relight.agent")
    os.kill(agent, signal.SIGKILL)
    command.wait_for(lambda: command.children("relight.agent") not in ([], [agent]), "another agent is there")
    assert command.children(WORKER) == workers
    command.process.send_signal(signal.SIGTERM)
    result = command.finish()
    assert result.status == 143
    assert "the agent died of SIGKILL; its workers train on, and a new agent adopts them" in result.errors


def test_a_frozen_agent_is_replaced(begin: Begin, script: Path) -> None:
    command = start(begin, script)
    (agent,) = command.children("relight.agent")
    os.kill(agent, signal.SIGSTOP)
    command.wait_for(lambda: command.children("relight.agent") not in ([], [agent]), "another agent is there")
    command.process.send_signal(signal.SIGTERM)
    assert command.finish().status == 143


def test_an_agent_that_is_killed_again_and_again_does_not_end_the_job(begin: Begin, script: Path) -> None:
    command = start(begin, script)
    workers = command.children(WORKER)
    for _ in range(4):
        command.wait_for(lambda: len(command.children("relight.agent")) == 1, "an agent is there")
        (agent,) = command.children("relight.agent")
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, signal.SIGKILL)
        command.wait_for(lambda agent=agent: agent not in command.processes(), "it is gone")  # type: ignore[misc]
    command.wait_for(lambda: len(command.children("relight.agent")) == 1, "another agent is there")
    assert command.children(WORKER) == workers
    command.process.send_signal(signal.SIGTERM)
    result = command.finish()
    assert result.status == 143
    assert "a new agent adopts them in 2 s: this was number 4 within a minute" in result.errors


def test_a_killed_launcher_takes_everything_with_it(begin: Begin, script: Path) -> None:
    command = start(begin, script)
    command.process.kill()
    command.process.wait()
    deadline = time.monotonic() + 20.0
    while command.processes() or command.private_dirs():
        assert time.monotonic() < deadline, (command.processes(), command.private_dirs())
        time.sleep(0.01)
    assert "stopped: `relight run` was killed" in (script.parent / "run" / "journal.jsonl").read_text()


def test_the_private_directory_is_private(begin: Begin, script: Path) -> None:
    command = start(begin, script)
    (private,) = command.private_dirs()
    assert private.stat().st_mode & 0o777 == 0o700
    assert (private / "token").stat().st_mode & 0o777 == 0o600
    token = (private / "token").read_bytes()
    for pid in command.processes():
        assert token not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert token not in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_long_temporary_path_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a Unix socket has 107 bytes at most, and some systems' temporary directories are long."""
    place = tmp_path / ("x" * 80)
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    private = make_private_dir(JobSettings(job="test", script="train.py"), bytes(32))
    try:
        assert len(str(private / "agent-node-0.sock")) < 100
    finally:
        shutil.rmtree(private)


def test_a_reader_that_goes_away_does_not_end_the_job(begin: Begin, tmp_path: Path) -> None:
    """`relight run ... | head`: the output is lost, the job is not."""
    (tmp_path / "talk.py").write_text("while True:\n    print('x' * 100, flush=True)\n")
    reading, writing = os.pipe()
    command = begin("run", "--run-dir", "run", "talk.py", output=writing)
    os.close(writing)
    assert os.read(reading, 100)
    os.close(reading)
    (agent,) = command.children("relight.agent")
    os.kill(agent, signal.SIGKILL)  # something to do: it is still there, and still in charge
    command.wait_for(lambda: command.children("relight.agent") not in ([], [agent]), "another agent is there")
    command.process.send_signal(signal.SIGTERM)
    assert command.finish().status == 143


def test_a_reader_that_stalls_does_not_keep_ctrl_c_from_working(begin: Begin, tmp_path: Path) -> None:
    """`relight run ... | less`, left alone."""
    (tmp_path / "talk.py").write_text("while True:\n    print('x' * 100, flush=True)\n")
    reading, writing = os.pipe()
    command = begin("run", "--run-dir", "run", "talk.py", output=writing)
    try:
        assert os.read(reading, 100)
        command.wait_for(lambda: _is_full(writing), "the pipe is full")
        command.process.send_signal(signal.SIGINT)
        assert command.finish().status == 130
    finally:
        os.close(reading)
        os.close(writing)


def _is_full(writing: int) -> bool:
    """Its pages are taken, with however few bytes: pieces that do not fit into the rest of a page begin another."""
    return not select.select([], [writing], [], 0)[1]
