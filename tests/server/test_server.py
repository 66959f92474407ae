"""A controller process, driven over its sockets by peers that play agents and observers."""

import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from relight.core.account.report import decode_report
from relight.core.controller import Controller, ControllerSettings
from relight.core.detection.sampling import Sample
from relight.core.protocol.commands import Assign, Command, Kill, Notice, Spawn
from relight.core.protocol.events import (
    AgentJoined,
    AgentLost,
    ProcessExited,
    ProcessStarted,
    ProcessSuspected,
    ShutdownRequested,
    StandbyReady,
    WorkerNotice,
)
from relight.core.protocol.position import Phase, Position
from relight.server.records.journal import read_journal
from relight.server.records.trace import read_statuses
from relight.wire.connection.framing import encode_payload
from relight.wire.messages import (
    ForgetProcess,
    FromWorker,
    JobEnded,
    NoticeUpdate,
    Refused,
    Samples,
    StatusUpdate,
    StopAgent,
    StoreAdd,
    StoreReply,
    StoreSet,
    StoreWait,
    TraceChunk,
)
from relight.wire.status import EngineVersion, PublishStatus
from tests.server.controller_process import ControllerProcess, Peer, wait_until

Start = Callable[..., ControllerProcess]


def start_workers(agent: Peer, count: int) -> list[str]:
    """Play the agent's part until `count` workers run."""
    names = []
    for number in range(count):
        spawn = agent.expect(Spawn)
        agent.send(ProcessStarted(process=spawn.process, pid=1_000_000 + number))
        agent.expect_for(spawn.process, Assign)
        names.append(spawn.process)
    return names


def exited(process: str, status: int | None = -9) -> ProcessExited:
    return ProcessExited(
        process=process, exit_status=status, evidence="was killed", position=Position(), noticed_ns=time.monotonic_ns()
    )


def sample(process: str, **changes: object) -> Sample:
    now = time.monotonic_ns()
    plain = Sample(
        process=process,
        position=Position(generation=1, phase=Phase.FORWARD, step=1, version=1, stamp_ns=now, progress=1),
        state="S",
        run_delay_ns=0,
        rss_bytes=1000,
        sampled_ns=now,
    )
    return msgspec.structs.replace(plain, **changes)


def test_an_agent_is_told_to_start_every_rank_and_standby(start: Start) -> None:
    agent = start(world_size=2, standbys=1).agent()
    spawned = [agent.expect(Spawn) for _ in range(3)]
    assert [spawn.rank for spawn in spawned] == [0, 1, None]


def test_what_a_dead_standby_leaves_is_let_go_of_at_once_and_its_end_may_be_said_twice(start: Start) -> None:
    """A page and an output of each would be kept on its host until the next recovery, which may never come."""
    controller = start(world_size=2, standbys=1)
    agent = controller.agent()
    standby = [agent.expect(Spawn) for _ in range(3)][-1].process
    agent.send(ProcessStarted(process=standby, pid=3))
    for _ in range(2):
        agent.send(exited(standby))
    assert agent.expect(ForgetProcess).process == standby
    assert agent.expect(Spawn).rank is None
    agent.send(ProcessStarted(process="stranger", pid=4))  # that is refused, and all before it has been dealt with then
    wait_until(lambda: any(line.note for line in controller.journal()), "a note about what is refused")
    (note,) = [line.note for line in controller.journal() if line.note]
    assert "'stranger'" in note


def test_an_order_is_in_the_journal_before_it_is_sent(start: Start) -> None:
    controller = start(world_size=2)
    agent = controller.agent()
    spawn = agent.expect(Spawn)
    assert spawn in [line.command for line in controller.journal()]
    agent.send(ProcessStarted(process=spawn.process, pid=1))
    assign = agent.expect_for(spawn.process, Assign)
    assert assign in [line.command for line in controller.journal()]


def test_replaying_the_journal_gives_the_same_orders(start: Start) -> None:
    controller = start(world_size=2, standbys=1, startup_timeout_seconds=2.0)
    agent, observer = controller.agent(), controller.observer()
    workers = start_workers(agent, 2)
    agent.send(exited(workers[0]))
    agent.expect(Kill)
    observer.expect(JobEnded)  # no rank reaches the first step in time: the core's deadline passes
    agent.close()
    controller.wait()
    header, lines = read_journal(controller.run_dir / "journal.jsonl")
    names = ControllerSettings.__struct_fields__
    core = Controller(ControllerSettings(**{name: getattr(header.settings, name) for name in names}))
    replayed: list[Command] = []
    recorded = [line.command for line in lines if line.command is not None]
    for line in lines:
        if line.event is not None:
            replayed += core.handle(line.event, line.now)
        elif line.expired:
            replayed += core.expire(line.now)
    assert replayed == recorded
    assert any(line.expired for line in lines)


def test_rendezvous_through_the_agent(start: Start) -> None:
    controller = start(world_size=2)
    agent = controller.agent()
    first, second = start_workers(agent, 2)
    agent.relay(first, StoreWait(request=1, generation=1, keys=("address",)))
    agent.relay(second, StoreSet(generation=1, key="address", value=b"here"))
    assert agent.expect_for(first, StoreReply) == StoreReply(request=1, values=(b"here",))
    agent.relay(second, StoreAdd(request=2, generation=1, key="count", amount=3))
    assert agent.expect_for(second, StoreReply) == StoreReply(request=2, values=(b"3",))
    agent.relay(second, StoreWait(request=3, generation=7, keys=("address",)))
    assert "generation 7 is closed" in agent.expect_for(second, StoreReply).error
    assert not [line for line in controller.journal() if line.note]


def test_a_worker_cannot_speak_for_another(start: Start) -> None:
    controller = start(world_size=2)
    agent, observer = controller.agent(), controller.observer()
    first, second = start_workers(agent, 2)
    agent.relay(first, StandbyReady(process=second, layout_digest="forged"))
    observer.expect(NoticeUpdate, lambda notice: f"StandbyReady of '{second}' that came from {first}" in notice.text)
    agent.relay("w99", StandbyReady(process="w99", layout_digest="forged"))
    observer.expect(NoticeUpdate, lambda notice: "'w99', which it does not run" in notice.text)
    assert not [line for line in controller.journal() if isinstance(line.event, StandbyReady)]


def test_a_worker_cannot_say_what_only_agents_say(start: Start) -> None:
    controller = start(world_size=2)
    agent, observer = controller.agent(), controller.observer()
    first, second = start_workers(agent, 2)
    agent.relay(first, exited(second))
    observer.expect(NoticeUpdate, lambda notice: f"ignored a message of {first}: malformed" in notice.text)
    agent.send(FromWorker(process=first, payload=encode_payload(WorkerNotice(process=first, rank=0, text="hello"))))
    observer.expect(NoticeUpdate, lambda notice: notice.text == "hello")
    assert not [line for line in controller.journal() if isinstance(line.event, ProcessExited)]


def test_one_agent_cannot_speak_about_the_processes_of_another(start: Start) -> None:
    controller = start(world_size=1)
    agent, other, observer = controller.agent(), controller.agent("node-1"), controller.observer()
    (worker,) = start_workers(agent, 1)
    other.send(exited(worker))
    observer.expect(NoticeUpdate, lambda notice: "agent node-1 about" in notice.text)
    assert not [line for line in controller.journal() if isinstance(line.event, ProcessExited)]


def test_a_frozen_worker_in_the_samples_is_killed(start: Start) -> None:
    controller = start(world_size=2, frozen_timeout_seconds=0.3)
    agent = controller.agent()
    workers = start_workers(agent, 2)

    def frozen_long_enough() -> bool:
        agent.send(Samples(samples=tuple(sample(name, state="T" if name == workers[1] else "S") for name in workers)))
        return any(isinstance(line.event, ProcessSuspected) for line in controller.journal())

    wait_until(frozen_long_enough, "the frozen worker is suspected")
    assert agent.expect(Kill).process == workers[1]


def test_observers_see_status_and_notices(start: Start) -> None:
    controller = start(world_size=2)
    agent, observer = controller.agent(), controller.observer()
    workers = start_workers(agent, 2)
    agent.send(Samples(samples=tuple(sample(name) for name in workers)))
    status = observer.expect(
        StatusUpdate, lambda update: all(item.rss_bytes for item in update.ranks) and bool(update.ranks)
    )
    assert [item.process for item in status.ranks] == workers
    assert [item.position.step for item in status.ranks] == [1, 1]
    assert (status.job, status.generation) == ("test", 1)


def test_traces_are_kept(start: Start) -> None:
    controller = start(world_size=1)
    agent = controller.agent()
    (worker,) = start_workers(agent, 1)
    chunk = TraceChunk(process=worker, rank=0, records=((1, 1, 0, 2, 0), (2, 1, 0, 3, 0)), clock_offset_ns=5)
    agent.send(chunk)
    path = controller.run_dir / "trace.jsonl"
    wait_until(lambda: path.exists() and path.read_bytes().endswith(b"\n"), "the trace is written")
    assert msgspec.json.decode(path.read_bytes(), type=TraceChunk) == chunk


def test_what_is_published_is_kept_also_over_a_restart(start: Start) -> None:
    controller = start(world_size=1)
    agent = controller.agent()
    (worker,) = start_workers(agent, 1)
    engine = EngineVersion(name="engine", pid=1, version=3)
    status = PublishStatus(process=worker, engines=(engine,), version=3, updates=2, updates_bytes=10)
    agent.relay("w9", status)  # it runs no such process
    agent.relay(worker, status)
    wait_until(lambda: list(read_statuses(controller.run_dir)) == [status], "the status is written")
    controller.restart()
    agent = controller.agent(processes=(worker,))
    observer = controller.observer()
    observer.send(StopAgent(why="SIGINT"))
    observer.expect(JobEnded)
    agent.close()
    controller.wait()
    published = decode_report((controller.run_dir / "report.json").read_bytes()).published
    assert published is not None
    assert (published.updates, published.engines) == (2, {"engine": 3})


def test_what_nobody_heard_is_told_to_every_observer_once(start: Start) -> None:
    controller = start(world_size=1)
    stranger = controller.connect()
    stranger.say_hello("observer", "stranger", token=b"wrong")
    stranger.expect_end()

    def is_it(notice: NoticeUpdate) -> bool:
        return "refused a connection" in notice.text

    for name in ("launcher", "dashboard"):
        controller.observer(name).expect(NoticeUpdate, is_it)
    back = controller.observer("launcher")
    back.send(StopAgent(why="SIGINT"))
    said = [message for message in back.expect_end() if isinstance(message, NoticeUpdate)]
    assert not [notice for notice in said if is_it(notice)]


# --- agents come and go -------------------------------------------------------------------------------------------
def test_an_agent_that_comes_back_in_time_is_not_lost(start: Start) -> None:
    controller = start(world_size=2)
    agent, observer = controller.agent(), controller.observer()
    workers = start_workers(agent, 2)
    agent.close()
    observer.expect(NoticeUpdate, lambda notice: "lost the connection to agent node-0" in notice.text)
    successor = controller.agent(processes=tuple(workers))
    successor.relay(workers[0], StoreAdd(request=1, generation=1, key="n", amount=1))
    successor.expect_for(workers[0], StoreReply)
    lines = controller.journal()
    assert not [line for line in lines if isinstance(line.event, AgentLost | ProcessExited)]
    assert len([line for line in lines if isinstance(line.event, AgentJoined)]) == 1


def test_the_successor_of_a_dead_agent_is_told_again_what_holds(start: Start) -> None:
    """Its predecessor may have confirmed orders that it had no time to pass on."""
    controller = start(world_size=2)
    agent, observer = controller.agent(life="first"), controller.observer()
    workers = start_workers(agent, 2)
    agent.close()
    observer.expect(NoticeUpdate, lambda notice: "lost the connection to agent node-0" in notice.text)
    successor = controller.agent(processes=tuple(workers), life="second")
    ranks = {name: successor.expect_for(name, Assign).rank for name in workers}
    assert ranks == {workers[0]: 0, workers[1]: 1}


def test_orders_for_an_agent_that_is_away_wait_for_it(start: Start) -> None:
    controller = start(world_size=2)
    agent, observer = controller.agent(), controller.observer()
    first, second = start_workers(agent, 2)
    agent.relay(first, StoreWait(request=1, generation=1, keys=("k",)))
    agent.close()
    observer.expect(NoticeUpdate, lambda notice: "lost the connection" in notice.text)
    successor = controller.agent(processes=(second,))  # the first died meanwhile: all ranks start again
    kill = successor.expect(Kill)
    assert kill.process in (first, second)
    assert [successor.expect(Spawn).rank for _ in range(2)] == [0, 1]
    (unseen,) = [line.event for line in controller.journal() if isinstance(line.event, ProcessExited)]
    assert (unseen.process, unseen.exit_status) == (first, None)
    assert "while its agent was away" in unseen.evidence


def test_a_process_that_the_job_does_not_know_is_killed(start: Start) -> None:
    agent = start(world_size=1).agent(processes=("w77",))
    assert agent.expect(Kill).process == "w77"


def test_an_agent_that_stays_away_is_lost(start: Start) -> None:
    controller = start(world_size=1, agent_timeout_seconds=0.5, controller_timeout_seconds=0.5)
    agent, observer = controller.agent(), controller.observer()
    start_workers(agent, 1)
    agent.close()
    ended = observer.expect(JobEnded)
    assert "no connection to agent node-0 for 0.5 s" in ended.error
    assert controller.wait() == 1


def test_the_last_agent_has_as_long_as_a_controller_has(start: Start) -> None:
    """There is no host to go on with, and its ranks may live: nothing is won by ending the job."""
    controller = start(world_size=1, agent_timeout_seconds=0.1, controller_timeout_seconds=300.0)
    agent, observer = controller.agent(), controller.observer()
    (worker,) = start_workers(agent, 1)
    agent.close()
    observer.expect(NoticeUpdate)
    for _ in range(3):  # twice a second, so that its time is up several times over
        observer.expect(StatusUpdate)
    assert not [line for line in controller.journal() if isinstance(line.event, AgentLost)]
    again = controller.agent(processes=(worker,))
    again.relay(worker, StoreAdd(request=1, generation=1, key="n", amount=1))
    again.expect_for(worker, StoreReply)


def test_a_newer_connection_of_an_agent_takes_over(start: Start) -> None:
    controller = start(world_size=1)
    older, observer = controller.agent(), controller.observer()
    (worker,) = start_workers(older, 1)
    newer = controller.agent(processes=(worker,))
    older.expect_end()
    newer.relay(worker, StoreAdd(request=1, generation=1, key="n", amount=1))
    newer.expect_for(worker, StoreReply)
    observer.expect(StatusUpdate)
    assert not [line for line in controller.journal() if isinstance(line.event, AgentLost)]


# --- the end ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_job_in_order(start: Start, number: signal.Signals) -> None:
    controller = start(world_size=2)
    agent, observer = controller.agent(), controller.observer()
    start_workers(agent, 2)
    controller.process.send_signal(number)
    assert number.name in observer.expect(JobEnded).error
    assert number.name in agent.expect(StopAgent).why
    chunk = TraceChunk(process="w0", rank=0, records=((1, 1, 0, 2, 0),), clock_offset_ns=0)
    agent.send(chunk)  # last words are still taken
    agent.close()
    assert controller.wait() == 1
    assert (controller.run_dir / "trace.jsonl").exists()
    assert number.name in decode_report((controller.run_dir / "report.json").read_bytes()).error


def test_an_observer_may_end_the_job(start: Start) -> None:
    controller = start(world_size=1)
    agent, observer = controller.agent(), controller.observer()
    observer.send(StopAgent(why="SIGINT"))
    agent.expect(StopAgent)
    agent.close()
    observer.expect(JobEnded)
    assert controller.wait() == 1
    assert ShutdownRequested(reason="SIGINT") in [line.event for line in controller.journal()]


def test_a_second_signal_does_not_wait_for_agents(start: Start) -> None:
    controller = start(world_size=1)
    agent = controller.agent()
    controller.process.send_signal(signal.SIGTERM)
    agent.expect(StopAgent)  # and this agent does not obey
    controller.process.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    assert controller.wait() == 1
    assert time.monotonic() - begun < 5.0


def test_a_script_that_never_trains_ends_the_job_with_its_reason(start: Start) -> None:
    controller = start(world_size=2)
    agent, observer = controller.agent(), controller.observer()
    workers = start_workers(agent, 2)
    agent.send(exited(workers[1], status=3))
    assert "before its first step" in observer.expect(JobEnded).error
    agent.close()
    assert controller.wait() == 1


def test_a_late_agent_is_told_that_the_job_is_over(start: Start) -> None:
    controller = start(world_size=1)
    agent = controller.agent()
    controller.process.send_signal(signal.SIGTERM)
    agent.expect(StopAgent)
    late = controller.agent("node-1")
    late.expect(StopAgent)


def test_a_peer_that_does_not_read_costs_nobody_anything(start: Start) -> None:
    """It may lose its connection; the others go on."""
    controller = start(world_size=1)
    agent, deaf, observer = controller.agent(), controller.observer("deaf"), controller.observer()
    deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    (worker,) = start_workers(agent, 1)
    text = "x" * 100_000
    for number in range(30):
        agent.relay(worker, WorkerNotice(process=worker, rank=0, text=f"{number} {text}"))
    observer.expect(NoticeUpdate, lambda notice: notice.text.startswith("29 "))
    agent.relay(worker, StoreAdd(request=1, generation=1, key="n", amount=1))
    agent.expect_for(worker, StoreReply)


# --- the port and the disk ----------------------------------------------------------------------------------------
def test_a_port_in_use_is_named_with_the_flag_that_changes_it(start: Start, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            AssertionError, match=rf"port 127\.0\.0\.1:{port} is in use; choose another with --controller-port"
        ):
            start(controller_port=port, run_dir=tmp_path / "unused")
    assert not any((tmp_path / "unused").iterdir())


def test_a_full_disk_is_told_loudly_and_the_job_goes_on(start: Start) -> None:
    """Files of this controller may grow no further, as on a full disk."""
    controller = start(world_size=2)
    agent, observer = controller.agent(), controller.observer()
    first, second = start_workers(agent, 2)
    full = (controller.run_dir / "journal.jsonl").stat().st_size + 100
    resource.prlimit(controller.process.pid, resource.RLIMIT_FSIZE, (full, full))
    for number in range(20):
        agent.relay(first, WorkerNotice(process=first, rank=0, text=f"notice {number}"))
    alarm = observer.expect(NoticeUpdate, lambda notice: "the journal" in notice.text)
    assert alarm.level == "error"
    assert "training goes on and failures are still handled" in alarm.text
    observer.expect(NoticeUpdate, lambda notice: notice.text == "notice 19")
    agent.relay(second, StoreSet(generation=1, key="k", value=b"v"))
    agent.relay(first, StoreWait(request=1, generation=1, keys=("k",)))
    assert agent.expect_for(first, StoreReply).values == (b"v",)
    controller.process.send_signal(signal.SIGTERM)
    agent.expect(StopAgent)
    agent.close()
    told = [message for message in observer.expect_end() if isinstance(message, NoticeUpdate)]
    assert not [notice for notice in told if "the journal" in notice.text]  # once is enough
    read_journal(controller.run_dir / "journal.jsonl")  # what is there can be read


def test_the_core_sees_every_notice_of_the_command_kind(start: Start) -> None:
    controller = start(world_size=1)
    agent, observer = controller.agent(), controller.observer()
    (worker,) = start_workers(agent, 1)
    agent.relay(worker, WorkerNotice(process=worker, rank=0, text="mind the gap"))
    observer.expect(NoticeUpdate, lambda notice: notice.text == "mind the gap")
    assert any(isinstance(line.command, Notice) and line.command.why == "mind the gap" for line in controller.journal())


def test_refused_is_the_last_word(start: Start) -> None:
    peer = start(world_size=1).connect()
    peer.say_hello("agent", "node-0", token=b"x" * 32)
    *_, last = peer.expect_end()
    assert isinstance(last, Refused)
