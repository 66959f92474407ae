"""A controller that is killed is followed by another, which knows what the first one knew."""

import socket
import subprocess
import sys

import msgspec
import pytest

from relight.core.account.job_stats import KEPT_IN_ACCOUNT
from relight.core.account.report import decode_report
from relight.core.protocol.commands import Assign, Begin, EndJob, Kill, Release, Restore, Resume, Spawn, Stop
from relight.core.protocol.events import (
    ControllerRestarted,
    ProcessExited,
    ProcessStarted,
    StandbyReady,
    Stopped,
    TrainingDone,
    TrainingEntered,
)
from relight.core.protocol.position import Position
from relight.wire.messages import (
    JobEnded,
    NoticeUpdate,
    StopAgent,
    StoreAdd,
    StoreLost,
    StoreRecall,
    StoreReply,
    StoreSet,
    StoreWait,
)
from tests.core.test_memory import Recorded
from tests.recorded import write_journal
from tests.server.controller_process import ControllerProcess, Peer
from tests.server.test_server import Start, exited, start_workers


def entered(process: str, rank: int) -> TrainingEntered:
    return TrainingEntered(process=process, rank=rank, version=0, layout_digest="l", state_digest="s", until=5)


def train(controller: ControllerProcess, count: int = 2) -> tuple[Peer, list[str]]:
    """Play an agent whose workers have begun to train."""
    agent = controller.agent()
    workers = start_workers(agent, count)
    for rank, worker in enumerate(workers):
        agent.relay(worker, entered(worker, rank))
    agent.expect_for(workers[0], Begin)
    return agent, workers


def come_back(controller: ControllerProcess, *processes: str) -> Peer:
    controller.restart()
    return controller.agent(processes=processes)


def test_the_successor_listens_on_the_same_port(start: Start) -> None:
    controller = start(world_size=1)
    before = controller.address
    controller.restart()
    assert controller.address == before


def test_another_port_will_do_if_that_one_is_taken(start: Start) -> None:
    controller = start(world_size=1)
    host, port = controller.address
    controller.close()
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind((host, port))
        squatter.listen()
        controller.restart()
        assert controller.address[1] != port


def test_members_in_training_are_told_that_they_train(start: Start) -> None:
    controller = start(world_size=2)
    _, workers = train(controller)
    agent = come_back(controller, *workers)
    assert agent.expect_for(workers[1], Resume).generation == 1
    observer = controller.observer()
    assert "training went on meanwhile" in observer.expect(NoticeUpdate).text
    assert [line.event for line in controller.journal() if line.event][-1] == ControllerRestarted()


def test_orders_to_start_are_given_again_unless_they_were_obeyed(start: Start) -> None:
    controller = start(world_size=2)
    first = controller.agent()
    spawns = [first.expect(Spawn) for _ in range(2)]
    first.send(ProcessStarted(process=spawns[0].process, pid=5))
    first.expect_for(spawns[0].process, Assign)
    agent = come_back(controller, spawns[0].process)
    assert agent.expect(Spawn).process == spawns[1].process
    assert agent.expect_for(spawns[0].process, Assign).rank == 0
    agent.send(ProcessStarted(process=spawns[1].process, pid=6))
    assert agent.expect_for(spawns[1].process, Assign).rank == 1
    assert not [line for line in controller.journal() if isinstance(line.event, ProcessExited)]


def test_a_recovery_begins_again_in_a_new_generation(start: Start) -> None:
    controller = start(world_size=2)
    agent, workers = train(controller)
    agent.send(exited(workers[1]))
    stop = agent.expect_for(workers[0], Stop)
    agent = come_back(controller, workers[0])
    assert agent.expect_for(workers[0], Stop).generation == stop.generation + 1
    stale = Stopped(
        process=workers[0],
        rank=0,
        generation=stop.generation,
        step=0,
        version=0,
        lineage="",
        prepared=-1,
        torn=False,
        blank=False,
        stop_seconds=0.0,
        restore_address="",
    )
    agent.relay(workers[0], stale)  # an answer to the dead controller decides nothing
    agent.relay(workers[0], msgspec.structs.replace(stale, generation=stop.generation + 1))
    spawned = [line.command for line in controller.journal() if isinstance(line.command, Spawn)]
    assert [spawn.rank for spawn in spawned] == [0, 1, None, None]  # the last one: the same, ordered again
    assert spawned[2].process == spawned[3].process


@pytest.mark.parametrize("life", ["the same", "another"])
def test_the_successor_knows_an_agent_from_one_that_has_taken_its_place(start: Start, life: str) -> None:
    """Agent and controller died together: what a dead rank had left beside its page is gone with the first agent."""
    controller = start(world_size=2, standbys=1)
    agent = controller.agent(life="the same")
    workers = start_workers(agent, 2)
    for rank, worker in enumerate(workers):
        agent.relay(worker, entered(worker, rank))
    standby = agent.expect(Spawn).process
    agent.send(ProcessStarted(process=standby, pid=77))
    agent.relay(standby, StandbyReady(process=standby, layout_digest="l"))
    agent.expect_for(workers[0], Begin)
    page = Position(generation=1, rank=1, step=3, version=3, stamp_ns=1, private_versions=(3, 2))
    agent.send(msgspec.structs.replace(exited(workers[1]), position=page))
    agent.expect_for(standby, Assign)
    controller.restart()
    agent = controller.agent(processes=(workers[0], standby), life=life)
    generation = agent.expect_for(workers[0], Stop).generation
    survivor = Stopped(
        process=workers[0],
        rank=0,
        generation=generation,
        step=3,
        version=3,
        lineage="v3",
        prepared=-1,
        torn=False,
        blank=False,
        derivable=True,
        stop_seconds=0.0,
        restore_address="",
    )
    agent.relay(workers[0], survivor)
    agent.relay(
        standby, msgspec.structs.replace(survivor, process=standby, rank=1, step=-1, version=0, lineage="", blank=True)
    )
    restore = agent.expect_for(standby, Restore)
    assert (restore.target, restore.targets) == (3, (1,))
    assert restore.derived == (() if life == "the same" else (1,))


def test_a_death_that_was_reported_to_nobody_is_reported_to_the_successor(start: Start) -> None:
    controller = start(world_size=2)
    _, workers = train(controller)
    agent = come_back(controller, *workers)  # the second one has ended, and the news of it comes next
    agent.send(exited(workers[1]))
    agent.expect_for(workers[0], Stop)
    seen = [line.event for line in controller.journal() if isinstance(line.event, ProcessExited)]
    assert [event.exit_status for event in seen] == [-9]


def test_a_process_that_vanished_without_a_word_is_counted_as_dead(start: Start) -> None:
    controller = start(world_size=2)
    _, workers = train(controller)
    agent = come_back(controller, workers[0])
    agent.expect_for(workers[0], Stop)
    (seen,) = [line.event for line in controller.journal() if isinstance(line.event, ProcessExited)]
    assert (seen.process, seen.exit_status) == (workers[1], None)


def test_an_agent_that_does_not_come_back_is_lost(start: Start) -> None:
    controller = start(world_size=1, agent_timeout_seconds=0.5, controller_timeout_seconds=0.5)
    train(controller, 1)
    controller.restart()
    assert "after the controller's restart" in controller.observer().expect(JobEnded).error
    assert controller.wait() == 1


def test_the_end_is_told_by_the_successor(start: Start) -> None:
    controller = start(world_size=1)
    agent, workers = train(controller, 1)
    done = TrainingDone(
        process=workers[0], rank=0, generation=1, version=5, lineage="l", state_digest="s", cut_collectives=0
    )
    agent.relay(workers[0], done)
    agent.expect_for(workers[0], Release)
    agent = come_back(controller, *workers)
    agent.expect_for(workers[0], Release)
    agent.send(exited(workers[0], status=0))
    agent.expect(StopAgent)
    controller.restart()  # before it was heard
    observer = controller.observer()
    assert observer.expect(JobEnded).error == ""
    late = controller.agent()
    late.expect(StopAgent)
    late.close()
    assert controller.wait() == 0


def test_an_end_that_the_journal_lacks_is_written_by_the_successor(start: Start) -> None:
    """The first controller died between what it heard and what it would have ordered."""
    controller = start(world_size=1)
    agent, workers = train(controller, 1)
    agent.send(exited(workers[0], status=0))  # the last replica
    agent.expect(StopAgent)
    controller.close()
    path = controller.run_dir / "journal.jsonl"
    path.write_bytes(b"".join(line for line in path.read_bytes().splitlines(keepends=True) if b"EndJob" not in line))
    assert not any(isinstance(line.command, EndJob) for line in controller.journal())
    controller.restart()
    assert "every replica of the state is lost" in controller.observer().expect(JobEnded).error
    ends = [number for number, line in enumerate(controller.journal()) if isinstance(line.command, EndJob)]
    assert ends == [len(controller.journal()) - 1]
    controller.restart()
    assert len(controller.journal()) == ends[0] + 1  # it is there


def test_what_workers_had_put_into_the_store_is_asked_for_again(start: Start) -> None:
    controller = start(world_size=2)
    agent = controller.agent()
    first, second = start_workers(agent, 2)
    agent.relay(first, StoreSet(generation=1, key="k", value=b"v"))
    agent.relay(first, StoreAdd(request=1, generation=1, key="n", amount=3))
    agent.expect_for(first, StoreReply)
    agent = come_back(controller, first, second)
    agent.expect_for(second, StoreLost)
    agent.relay(second, StoreRecall(generation=0, added={}))
    agent.relay(second, StoreWait(request=1, generation=1, keys=("k",)))
    agent.relay(second, StoreAdd(request=2, generation=1, key="n", amount=1))  # not counted before all have answered
    agent.relay(first, StoreSet(generation=1, key="k", value=b"v"))
    agent.relay(first, StoreRecall(generation=1, added={"n": 3}))
    assert agent.expect_for(second, StoreReply) == StoreReply(request=1, values=(b"v",))
    assert agent.expect_for(second, StoreReply) == StoreReply(request=2, values=(b"4",))
    agent.relay(second, StoreAdd(request=2, generation=1, key="n", amount=1))  # said again, counted once
    assert agent.expect_for(second, StoreReply) == StoreReply(request=2, values=(b"4",))


def test_two_controllers_cannot_serve_one_job(start: Start) -> None:
    controller = start(world_size=1)
    command = [sys.executable, "-m", "relight.server", "--private-dir", str(controller.private_dir), "--resume"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert second.returncode == 2
    assert "is being written by another controller" in second.stderr


def test_kills_are_ordered_again(start: Start) -> None:
    controller = start(world_size=2, agent_timeout_seconds=60.0)
    agent, workers = train(controller)
    agent.send(exited(workers[1]))
    agent.expect_for(workers[0], Stop)
    agent = come_back(controller, *workers)  # it had come back to life
    assert agent.expect(Kill).process == workers[1]


def test_the_report_lists_all_failures_of_a_job_that_had_too_many_to_remember(start: Start) -> None:
    """The successor learns of the end from the journal, which is longer than what any controller keeps of it."""
    controller = start(world_size=3, standbys=1)
    controller.close()
    desk = Recorded().train()
    assert isinstance(desk, Recorded)
    count = KEPT_IN_ACCOUNT + 10
    for step in range(count):
        desk.lose_and_replace(step)
    desk.finish()
    for process in desk.controller.rank_processes().values():
        desk.exits(process, 0, evidence="exited with status 0")
    for standby in [p.name for p in desk.controller.members.processes.values() if p.alive]:
        desk.exits(standby)
    (controller.run_dir / "journal.jsonl").unlink()
    write_journal(controller.run_dir, controller.settings, desk.entries)
    controller.restart()
    observer = controller.observer()
    assert observer.expect(JobEnded).error == ""
    late = controller.agent()
    late.expect(StopAgent)
    late.close()
    assert controller.wait() == 0
    report = decode_report((controller.run_dir / "report.json").read_bytes())
    assert [failure.number for failure in report.failures] == list(range(1, count + 1))
    assert [recovery.number for recovery in report.recoveries] == list(range(1, count + 1))
    assert not report.notices
