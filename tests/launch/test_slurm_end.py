"""The end of a node's part in a batch script of Slurm: its exit status, and whether the job is queued again.

Slurm's commands are scripts that write down how they were called, and print what the case says.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relight.core.protocol.commands import EndJob
from relight.server.records.journal import Journal
from relight.wire.connection.address import announce
from relight.wire.settings import JobSettings

DEADLINE_SECONDS = 60.0
_COMMAND = '#!/bin/sh\necho "$(basename $0) $*" >> "{calls}"\necho "$0" >&2\n{does}\n'


class Node:
    """One node of four, n1 to n4, whose batch script ran on n1."""

    def __init__(self, directory: Path, number: int) -> None:
        self.run_dir = directory / "run"
        self.run_dir.mkdir()
        self._calls = directory / "calls"
        self._commands = directory / "bin"
        self._commands.mkdir()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
            "PATH": f"{self._commands}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "42",
            "SLURM_NODEID": str(number - 1),
            "SLURMD_NODENAME": f"n{number}",
            "SLURM_STEP_NODELIST": "n[1-4]",
            "SLURM_SRUN_COMM_HOST": "127.0.0.1",
            "SLURM_SRUN_COMM_PORT": str(self._listener.getsockname()[1]),
        }
        for name in ("squeue", "scontrol", "scancel"):
            self.has(name, "exit 1")
        self._process: subprocess.Popen[str] | None = None

    def has(self, name: str, does: str) -> None:
        """Put a command on the path."""
        draft = self._commands / f"{name}.draft"
        draft.write_text(_COMMAND.format(calls=self._calls, does=does))
        draft.chmod(0o755)
        draft.replace(self._commands / name)

    def lose_srun(self) -> None:
        self._listener.close()

    def run_ended(self, error: str, host: str = "n1") -> None:
        """Write the journal of a run that has ended on this host, with this error."""
        journal = Journal(self.run_dir, JobSettings(job="mine", script="train.py", world_size=2), lambda *_: None)
        journal.commands(1.0, [EndJob(error=error, details="", why=error)])
        journal.close()
        announce(self.run_dir, host, 29400)

    def start(self, status: int, *more: str) -> subprocess.Popen[str]:
        command = (sys.executable, "-m", "relight.launch.submit.slurm_end", str(self.run_dir), str(status), *more)
        self._process = subprocess.Popen(command, env=self.environment, stderr=subprocess.PIPE, text=True)
        return self._process

    def status(self, status: int) -> int:
        """Run to the end; return its exit status."""
        return self.start(status).wait(DEADLINE_SECONDS)

    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    def await_calls(self, enough: Callable[[list[str]], bool]) -> list[str]:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not enough(self.calls()):
            assert time.monotonic() < deadline, self.calls()
            time.sleep(0.05)
        return self.calls()

    def close(self) -> None:
        self._listener.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait(DEADLINE_SECONDS)
            assert self._process.stderr is not None
            self._process.stderr.close()


@pytest.fixture
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    made = Node(tmp_path, getattr(request, "param", 2))
    yield made
    made.close()


@pytest.mark.parametrize("node", [1, 2], indirect=True)
@pytest.mark.parametrize(("error", "given", "status"), [("", 0, 0), ("", 137, 0), ("it raised", 1, 1)])
def test_the_status_is_that_of_the_run(node: Node, error: str, given: int, status: int) -> None:
    node.run_ended(error)
    assert node.status(given) == status
    assert not node.calls()


@pytest.mark.parametrize("way", ["no end", "no run", "ended on another node"])
def test_while_srun_is_there_it_ends_the_job(node: Node, way: str) -> None:
    if way == "no run":
        node.run_dir.rmdir()
    if way == "ended on another node":
        node.run_ended("it raised", "n3")
    assert node.status(7) == 7
    assert not node.calls()


def test_the_first_node_that_is_left_has_the_job_queued_again(node: Node) -> None:
    node.lose_srun()
    node.has("squeue", "echo 'n[1-4]'")  # Slurm has not noticed
    node.start(1)
    node.await_calls(lambda calls: len(calls) >= 2)
    assert not any("requeue" in call for call in node.calls())
    node.has("squeue", "echo 'n[2-4]'")
    node.has("scontrol", "exit 0")
    node.await_calls(lambda calls: "scontrol requeue 42" in calls)
    assert not any(call.startswith("scancel") for call in node.calls())


@pytest.mark.parametrize(
    "answer", ["echo 'n[3-4]'; exit 0", "echo 'n[1,3]'", "true", "echo 'slurm is away' >&2; exit 1", "echo '%$!'"]
)
def test_without_slurm_s_word_nothing_is_done(node: Node, answer: str) -> None:
    node.lose_srun()
    node.has("squeue", answer)
    process = node.start(1)
    calls = node.await_calls(lambda calls: len(calls) >= 2)
    assert set(calls) == {"squeue --noheader --jobs=42 --states=RUNNING --format=%N"}
    assert process.poll() is None


def test_a_job_that_cannot_be_queued_again_is_cancelled(node: Node) -> None:
    node.lose_srun()
    node.has("squeue", "echo n2")
    node.has("scontrol", "echo 'Requested operation is presently disabled' >&2; exit 1")
    node.has("scancel", "exit 0")
    process = node.start(1)
    node.await_calls(lambda calls: "scancel 42" in calls)
    process.kill()
    assert process.stderr is not None
    assert "Requested operation is presently disabled" in process.stderr.read()


STEPS = "echo '  42.batch batch all me 0:10 n1'; echo '      42.0 bash all me 0:09 n[1-4]'"


@pytest.mark.parametrize("node", [1], indirect=True)
@pytest.mark.parametrize(("error", "status"), [("", 0), ("it raised", 137)])
def test_when_srun_was_killed_the_batch_script_waits_for_its_nodes(node: Node, error: str, status: int) -> None:
    node.has("squeue", STEPS)
    process = node.start(137, "srun")
    node.await_calls(lambda calls: len(calls) >= 2)
    node.has("squeue", "echo 'slurm is away' >&2; exit 1")
    node.await_calls(lambda calls: len(calls) >= 4)
    assert process.poll() is None
    node.run_ended(error)
    node.has("squeue", "echo '42.batch batch all me 0:20 n1'")
    assert process.wait(DEADLINE_SECONDS) == status
    assert set(node.calls()) == {"squeue --noheader --jobs=42 --steps"}


@pytest.mark.parametrize("node", [1], indirect=True)
@pytest.mark.parametrize(("given", "does"), [(1, STEPS), (137, "echo '42.batch batch all me 0:20 n1'")])
def test_the_batch_script_waits_for_nothing_else(node: Node, given: int, does: str) -> None:
    node.has("squeue", does)
    assert node.start(given, "srun").wait(DEADLINE_SECONDS) == given
    assert len(node.calls()) == (given == 137)
