import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.agent.processes.readings.probes import MemoryKills, Probe, environment, start_time


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has begun to run its program."""
    environment = {"WHO": "me=you", "PATH": os.environ["PATH"]}
    with subprocess.Popen(["cat"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as cat:
        assert cat.stdin is not None
        assert cat.stdout is not None
        cat.stdin.write(b"x")
        assert cat.stdout.read(1) == b"x"
        yield cat
        cat.kill()


def test_a_process_is_read_while_it_lives_stops_and_dies(child: subprocess.Popen[bytes]) -> None:
    probe = Probe(child.pid)
    reading = probe.read()
    assert reading is not None
    assert reading.state in "RSD"
    assert reading.run_delay_ns >= 0
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    reading = probe.read()
    assert reading is not None
    assert reading.state == "T"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    reading = probe.read()
    assert reading is not None
    assert reading.state == "Z"
    child.wait()
    assert probe.read() is None
    probe.close()
    assert probe.read() is None


def test_memory_is_counted_in_bytes() -> None:
    probe = Probe(os.getpid())
    reading = probe.read()
    assert reading is not None
    assert 5 * 2**20 < reading.rss_bytes < 2**40
    probe.close()


def test_a_start_time_identifies_a_live_process_only(child: subprocess.Popen[bytes]) -> None:
    started = start_time(child.pid)
    assert started is not None
    assert started == start_time(child.pid)
    pidfd = os.pidfd_open(child.pid)
    child.kill()
    assert select.select([pidfd], [], [], 10.0)[0]
    os.close(pidfd)
    assert start_time(child.pid) is None  # a zombie
    child.wait()
    assert start_time(child.pid) is None


def test_the_environment_of_another_process(child: subprocess.Popen[bytes]) -> None:
    assert environment(child.pid)["WHO"] == "me=you"


def test_memory_kills_are_counted_from_when_it_was_asked(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    kills = MemoryKills((tmp_path / "missing", events))
    assert kills.rose() == 0
    events.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert kills.rose() == 2
    assert kills.rose() == 0
    events.unlink()
    assert kills.rose() == 0


def test_the_real_cgroup_files_are_tolerated() -> None:
    assert MemoryKills().rose() == 0
