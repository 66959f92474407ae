"""Several hosts: where ranks and standbys are placed, and what the loss of a host means."""

import itertools

import pytest

from relight.core.controller import Controller, ControllerSettings, Stage
from relight.core.membership.hosts import Hosts
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Assign, Begin, EndJob, Kill, Notice, Release, Restore, Resume, Spawn, Stop
from relight.core.protocol.record import Record
from relight.core.replay import replay
from tests.core.test_controller import Desk


def join(desk: Desk, name: str, slots: int = 2) -> list[Spawn]:
    return [c for c in desk.tell(ev.AgentJoined(agent=name, slots=slots)) if isinstance(c, Spawn)]


def lose(desk: Desk, name: str) -> list[object]:
    return list(desk.tell(ev.AgentLost(agent=name, evidence="no connection for 15 s")))


def two_hosts(standbys: int = 2) -> Desk:
    """Four ranks on two hosts, in training, the standbys warm."""
    desk = Desk(world_size=4, standbys=standbys, nodes=2, slots=2)
    join(desk, "node-1")
    return desk.train()


def test_ranks_wait_for_all_hosts_and_neighbours_share_one() -> None:
    desk = Desk(world_size=4, standbys=2, nodes=2, slots=2)
    assert not any(isinstance(command, Spawn) for command in desk.said)
    spawned = join(desk, "node-1")
    ranks = [(spawn.rank, spawn.agent, spawn.slot) for spawn in spawned if spawn.rank is not None]
    assert ranks == [(0, "node-0", 0), (1, "node-0", 1), (2, "node-1", 0), (3, "node-1", 1)]
    standbys = [(spawn.agent, spawn.slot) for spawn in spawned if spawn.rank is None]
    assert standbys == [("node-0", 2), ("node-1", 2)]


def test_hosts_are_ordered_by_their_numbers() -> None:
    hosts = Hosts()
    for name in ("node-10", "node-2", "spare"):
        hosts.add(name, 1)
    assert hosts.in_order() == ("node-2", "node-10", "spare")


def test_a_lost_host_is_one_recovery() -> None:
    desk = two_hosts()
    said = lose(desk, "node-1")
    assert [type(command) for command in said if not isinstance(command, Notice)][:2] == [Stop, Assign]
    (spawn,) = [command for command in said if isinstance(command, Spawn)]  # one standby is left, for two ranks
    assert spawn.agent == "node-0"
    assert desk.controller.generation == 2
    assert [(f.rank, f.kind) for f in desk.controller.report().failures] == [(2, "host lost"), (3, "host lost")]


def test_what_follows_from_rank_and_step_is_not_lost_with_a_host() -> None:
    desk = two_hosts(standbys=4)
    lose(desk, "node-1")
    for name in list(desk.controller.rank_processes().values()):
        desk.stands(name, at=5, derivable=True)
    (restore,) = [command for command in desk.said if isinstance(command, Restore)]
    assert restore.derived == (2, 3)
    assert restore.targets == (2, 3)


def test_what_only_the_lost_host_had_ends_the_job() -> None:
    desk = two_hosts(standbys=4)
    lose(desk, "node-1")
    for name in list(desk.controller.rank_processes().values()):
        desk.stands(name, at=5)
    assert "the private state of ranks 2, 3 for version 5" in desk.end().error


def test_a_rank_that_died_before_its_host_was_lost_has_no_private_state_either() -> None:
    """Its page was read when it died, and went with the host: it is derived, not waited for."""
    desk = two_hosts(standbys=4)
    desk.exits("w3", step=5)
    lose(desk, "node-1")
    for name in list(desk.controller.rank_processes().values()):
        desk.stands(name, at=5, derivable=True)
    (restore,) = [command for command in desk.said if isinstance(command, Restore)]
    assert restore.derived == (2, 3)


def test_a_rank_that_died_before_its_agent_has_no_private_state_either() -> None:
    desk = two_hosts(standbys=4)
    desk.exits("w3", step=5)
    desk.tell(ev.AgentJoined(agent="node-1", slots=2))  # another one, after a restart
    for name in list(desk.controller.rank_processes().values()):
        desk.stands(name, at=5, derivable=True)
    (restore,) = [command for command in desk.said if isinstance(command, Restore)]
    assert restore.derived == (3,)


def test_a_finished_job_does_not_wait_for_a_lost_host() -> None:
    desk = Desk(world_size=2, standbys=1)
    desk.train()
    join(desk, "spare-1")
    desk.exits("w2")  # the standby: another one is started, on the host with fewer processes
    (standby,) = desk.controller.members.standbys()
    assert standby.agent == "spare-1"
    desk.finish()
    for name in ("w0", "w1"):
        desk.exits(name, 0)
    assert desk.controller.stage is Stage.FINISHING
    lose(desk, "spare-1")
    assert desk.end().error == ""


def test_a_lost_host_with_standbys_only_costs_standbys() -> None:
    desk = Desk(world_size=2, standbys=1)
    desk.train()
    (spawn,) = join(desk, "spare-1")  # the standby moves there, from the host that it shares with the ranks
    assert (spawn.agent, spawn.process) == ("spare-1", "w3")
    assert [command.process for command in desk.warm("w3") if isinstance(command, Kill)] == ["w2"]
    assert not [command for command in desk.exits("w2", step=0) if isinstance(command, Spawn)]
    said = lose(desk, "spare-1")
    assert [c.agent for c in said if isinstance(c, Spawn)] == ["node-0"]
    assert desk.controller.stage is Stage.TRAINING
    assert desk.controller.generation == 1


def test_a_late_host_is_given_what_is_missing() -> None:
    desk = two_hosts(standbys=1)
    lose(desk, "node-1")
    assert desk.controller.stage is Stage.STOPPING
    join(desk, "spare-2")
    agents = {p.agent for p in desk.controller.members.processes.values() if p.alive}
    assert agents <= {"node-0", "spare-2"}


def test_a_standby_takes_a_rank_of_its_own_host_first() -> None:
    desk = two_hosts()
    by_agent = {p.agent: p.name for p in desk.controller.members.standbys()}
    desk.exits("w3", step=0)
    (assign,) = [command for command in desk.said if isinstance(command, Assign)]
    assert (assign.rank, assign.process) == (3, by_agent["node-1"])


def test_all_hosts_lost() -> None:
    desk = two_hosts()
    lose(desk, "node-1")
    lose(desk, "node-0")
    assert "every replica of the state" in desk.end().error


def test_a_host_lost_before_the_first_step_ends_the_job() -> None:
    desk = Desk(world_size=4, nodes=2)
    join(desk, "node-1")
    lose(desk, "node-1")
    assert "node-1 was lost before the first step" in desk.end().error


def test_a_host_that_comes_back_is_a_new_one() -> None:
    desk = two_hosts()
    lose(desk, "node-1")
    said = desk.tell(ev.AgentJoined(agent="node-1", slots=2))
    assert any(isinstance(command, Notice) and "node-1 joined; 2 hosts" in command.why for command in said)
    # What it still runs is nothing to the job: a word from there changes nothing.
    assert desk.exits("w2", step=0) == ()


# --- the controller's own death -------------------------------------------------------------------------------------
def restart(controller: Controller, records: list[Record], now: float) -> tuple[Controller, list[object]]:
    successor = replay(controller.settings, records)
    assert successor.generation == controller.generation
    assert successor.stage is controller.stage
    return successor, list(successor.handle(ev.ControllerRestarted(), now))


def test_a_successor_repeats_what_holds() -> None:
    records = [Record(0.0, ev.AgentJoined(agent="node-0", slots=1))]
    controller = replay(ControllerSettings(world_size=1, standbys=1), records)
    successor, said = restart(controller, records, 1.0)
    assert [command.process for command in said if isinstance(command, Spawn)] == ["w0", "w1"]
    records.append(Record(1.0, ev.ControllerRestarted()))
    records += [Record(2.0, ev.ProcessStarted(process="w0", pid=1))]
    entered = ev.TrainingEntered(process="w0", rank=0, version=0, layout_digest="l", state_digest="s", until=9)
    records.append(Record(3.0, entered))
    controller = replay(successor.settings, records)
    assert controller.stage is Stage.TRAINING
    successor, said = restart(controller, records, 4.0)
    assert [type(command) for command in said] == [Spawn, Begin, Resume, Notice]  # of w1 nothing was heard
    done = ev.TrainingDone(
        process="w0", rank=0, generation=1, version=9, lineage="x", state_digest="y", cut_collectives=0
    )
    records += [Record(4.0, ev.ControllerRestarted()), Record(5.0, done)]
    controller = replay(successor.settings, records)
    successor, said = restart(controller, records, 6.0)
    assert tuple(type(command) for command in said) == (Kill, Begin, Release)
    assert successor.report().controller_restarts == 3
    records.append(Record(6.0, ev.ShutdownRequested(reason="enough")))
    controller = replay(successor.settings, records)
    assert isinstance(controller.ended, EndJob)
    assert controller.ended.error == "stopped: enough"
    assert controller.handle(ev.ControllerRestarted(), 7.0) == ()


# --- spares ---------------------------------------------------------------------------------------------------------
def join_spare(desk: Desk, name: str, slots: int = 2) -> list[Spawn]:
    return [c for c in desk.tell(ev.AgentJoined(agent=name, slots=slots, spare=True)) if isinstance(c, Spawn)]


@pytest.mark.parametrize("order", sorted(set(itertools.permutations(("node-1", "node-2", "spare-3", "spare-4")))))
def test_ranks_start_on_the_nodes_in_whatever_order_hosts_join(order: tuple[str, ...]) -> None:
    desk = Desk(world_size=6, standbys=4, nodes=3, spare_nodes=2, slots=2)
    spawned = [c for name in order for c in (join_spare if name.startswith("spare") else join)(desk, name)]
    ranks = [(spawn.rank, spawn.agent) for spawn in spawned if spawn.rank is not None]
    assert ranks == [(0, "node-0"), (1, "node-0"), (2, "node-1"), (3, "node-1"), (4, "node-2"), (5, "node-2")]
    standbys = [(spawn.agent, spawn.slot) for spawn in spawned if spawn.rank is None]
    assert sorted(standbys) == [("spare-3", 0), ("spare-3", 1), ("spare-4", 0), ("spare-4", 1)]


def test_a_spare_that_never_joins_is_not_waited_for() -> None:
    desk = Desk(world_size=2, standbys=1, nodes=1, spare_nodes=1)
    assert [spawn.rank for spawn in desk.said if isinstance(spawn, Spawn)] == [0, 1]
    desk.started()
    desk.enters("w0", 0)
    (spawn,) = [command for command in desk.enters("w1", 1) if isinstance(command, Spawn)]
    assert (spawn.rank, spawn.agent) == (None, "node-0")
    assert desk.controller.stage is Stage.TRAINING


def test_a_spare_that_is_lost_before_the_first_step_costs_its_standbys() -> None:
    desk = Desk(world_size=2, standbys=1, nodes=1, spare_nodes=1)
    assert [spawn.agent for spawn in join_spare(desk, "spare-1")] == ["spare-1"]
    lose(desk, "spare-1")
    desk.train()
    assert [standby.agent for standby in desk.controller.members.standbys()] == ["node-0"]


def test_a_node_that_does_not_join_is_not_replaced_by_a_spare() -> None:
    desk = Desk(world_size=4, nodes=2, spare_nodes=1, slots=2)
    assert join_spare(desk, "spare-2") == []
    desk.expire()
    assert "1 of 2 nodes joined within 300 s (node-0)" in desk.end().error


def test_a_lost_node_is_replaced_by_the_spare() -> None:
    desk = Desk(world_size=4, standbys=2, nodes=2, spare_nodes=1, slots=2)
    join_spare(desk, "spare-2")
    join(desk, "node-1")
    desk.train()
    said = lose(desk, "node-1")
    processes = desk.controller.members.processes
    assigned = [(c.rank, processes[c.process].agent) for c in said if isinstance(c, Assign)]
    assert assigned == [(2, "spare-2"), (3, "spare-2")]
    assert not [command for command in said if isinstance(command, Spawn)]


def test_a_standby_that_shares_a_slot_moves_to_a_host_that_joins() -> None:
    """It stays until the one in its stead is warm: a rank that is lost meanwhile gets it at once."""
    desk = two_hosts(standbys=2)
    assert {p.agent for p in desk.controller.members.standbys()} == {"node-0", "node-1"}
    assert [spawn.agent for spawn in join_spare(desk, "spare-2", slots=1)] == ["spare-2"]  # it has room for one
    assert not join_spare(desk, "spare-3", slots=0), "a second look moves nothing"
    desk.exits("w3", step=0)
    assert [command.process for command in desk.said if isinstance(command, Assign)] == ["w5"]
    desk.recover(0)
    desk.warm("w6")
    assert len(desk.controller.members.standbys()) == 2


# --- hosts that are lost again and again ----------------------------------------------------------------------------
def lose_and_return(desk: Desk, times: int) -> None:
    """A spare, with no process, or with one, is lost and comes back so often."""
    for _ in range(times):
        lose(desk, "spare-1")
        join_spare(desk, "spare-1")


@pytest.mark.parametrize(("times", "used"), [(0, "spare-1"), (1, "spare-1"), (2, "spare-2"), (3, "spare-2")])
def test_a_host_that_was_lost_twice_is_avoided(times: int, used: str) -> None:
    desk = Desk(world_size=2, standbys=1)
    desk.train()
    join_spare(desk, "spare-1", slots=9)
    lose_and_return(desk, times)
    join_spare(desk, "spare-2", slots=2)
    (standby,) = [p for p in desk.controller.members.standbys() if p.instead_of]  # it moves from the first host
    assert standby.agent == used
    notices = [text for text in desk.controller.report().notices if "lost twice" in text]
    assert len(notices) == int(times >= 2)


def test_a_host_that_was_lost_twice_is_used_if_no_other_has_room() -> None:
    desk = Desk(world_size=2, standbys=1)
    desk.train()
    join_spare(desk, "spare-1")
    lose_and_return(desk, 2)
    desk.exits("w2", step=0)
    (spawn,) = [command for command in desk.said if isinstance(command, Spawn)]
    assert spawn.agent == "spare-1"
