"""Hosts that are left in order: ranks move between two steps, nothing is repeated, and the host is given back."""

import pytest

from relight.core.controller import Stage
from relight.core.protocol import events as ev
from relight.core.protocol.commands import (
    Assign,
    Command,
    EndJob,
    Kill,
    RefuseDrain,
    ReleaseHost,
    Restore,
    Resume,
    Spawn,
    Stop,
    WindDown,
)
from relight.core.protocol.position import Phase, Position
from tests.core.membership.test_hosts import join, join_spare, lose
from tests.core.test_controller import Desk, kinds, one

STEP = 5


def two_nodes_and_a_spare(standbys: int = 2, spare_slots: int = 2) -> Desk:
    desk = Desk(world_size=4, standbys=standbys, nodes=2, spare_nodes=1, slots=2)
    join_spare(desk, "spare-2", slots=spare_slots)
    join(desk, "node-1")
    return desk.train()


def drain(desk: Desk, agent: str = "node-1", *, leaves: bool = False) -> tuple[Command, ...]:
    return desk.tell(ev.HostDraining(agent=agent, reason="maintenance", leaves=leaves))


def pause(desk: Desk, version: int = STEP) -> tuple[Command, ...]:
    """Every rank has committed the same step."""
    said = [desk.done(process, version=version) for process in list(desk.controller.rank_processes().values())]
    return said[-1]


def leave(desk: Desk) -> None:
    """The drained processes end, each with the private state of the step that comes next."""
    position = Position(step=STEP, version=STEP, phase=Phase.DONE, private_versions=(STEP, -1))
    for process in [p.name for p in desk.controller.members.processes.values() if p.failed and p.alive]:
        end = ev.ProcessExited(process=process, exit_status=-9, evidence="", position=position, noticed_ns=1)
        desk.tell(end)


def recover(desk: Desk) -> tuple[Command, ...]:
    """The drained processes have ended; what the recovery that follows ends with."""
    leave(desk)
    desk.recover(STEP, commits=False)
    return desk.said


def test_ranks_move_after_a_step_that_all_ranks_finish() -> None:
    desk = two_nodes_and_a_spare()
    order = one(drain(desk), WindDown)
    assert (order.generation, "maintenance" in order.why) == (1, True)
    said = pause(desk)
    expected: list[type] = [Kill, Kill, Stop]
    assert kinds(said)[:3] == expected
    processes = desk.controller.members.processes
    assert [(c.rank, processes[c.process].agent) for c in said if isinstance(c, Assign)] == [
        (2, "spare-2"),
        (3, "spare-2"),
    ]
    said = recover(desk)
    assert kinds(said)[0] is Resume
    assert one(said, ReleaseHost).agent == "node-1"
    assert not [command for command in said if isinstance(command, WindDown)]
    assert {f.kind for f in desk.controller.report().failures} == {"drained"}


def test_the_recovery_starts_at_the_step_that_comes_next() -> None:
    desk = two_nodes_and_a_spare()
    drain(desk)
    pause(desk)
    leave(desk)
    for process in desk.controller.rank_processes().values():
        desk.stands(process, at=STEP, step=STEP - 1)
    restore = one(desk.said, Restore)
    assert (restore.target, restore.targets, restore.attempt) == (STEP, (2, 3), 0)


def test_without_a_warm_standby_the_ranks_train_on_until_there_is_one() -> None:
    desk = two_nodes_and_a_spare(standbys=1)
    said = drain(desk)
    (spawn,) = [command for command in said if isinstance(command, Spawn)]
    assert spawn.agent == "spare-2"
    assert not [command for command in said if isinstance(command, WindDown)]
    desk.tell(ev.ProcessStarted(process=spawn.process, pid=1))
    assert [type(c) for c in desk.warm(spawn.process)] == [WindDown]


def test_standbys_of_the_host_move_as_well() -> None:
    desk = two_nodes_and_a_spare(standbys=3)  # one of them where there is no free slot
    (beside,) = [p for p in desk.controller.members.standbys() if p.agent != "spare-2"]
    said = drain(desk, beside.agent)
    assert [c.process for c in said if isinstance(c, Kill)] == [beside.name]
    assert not [c for c in said if isinstance(c, Spawn) and c.agent == beside.agent]


def test_a_host_without_ranks_is_given_back_at_once() -> None:
    desk = two_nodes_and_a_spare()
    join_spare(desk, "spare-3")
    assert one(drain(desk, "spare-3"), ReleaseHost).agent == "spare-3"
    assert drain(desk, "spare-3")[0] == one(desk.said, RefuseDrain)


@pytest.mark.parametrize("standbys", [0, 1, 2])
@pytest.mark.parametrize("spare_slots", [0, 1, 2, 3])
def test_a_host_is_left_if_others_have_room(standbys: int, spare_slots: int) -> None:
    """Room is a free slot, or a standby on another host, wherever that was started."""
    desk = two_nodes_and_a_spare(standbys, spare_slots)
    members = desk.controller.members
    elsewhere = sum(p.agent != "node-1" for p in members.standbys())
    free = spare_slots - sum(p.agent == "spare-2" for p in members.standbys())
    said = drain(desk)
    is_refused = any(isinstance(command, RefuseDrain) for command in said)
    assert is_refused == (elsewhere + max(0, free) < 2)
    assert desk.controller.stage is Stage.TRAINING


def test_a_host_that_leaves_without_room_elsewhere_ends_the_job_after_a_checkpoint() -> None:
    desk = Desk(world_size=2, nodes=2, slots=1)
    join(desk, "node-1", slots=1)
    desk.started()
    for process, rank in (("w0", 0), ("w1", 1)):
        desk.enters(process, rank, checkpoint_every=10)
    assert kinds(drain(desk, leaves=False)) == [RefuseDrain]
    assert kinds(drain(desk, leaves=True)) == [WindDown]
    pause(desk)
    assert desk.controller.stage is Stage.FINISHING
    for process in ("w0", "w1"):
        desk.exits(process, 0)
    assert "maintenance on node-1, which cannot be drained since other hosts have room for 0" in desk.end().error


def test_the_only_holder_of_a_part_stays() -> None:
    desk = Desk(world_size=2, nodes=2, spare_nodes=1, standbys=1, slots=1)
    join_spare(desk, "spare-2")
    join(desk, "node-1", slots=1)
    desk.started()
    for process, rank in (("w0", 0), ("w1", 1)):
        desk.enters(process, rank, shard=f"part {rank}")
    for standby in desk.controller.members.standbys():
        desk.warm(standby.name)
    assert "on this host alone" in one(drain(desk), RefuseDrain).why


def test_a_failure_on_the_way_is_an_ordinary_recovery_and_the_order_is_given_again() -> None:
    desk = two_nodes_and_a_spare(standbys=3)
    assert one(drain(desk), WindDown).generation == 1
    desk.exits("w0", step=STEP)
    desk.recover(STEP, commits=False)
    if not any(isinstance(command, WindDown) for command in desk.said):  # a standby took rank 0: another one comes
        fresh = [p for p in desk.controller.members.standbys() if not p.ready]
        for process in list(desk.controller.rank_processes().values()):
            desk.commits(process, STEP)
        fresh = fresh or [p for p in desk.controller.members.standbys() if not p.ready]
        desk.started()
        desk.warm(fresh[0].name)
    assert one(desk.said, WindDown).generation == 2


def test_a_host_that_is_lost_before_its_ranks_have_moved_is_lost_like_any_other() -> None:
    desk = two_nodes_and_a_spare()
    drain(desk)
    lose(desk, "node-1")
    assert {f.kind for f in desk.controller.report().failures} == {"host lost"}
    assert not desk.controller.job.hosts.draining


def test_a_released_host_that_did_not_hear_so_is_told_again_and_a_new_agent_is_welcome() -> None:
    desk = Desk(world_size=2, standbys=0)
    desk.train()
    joined = ev.AgentJoined(agent="spare-1", slots=2, life="first", spare=True)
    desk.tell(joined)
    one(drain(desk, "spare-1"), ReleaseHost)
    one(desk.tell(joined), ReleaseHost)
    assert "spare-1" not in desk.controller.job.hosts
    desk.tell(ev.AgentJoined(agent="spare-1", slots=2, life="second", spare=True))
    assert "spare-1" in desk.controller.job.hosts


def test_a_restarted_controller_orders_the_pause_again() -> None:
    desk = two_nodes_and_a_spare()
    order = one(drain(desk), WindDown)
    said = desk.tell(ev.ControllerRestarted())
    assert one(said, WindDown) == order


def test_a_job_that_is_ended_meanwhile_ends() -> None:
    desk = two_nodes_and_a_spare()
    drain(desk)
    desk.tell(ev.ShutdownRequested(reason="SIGTERM"))
    assert isinstance(desk.end(), EndJob)


def test_a_job_whose_last_step_this_was_is_done() -> None:
    desk = two_nodes_and_a_spare()
    drain(desk)
    desk.finish()
