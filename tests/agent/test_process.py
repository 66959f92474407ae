import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from relight.agent.processes.process import Launch, Process, has_ended, spawn, worker_environment
from relight.agent.processes.readings.page import Pages
from relight.agent.processes.readings.probes import MemoryKills
from relight.wire.settings import JobSettings

DEADLINE_SECONDS = 30.0


def launch(tmp_path: Path, code: str, world_size: int = 4) -> Launch:
    return Launch(
        settings=JobSettings(job="job-1", script="train.py", world_size=world_size, master_port=1234),
        private_dir=tmp_path,
        socket_path=tmp_path / "agent.sock",
        command=(sys.executable, "-S", "-c", code),
    )


def start(tmp_path: Path, code: str) -> Process:
    with contextlib.closing(Pages.create()) as pages:
        return spawn(launch(tmp_path, code), "w1", 1, 1, pages)


def wait(process: Process) -> None:
    assert select.select([process.pidfd], [], [], DEADLINE_SECONDS)[0], "the process does not end"


def release(process: Process) -> None:
    for descriptor in process.outputs:
        os.close(descriptor)
    process.page.close()


@pytest.mark.parametrize(
    ("code", "status", "evidence"),
    [
        ("import os; os.kill(os.getpid(), 9)", -9, "was killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 11)", -11, "was killed by SIGSEGV"),
        ("raise SystemExit(3)", 3, "exited with code 3"),
        ("pass", 0, "exited with code 0"),
    ],
)
def test_the_end_of_a_process_in_words(tmp_path: Path, code: str, status: int, evidence: str) -> None:
    process = start(tmp_path, code)
    wait(process)
    end = process.reap(MemoryKills(()))
    assert (end.status, end.evidence) == (status, evidence)
    release(process)


def test_a_death_is_noticed_at_once(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; time.sleep(1000)")
    assert not has_ended(process.pidfd)
    killed = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    wait(process)
    assert time.monotonic() - killed < 1.0  # about a millisecond, but this machine may be busy
    assert has_ended(process.pidfd)
    process.reap(MemoryKills(()))
    release(process)


def test_a_stopped_process_is_killed_and_the_evidence_says_why(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; time.sleep(1000)")
    os.kill(process.pid, signal.SIGSTOP)
    process.kill("it was frozen")
    process.kill("some later reason")
    wait(process)
    assert process.reap(MemoryKills(())).evidence == "was killed by SIGKILL, as ordered: it was frozen"
    release(process)


def test_a_kill_for_lack_of_memory_is_told(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 1\n")
    kills = MemoryKills((events,))
    process = start(tmp_path, "import os; os.kill(os.getpid(), 9)")
    events.write_text("oom_kill 2\n")
    wait(process)
    assert "out-of-memory killer" in process.reap(kills).evidence
    release(process)


def test_a_worker_has_a_session_of_its_own_its_page_and_both_ends_of_its_output(tmp_path: Path) -> None:
    code = """
import os, sys
assert os.getsid(0) == os.getpid() == os.getpgid(0)
assert os.read(0, 1) == b""
os.pwrite(int(os.environ["RELIGHT_PAGE_FD"]), b"\\x07", 0)
for number, own in zip(os.environ["RELIGHT_OUTPUT_FDS"].split(","), (1, 2)):
    assert os.fstat(int(number)).st_ino == os.fstat(own).st_ino
open_files = sorted(int(name) for name in os.listdir("/proc/self/fd"))
assert len(open_files) == 7, open_files  # 0, 1, 2, the page, two read ends, and the listing itself
os.write(1, b"out"); os.write(2, b"err")
"""
    process = start(tmp_path, code)
    wait(process)
    out, err = (os.read(descriptor, 1000) for descriptor in process.outputs)
    assert (out, err) == (b"out", b"err")
    assert process.reap(MemoryKills(())).status == 0
    release(process)


def test_a_process_that_cannot_be_started_leaves_nothing_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    missing = Launch(
        settings=JobSettings(job="j", script="s"),
        private_dir=tmp_path,
        socket_path=tmp_path / "agent.sock",
        command=("/no/such/program",),
    )
    with contextlib.closing(Pages.create()) as pages, pytest.raises(FileNotFoundError):
        spawn(missing, "w1", 1, 1, pages)
    assert os.listdir("/proc/self/fd") == before


def test_a_rank_sees_what_torchrun_would_show_it(tmp_path: Path) -> None:
    environment = worker_environment({"HOME": "/root"}, launch(tmp_path, ""), "w2", 2, 2, (5, 4096), (6, 7))
    assert environment == {
        "HOME": "/root",
        "RELIGHT_PRIVATE_DIR": str(tmp_path),
        "RELIGHT_PROCESS": "w2",
        "RELIGHT_AGENT_SOCKET": str(tmp_path / "agent.sock"),
        "RELIGHT_PAGE_FD": "5",
        "RELIGHT_PAGE_OFFSET": "4096",
        "RELIGHT_OUTPUT_FDS": "6,7",
        "RELIGHT_SHARED_BARRIER_FD": "",
        "RELIGHT_ROLE": "rank",
        "RELIGHT_SLOT": "2",
        "RANK": "2",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "2",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "job-1",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
    }


def test_a_standby_shows_itself_as_the_last_rank(tmp_path: Path) -> None:
    inherited = {"OMP_NUM_THREADS": "8", "RANK": "0"}
    environment = worker_environment(inherited, launch(tmp_path, ""), "w9", None, 5, (5, 0), (6, 7))
    assert environment["RELIGHT_ROLE"] == "standby"
    assert environment["RELIGHT_SLOT"] == "5"
    assert environment["RANK"] == environment["LOCAL_RANK"] == "3"
    assert environment["OMP_NUM_THREADS"] == "8"
    alone = worker_environment({}, launch(tmp_path, "", world_size=1), "w0", 0, 0, (5, 0), (6, 7))
    assert "OMP_NUM_THREADS" not in alone
    chosen = {
        seed: worker_environment({"PYTHONHASHSEED": seed}, launch(tmp_path, ""), "w0", 0, 0, (5, 0), (6, 7))
        for seed in ("random", "7")
    }
    assert [environment["PYTHONHASHSEED"] for environment in chosen.values()] == ["0", "7"]
