"""The agent as a process, with real workers, and a controller that speaks the wire."""

import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relight.core.protocol.commands import Assign, Spawn
from relight.core.protocol.events import ProcessExited, ProcessStarted, WorkerNotice
from relight.core.protocol.position import Phase
from relight.wire.connection.framing import decode, make_decoder
from relight.wire.messages import (
    CopyPrivate,
    ForgetProcess,
    FromWorker,
    Samples,
    StoreAdd,
    StoreReply,
    TraceChunk,
    WorkerUp,
)
from tests.agent.peer import DEADLINE_SECONDS, NAME, Connection, Job, stop_agent, wait_until

_worker_up = make_decoder(WorkerUp)


def said(connection: Connection, process: str) -> list[object]:
    return [
        decode(_worker_up, message.payload) for message in connection.of_kind(FromWorker) if message.process == process
    ]


def ask(connection: Connection, process: str, *requests: int) -> None:
    """Send numbered frames, and wait until the last one has been answered."""
    for request in requests:
        connection.tell(StoreReply(request=request, values=()), process)
    connection.expect(
        FromWorker,
        lambda message: (
            message.process == process and getattr(decode(_worker_up, message.payload), "request", None) == requests[-1]
        ),
    )


def test_the_agent_starts_without_torch_and_soon() -> None:
    code = "import sys, relight.agent.__main__; sys.exit('torch' in sys.modules)"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time, which a busy machine does not stretch as it does the time on the wall: about 0.2 s.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_help_teaches() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "relight.agent", "--help"], check=True, capture_output=True, text=True, timeout=30
    ).stdout
    for word in ("--controller", "--private-dir", "--adopt", "exit status"):
        assert word in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["--controller", "nowhere", "--name", "node-0", "--private-dir", "/tmp"],
        ["--controller", "127.0.0.1:1", "--name", "Node 0", "--private-dir", "/tmp"],
        ["--controller", "127.0.0.1:1", "--name", "node-0", "--private-dir", "/no/such/directory"],
    ],
)
def test_wrong_usage_is_explained(arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "relight.agent", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr


def test_without_a_controller_the_agent_ends_in_the_end(job: Job) -> None:
    port = job.port
    job.close_listener()
    arguments = ["--controller", f"127.0.0.1:{port}", "--name", NAME, "--private-dir", str(job.private_dir)]
    result = subprocess.run(
        [sys.executable, "-m", "relight.agent", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 3
    assert "the controller is gone" in result.stdout


@pytest.mark.parametrize(
    ("process", "status", "evidence"),
    [
        ("exit3", 3, "exited with code 3"),
        ("kill", -9, "was killed by SIGKILL"),
        ("segv", -11, "was killed by SIGSEGV"),
    ],
)
def test_the_end_of_a_process_is_reported(job: Job, process: str, status: int, evidence: str) -> None:
    agent, connection = job.start_agent()
    connection.spawn(process)
    exited = connection.exit_of(process)
    assert (exited.exit_status, exited.evidence) == (status, evidence)
    stop_agent(agent, connection)


def test_frames_go_both_ways_in_order_also_before_the_worker_has_connected(job: Job) -> None:
    agent, connection = job.start_agent()
    connection.spawn("talk-0", 0)
    connection.spawn("talk-1", 1)
    ask(connection, "talk-1", *range(50))
    ask(connection, "talk-0", *range(100, 150))
    ask(connection, "talk-1", 50)
    answers = [message.request for message in said(connection, "talk-1") if isinstance(message, StoreAdd)]
    assert answers == list(range(51))
    stop_agent(agent, connection)


def test_positions_and_states_are_sampled(job: Job) -> None:
    agent, connection = job.start_agent()
    pid = connection.spawn("talk-0", 0)
    ask(connection, "talk-0", 1)
    os.kill(pid, signal.SIGSTOP)
    samples = connection.expect(Samples, lambda samples: any(sample.state == "T" for sample in samples.samples))
    (sample,) = samples.samples
    assert sample.process == "talk-0"
    assert (sample.position.step, sample.position.phase) == (3, Phase.BACKWARD)
    assert sample.rss_bytes > 2**20
    chunk = connection.expect(TraceChunk)
    assert (chunk.process, chunk.rank) == ("talk-0", 0)
    assert [record[1:] for record in chunk.records] == [(1, 3, int(Phase.BACKWARD), 3)]
    stop_agent(agent, connection)


def test_the_last_words_and_the_trace_come_before_the_end(job: Job) -> None:
    agent, connection = job.start_agent()
    connection.spawn("last", 0)
    exited = connection.exit_of("last")
    assert exited.position.step == 7
    notices = [message.text for message in said(connection, "last") if isinstance(message, WorkerNotice)]
    assert notices == [str(number) for number in range(100)]
    assert connection.of_kind(TraceChunk)
    stop_agent(agent, connection)


def test_the_last_words_are_heard_even_if_the_agent_was_not_there_to_listen(job: Job) -> None:
    """It connects, speaks and dies in one go, while a frame for it is waiting that it will never read."""
    agent, connection = job.start_agent()
    connection.spawn("talk-0", 0)
    pid = connection.spawn("late", 1)
    connection.expect(Samples, lambda samples: any(sample.position.step == 6 for sample in samples.samples))
    connection.tell(StoreReply(request=1, values=()), "late", "talk-0")
    ask(connection, "talk-0", 2)
    pidfd = os.pidfd_open(pid)
    agent.process.send_signal(signal.SIGSTOP)
    os.kill(pid, signal.SIGUSR1)
    assert select.select([pidfd], [], [], DEADLINE_SECONDS)[0]
    os.close(pidfd)
    agent.process.send_signal(signal.SIGCONT)
    connection.exit_of("late")
    assert len(said(connection, "late")) == 100
    stop_agent(agent, connection)


def test_a_suspect_is_killed_on_order(job: Job) -> None:
    agent, connection = job.start_agent()
    pid = connection.spawn("talk-0", 0)
    os.kill(pid, signal.SIGSTOP)
    connection.kill("talk-0")
    exited = connection.exit_of("talk-0")
    assert exited.exit_status == -9
    assert exited.evidence.endswith("as ordered: test")
    stop_agent(agent, connection)


def test_a_dead_worker_leaves_no_children_behind(job: Job) -> None:
    agent, connection = job.start_agent()
    connection.spawn("child", 0)
    connection.exit_of("child")
    agent.expect_printed("[rank 0] child")
    stop_agent(agent, connection)


def test_output_is_labelled_and_kept(job: Job) -> None:
    agent, connection = job.start_agent()
    connection.spawn("odd", 1)
    agent.expect_printed("[rank 1] to stderr\n")
    agent.expect_printed("[rank 1] bad \ufffd\ufffd bytes\n")
    agent.expect_printed("[rank 1] no end\n")
    stop_agent(agent, connection)
    assert b"for the file only" not in agent.printed
    assert set(job.log("rank-1").splitlines()) == {
        "to stderr",
        "bad \ufffd\ufffd bytes",
        "for the file only",
        "no end",
    }


def test_a_standby_that_takes_a_rank_prints_as_that_rank(job: Job) -> None:
    agent, connection = job.start_agent()
    connection.spawn("talk-5", None)
    ask(connection, "talk-5", 1)
    agent.expect_printed("[standby talk-5] request 1\n")
    connection.tell(Assign(process="talk-5", rank=1, generation=2, why="test"), "talk-5")
    ask(connection, "talk-5", 2)
    agent.expect_printed("[rank 1] Assign\n[rank 1] request 2\n")
    stop_agent(agent, connection)
    assert "request 1" in job.log("standby-talk-5")
    assert "request 2" in job.log("rank-1")


def test_a_run_directory_that_cannot_be_written_is_told_once(job: Job) -> None:
    job.run_dir.write_text("a file where the directory should be")
    agent, connection = job.start_agent()
    connection.spawn("talk-0", 0)
    ask(connection, "talk-0", 1, 2, 3)
    agent.expect_printed("[rank 0] request 3\n")
    stop_agent(agent, connection)
    assert agent.printed.count(b"cannot be written") == 1


def test_a_frozen_worker_holds_nobody_up_and_does_not_come_back_unnoticed(job: Job) -> None:
    agent, connection = job.start_agent()
    pid = connection.spawn("talk-0", 0)
    connection.spawn("talk-1", 1)
    ask(connection, "talk-0", 1)
    os.kill(pid, signal.SIGSTOP)
    for _ in range(20):
        connection.tell(StoreReply(request=2, values=(bytes(2**20),)), "talk-0")
    ask(connection, "talk-1", 3)
    os.kill(pid, signal.SIGCONT)
    agent.expect_printed("frames for this worker were lost")
    stop_agent(agent, connection)


def test_garbage_and_forged_names_are_refused_and_disturb_nobody(job: Job) -> None:
    agent, connection = job.start_agent()
    connection.spawn("talk-0", 0)
    ask(connection, "talk-0", 1)
    connection.spawn("garbage", 1)
    agent.expect_printed("[rank 1] done\n")
    for attempt in ("noise", "huge", "untyped", "before hello", "wrong pid", "other name", "speaking for another"):
        agent.expect_printed(f"[rank 1] {attempt}: closed\n")
    ask(connection, "talk-0", 2)
    assert connection.exit_of("garbage").exit_status == 0
    assert said(connection, "garbage") == []
    assert not [message for message in said(connection, "talk-0") if isinstance(message, WorkerNotice)]
    assert os.stat(job.private_dir / f"agent-{NAME}.sock").st_mode & 0o777 == 0o600
    stop_agent(agent, connection)


def test_private_state_of_a_dead_process_is_handed_over(job: Job) -> None:
    """Judged by the target's own memory, which the agent shares with it."""
    agent, connection = job.start_agent()
    connection.spawn("private", 0)
    connection.exit_of("private")
    pid = connection.spawn("talk-1", None)
    ask(connection, "talk-1", 1)
    connection.send(CopyPrivate(source="private", target="talk-1", version=3))
    connection.send(CopyPrivate(source="private", target="talk-1", version=4))
    connection.send(CopyPrivate(source="never-there", target="talk-1", version=3))
    connection.send(ForgetProcess(process="private"))
    ask(connection, "talk-1", 2)
    page = job.page_of(pid)
    assert page.read_private(3) == b"private state of version 3"
    assert page.read_private(4) is None
    page.close()
    connection.send(CopyPrivate(source="private", target="talk-1", version=5))
    ask(connection, "talk-1", 3)
    stop_agent(agent, connection)


def test_a_worker_that_cannot_be_started_is_reported_as_ended(job: Job) -> None:
    agent, connection = job.start_agent(program="/no/such/program")
    connection.send(Spawn(agent=NAME, process="w0", rank=0, slot=0, why="test"))
    exited = connection.exit_of("w0")
    assert exited.exit_status is None
    assert "could not be started: [Errno 2]" in exited.evidence
    stop_agent(agent, connection)


def test_orders_that_make_no_sense_are_told_and_ignored(job: Job) -> None:
    agent, connection = job.start_agent()
    pid = connection.spawn("talk-0", 0)
    connection.send(ForgetProcess(process="talk-0"))
    connection.send(Spawn(agent=NAME, process="talk-0", rank=0, slot=0, why="test"))
    connection.kill("never-there")
    connection.tell(StoreReply(request=1, values=()), "never-there")
    ask(connection, "talk-0", 2)
    agent.expect_printed("talk-0 is not forgotten: it is alive")
    assert [started.pid for started in connection.of_kind(ProcessStarted)] == [pid]
    stop_agent(agent, connection)


def _is_log(descriptor: Path) -> bool:
    """A log file is open for as long as a line is being written."""
    try:
        return os.readlink(descriptor).endswith(".log")
    except FileNotFoundError:
        return True


def test_processes_come_and_go_without_a_trace(job: Job) -> None:
    agent, connection = job.start_agent()
    connection.spawn("talk-0", 0)
    ask(connection, "talk-0", 1)

    def descriptors() -> int:
        return len([path for path in Path(f"/proc/{agent.process.pid}/fd").iterdir() if not _is_log(path)])

    before = descriptors()
    for number in range(5):
        connection.spawn(f"last-{number}", 1)
        connection.exit_of(f"last-{number}")
        connection.send(ForgetProcess(process=f"last-{number}"))
    ask(connection, "talk-0", 2)
    wait_until(lambda: descriptors() == before)
    stop_agent(agent, connection)


def test_a_controller_that_talks_nonsense_is_left(job: Job) -> None:
    agent, connection = job.start_agent()
    connection.spawn("talk-0", 0)
    connection.send_bytes(b"\xff" * 100)
    job.close_listener()
    assert agent.end() == 3
    assert job.processes() == []
    assert b"over the limit" in agent.printed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_agent_and_all_its_processes(job: Job, number: signal.Signals) -> None:
    agent, connection = job.start_agent()
    pids = [connection.spawn("talk-0", 0), connection.spawn("talk-1", 1)]
    os.kill(pids[1], signal.SIGSTOP)
    agent.process.send_signal(number)
    assert {connection.expect(ProcessExited).process for _ in pids} == {"talk-0", "talk-1"}
    assert agent.end() == 0
    assert job.processes() == []
    assert not list(job.private_dir.glob("agent-*"))


def test_a_controller_that_does_not_come_back_ends_everything(job: Job) -> None:
    agent, connection = job.start_agent()
    connection.spawn("talk-0", 0)
    job.close_listener()
    connection.close()
    assert agent.end() == 3
    assert b"the controller is gone" in agent.printed
    assert job.processes() == []


def test_the_agent_ends_with_its_launcher(job: Job) -> None:
    connection = job.start_launched_agent()
    connection.spawn("talk-0", 0)
    ask(connection, "talk-0", 1)
    job.kill_launcher()
    connection.exit_of("talk-0")
    assert job.processes() == []
    wait_until(lambda: not job.private_dir.exists())  # its launcher can no longer remove it


def test_a_second_agent_of_the_same_name_is_refused(job: Job) -> None:
    agent, connection = job.start_agent()
    connection.spawn("talk-0", 0)
    second = job.start_unconnected_agent()
    assert second.end() == 2
    assert b"already running" in second.printed
    ask(connection, "talk-0", 1)
    assert len(connection.of_kind(ProcessStarted)) == 1
    stop_agent(agent, connection)
