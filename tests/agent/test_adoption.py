"""An agent is killed; its successor takes over its processes."""

import contextlib
import os
import select
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest

from relight.agent.processes.adoption import adopt, kill_unadoptable
from relight.agent.processes.process_table import Record
from relight.agent.processes.readings.page import Pages
from relight.agent.processes.readings.probes import MemoryKills, environment, start_time
from relight.core.protocol.events import ProcessExited, ProcessStarted
from relight.errors import ProtocolError
from relight.wire.messages import CopyPrivate, ForgetProcess, Samples, StoreReply
from tests.agent.peer import Job, stop_agent, wait_until
from tests.agent.test_agent import ask


def test_a_successor_takes_over_processes_output_and_messages(job: Job) -> None:
    first, connection = job.start_agent()
    pid = connection.spawn("talk-1", 1)
    standby = connection.spawn("talk-2", None)
    ask(connection, "talk-1", 1)
    ask(connection, "talk-2", 1)
    first.sigkill()
    connection.close()

    agent, connection = job.start_agent(adopt=True)
    assert connection.hello.processes == ("talk-1", "talk-2")
    started = {connection.expect(ProcessStarted).pid for _ in range(2)}
    assert started == {pid, standby}
    connection.tell(StoreReply(request=2, values=()), "talk-1", "talk-2")  # perhaps before they are back
    ask(connection, "talk-1", 3)
    ask(connection, "talk-2", 3)
    agent.expect_printed("[rank 1] request 2\n")
    agent.expect_printed("[rank 1] request 3\n")
    agent.expect_printed("[standby talk-2] request 3\n")

    os.kill(pid, signal.SIGKILL)
    exited = connection.exit_of("talk-1")
    assert exited.exit_status is None
    assert "its agent had been restarted" in exited.evidence
    assert exited.position.step == 3
    stop_agent(agent, connection)
    assert job.processes() == []
    assert job.log("rank-1").splitlines()[-1] == "request 3"


def board_of(pid: int) -> int:
    """The inode of the shared barrier of a worker."""
    return os.stat(f"/proc/{pid}/fd/{environment(pid)['RELIGHT_SHARED_BARRIER_FD']}").st_ino


def test_workers_of_a_host_share_one_board_whoever_started_them(job: Job) -> None:
    first, connection = job.start_agent()
    pids = [connection.spawn(f"talk-{rank}", rank) for rank in range(2)]
    ask(connection, "talk-0", 1)  # before it runs, a process may have no environment to be read
    ask(connection, "talk-1", 1)
    shared = {board_of(pid) for pid in pids}
    first.sigkill()
    connection.close()

    agent, connection = job.start_agent(adopt=True)
    standby = connection.spawn("talk-2", None)
    ask(connection, "talk-2", 1)
    assert board_of(standby) == board_of(pids[0])
    assert len(shared) == 1
    stop_agent(agent, connection)


def test_a_successor_reports_what_ended_meanwhile(job: Job) -> None:
    first, connection = job.start_agent()
    pid = connection.spawn("talk-0", 0)
    connection.spawn("talk-1", 1)
    ask(connection, "talk-0", 1)
    ask(connection, "talk-1", 1)
    first.sigkill()
    connection.close()
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([pidfd], [], [], 30.0)[0]
    os.close(pidfd)

    agent, connection = job.start_agent(adopt=True)
    assert connection.hello.processes == ("talk-0", "talk-1")  # the end of the first is reported next
    exited = connection.exit_of("talk-0")
    assert exited.exit_status is None
    assert exited.position.stamp_ns > 0  # its page is in the hands of the other one too
    ask(connection, "talk-1", 2)
    stop_agent(agent, connection)


def test_private_state_outlives_its_process_and_the_agent(job: Job) -> None:
    """As long as one process of the host lives."""
    first, connection = job.start_agent()
    connection.spawn("private", 0)
    connection.spawn("talk-1", 1)
    connection.exit_of("private")
    first.sigkill()
    connection.close()

    agent, connection = job.start_agent(adopt=True)
    connection.exit_of("private")  # once more: the agent has not forgotten it
    pid = connection.spawn("talk-2", None)
    connection.send(CopyPrivate(source="private", target="talk-2", version=3))
    page = job.page_of(pid)
    wait_until(lambda: page.read_private(3) == b"private state of version 3")
    page.close()
    connection.send(ForgetProcess(process="private"))
    connection.send(CopyPrivate(source="private", target="talk-1", version=3))
    ask(connection, "talk-1", 1)  # which is answered after that
    stop_agent(agent, connection)


def test_what_nobody_holds_any_more_is_not_taken_for_anothers(job: Job) -> None:
    first, connection = job.start_agent()
    connection.spawn("private", 0)
    connection.exit_of("private")
    first.sigkill()
    connection.close()
    agent, connection = job.start_agent(adopt=True)
    connection.exit_of("private")
    pid = connection.spawn("talk-1", None)  # its page begins where that of the other did, in another memory
    ask(connection, "talk-1", 1)
    agent.sigkill()
    connection.close()

    agent, connection = job.start_agent(adopt=True)
    connection.exit_of("private")
    connection.send(ForgetProcess(process="private"))
    ask(connection, "talk-1", 2)
    page = job.page_of(pid)
    assert page.position().stamp_ns > 0
    page.close()
    stop_agent(agent, connection)


def test_a_frozen_process_is_taken_over_too(job: Job) -> None:
    first, connection = job.start_agent()
    pid = connection.spawn("talk-0", 0)
    ask(connection, "talk-0", 1)
    os.kill(pid, signal.SIGSTOP)
    first.sigkill()
    connection.close()

    agent, connection = job.start_agent(adopt=True)
    assert connection.hello.processes == ("talk-0",)
    connection.kill("talk-0")
    assert "as ordered: test" in connection.exit_of("talk-0").evidence
    stop_agent(agent, connection)


def test_output_written_while_there_was_no_agent_is_not_lost(job: Job) -> None:
    first, connection = job.start_agent()
    pid = connection.spawn("signal", 0)
    connection.expect(Samples, lambda samples: any(sample.position.progress == 1 for sample in samples.samples))
    first.sigkill()
    connection.close()
    page = job.page_of(pid)
    for progress in (2, 3, 4):
        os.kill(pid, signal.SIGUSR1)
        wait_until(lambda progress=progress: page.position().progress == progress)  # type: ignore[misc]
    page.close()
    agent, connection = job.start_agent(adopt=True)
    for number in (0, 1, 2):
        agent.expect_printed(f"[rank 0] signal {number} ")
    stop_agent(agent, connection)
    assert [line.split()[1] for line in job.log("rank-0").splitlines()] == ["0", "1", "2"]


def test_a_stranger_to_the_record_is_not_believed(job: Job) -> None:
    """Its pid is now another process's: neither killed nor adopted."""
    first, connection = job.start_agent()
    connection.spawn("exit0", 0)
    connection.exit_of("exit0")
    first.sigkill()
    connection.close()
    table = job.private_dir / "agent-node-0.pids"
    records = table.read_text()
    pid = int(records.split('"pid":')[1].split(",")[0])
    table.write_text(records.replace(f'"pid":{pid}', f'"pid":{os.getpid()}') + "half a line")

    agent, connection = job.start_agent(adopt=True)
    assert connection.hello.processes == ("exit0",)  # whose end is reported once more
    assert connection.exit_of("exit0").exit_status is None
    stop_agent(agent, connection)


def test_a_worker_that_its_agent_does_not_know_is_ended(job: Job) -> None:
    """The successor was started without its records, so the controller counts that worker as lost."""
    first, connection = job.start_agent()
    connection.spawn("talk-0", 0)
    ask(connection, "talk-0", 1)
    first.sigkill()
    connection.close()
    agent, connection = job.start_agent(adopt=False)
    assert set(connection.hello.processes) <= {"talk-0"}, "it may have come back before the agent had said hello"
    exited = connection.expect(ProcessExited)
    assert exited.process == "talk-0"
    assert "counted as lost" in exited.evidence
    stop_agent(agent, connection)
    assert job.processes() == []


def test_a_recorded_process_that_cannot_be_looked_into_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as child, contextlib.closing(Pages.create()) as pages:
        record = Record(process="w1", pid=child.pid, start_time=start_time(child.pid), rank=0)
        with pytest.raises(ProtocolError, match="is not w1 of this job"):
            adopt("w1", child.pid, tmp_path, record)
        assert kill_unadoptable(msgspec.structs.replace(record, start_time=1), pages, "test") is None
        process = kill_unadoptable(record, pages, "test")
        assert process is not None
        assert child.wait(30.0) == -signal.SIGKILL
        assert process.reap(MemoryKills(())).evidence.endswith("it could not be taken over (test)")
        process.page.close()
        assert kill_unadoptable(record, pages, "test") is None
