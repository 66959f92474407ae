"""Private directories of launchers that were killed with all of their processes: the next start removes them."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.launch.private_dir import ABANDONED_SECONDS, make_private_dir, remove_abandoned
from relight.wire.settings import JobSettings
from tests.survival.harness import DEADLINE_SECONDS, PROGRAMS, plain_environment

LAUNCHER = """
import signal
from relight.launch.private_dir import make_private_dir
from relight.wire.settings import JobSettings
print(make_private_dir(JobSettings(job="test", script="train.py"), bytes(32)), flush=True)
signal.pause()
"""


def start(parent: Path) -> tuple["subprocess.Popen[str]", Path]:
    """Start a process that makes its directory as a launcher does; the directory counts as old."""
    environment = {**os.environ, "TMPDIR": str(parent)}
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True, env=environment)
    assert launcher.stdout is not None
    private_dir = Path(launcher.stdout.readline().strip())
    make_old(private_dir)
    return launcher, private_dir


def make_old(private_dir: Path) -> None:
    then = time.time() - ABANDONED_SECONDS - 1
    os.utime(private_dir, (then, then))


@pytest.fixture
def parent() -> Iterator[Path]:
    """A directory for temporary files with a short path."""
    with tempfile.TemporaryDirectory(prefix="rlp-", dir="/tmp") as directory:
        yield Path(directory)


def test_what_a_killed_launcher_left_goes_with_the_next_start(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, private_dir = start(parent)
    assert (private_dir / "token").exists()
    remove_abandoned(parent)
    assert private_dir.exists(), "its launcher lives"
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    monkeypatch.setattr("tempfile.tempdir", str(parent))
    own = make_private_dir(JobSettings(job="test", script="train.py"), bytes(32))
    assert list(parent.iterdir()) == [own]


def test_an_agent_that_joins_a_job_removes_it_as_well(parent: Path, tmp_path: Path) -> None:
    launcher, private_dir = start(parent)
    launcher.kill()
    launcher.wait()
    token, hold, errors = tmp_path / "token", tmp_path / "go", tmp_path / "err"
    token.write_text("a secret of this test's hosts")
    token.chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    relight, shared = (sys.executable, "-m", "relight"), ("--token-file", str(token))
    run = ("run", "--rdzv-endpoint", endpoint, "--run-dir", str(tmp_path / "run"), "--standby", "0", "--oversubscribe")
    program = (str(PROGRAMS / "train.py"), "--steps", "6", "--hold-at", "3", "--hold", str(hold))
    with errors.open("wb") as out:
        job = subprocess.Popen((*relight, *run, *shared, *program), stderr=out, env=plain_environment())
    join = ("agent", "--controller", endpoint, "--name", "spare", *shared)
    agent = subprocess.Popen((*relight, *join), env={**plain_environment(), "TMPDIR": str(parent)})
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while "spare joined" not in errors.read_text():
            assert job.poll() is None, errors.read_text()
            assert time.monotonic() < deadline, errors.read_text()
            time.sleep(0.05)
        assert not private_dir.exists()
        hold.touch()
        assert (job.wait(DEADLINE_SECONDS), agent.wait(DEADLINE_SECONDS)) == (0, 0), errors.read_text()
        assert not list(parent.iterdir())
    finally:
        for process in (job, agent):
            process.kill()
            process.wait()


def test_a_new_directory_is_left_alone(parent: Path) -> None:
    """An agent that outlives its launcher may still be ending there."""
    launcher, private_dir = start(parent)
    launcher.kill()
    launcher.wait()
    os.utime(private_dir)
    remove_abandoned(parent)
    assert private_dir.exists()


@pytest.mark.parametrize("kind", ["without a lock", "a link", "a file"])
def test_what_is_none_of_these_is_left_alone(parent: Path, tmp_path: Path, kind: str) -> None:
    thing = parent / "relight-of-mine"
    if kind == "a file":
        thing.write_text("mine")
    elif kind == "a link":
        (tmp_path / "lock").touch()
        make_old(tmp_path)
        thing.symlink_to(tmp_path)
    else:
        thing.mkdir()
        make_old(thing)
    remove_abandoned(parent)
    assert thing.exists()
    assert tmp_path.exists()
