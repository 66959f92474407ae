"""Hosts whose hardware reports a fault: they are left as soon as others have room, and not used again."""

from relight.core.controller import ControllerSettings, Stage
from relight.core.membership.hosts import MAX_RETURNS
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Assign, Command, Notice, OrderHost, ReleaseHost, Spawn, WindDown
from relight.core.protocol.record import Record
from relight.core.replay import replay
from tests.core.job.test_draining import leave, pause, recover, two_nodes_and_a_spare
from tests.core.job.test_supplying import a_job, host_comes, ordered
from tests.core.membership.test_hosts import join_spare, lose, two_hosts
from tests.core.test_controller import Desk, kinds, one

XID = "GPU 1: XID 79, the device has fallen off the bus"


def report(desk: Desk, agent: str = "node-1", reason: str = XID) -> tuple[Command, ...]:
    return desk.tell(ev.HostFaulty(agent=agent, reason=reason))


def placed(said: "tuple[Command, ...] | list[object]") -> set[str]:
    return {command.agent for command in said if isinstance(command, Spawn)}


def test_the_host_is_left_like_one_that_is_drained() -> None:
    desk = two_nodes_and_a_spare()
    said = report(desk)
    assert kinds(said) == [WindDown]
    assert XID in one(said, WindDown).why
    pause(desk)
    released = one(recover(desk), ReleaseHost)
    assert (released.agent, released.faulty) == ("node-1", True)
    assert {f.kind for f in desk.controller.report().failures} == {"drained"}
    assert any("node-1 reported a fault" in text for text in desk.controller.report().notices)


def test_a_host_that_is_drained_for_another_reason_is_not_called_faulty() -> None:
    desk = two_nodes_and_a_spare()
    join_spare(desk, "spare-3")
    assert not one(desk.tell(ev.HostDraining(agent="spare-3", reason="maintenance")), ReleaseHost).faulty


def test_without_room_elsewhere_it_stays_until_there_is_some() -> None:
    desk = two_hosts()
    said = report(desk)
    assert not kinds(said), "its ranks train on"
    assert not [c for c in join_spare(desk, "spare-2", slots=0) if isinstance(c, WindDown)]
    join_spare(desk, "spare-3")
    assert "node-1" in desk.controller.job.hosts.draining
    assert not placed(desk.said) & {"node-1"}


def test_the_first_fault_is_told_and_later_ones_are_not() -> None:
    desk = two_hosts()
    assert XID in one(report(desk), Notice).why
    assert report(desk, reason="GPU 1: XID 48") == ()
    assert report(desk, agent="node-9") == ()


def test_a_rank_that_dies_there_is_replaced_on_another_host() -> None:
    """Though a standby on its own host could take its private state from there at less cost."""
    desk = two_hosts(standbys=2)
    report(desk)
    (near, far) = sorted(desk.controller.members.standbys(), key=lambda p: p.agent != "node-1")
    assert (near.agent, far.agent) == ("node-1", "node-0")
    desk.exits("w3", step=0)
    assert [c.process for c in desk.said if isinstance(c, Assign)] == [far.name]


def with_both_standbys_on_a_host_that_cannot_be_left() -> Desk:
    """Four ranks on two nodes; a spare that joins later has one slot, and two ranks would have to move."""
    desk = Desk(world_size=4, standbys=2, nodes=2, slots=2)
    desk.tell(ev.AgentJoined(agent="node-1", slots=4))
    desk.train()
    assert {p.agent for p in desk.controller.members.standbys()} == {"node-1"}
    report(desk)
    return desk


def test_a_standby_moves_away_where_there_is_room() -> None:
    desk = with_both_standbys_on_a_host_that_cannot_be_left()
    (spawn,) = join_spare(desk, "spare-2", slots=1)
    assert spawn.agent == "spare-2"
    assert XID in spawn.why
    assert not desk.controller.job.hosts.draining


def test_a_lost_rank_of_another_host_does_not_move_there() -> None:
    desk = with_both_standbys_on_a_host_that_cannot_be_left()
    (spawn,) = join_spare(desk, "spare-2", slots=1)
    desk.warm(spawn.process)
    desk.exits("w0", step=0)
    assert [c.process for c in desk.said if isinstance(c, Assign)] == [spawn.process]


def test_a_host_without_ranks_is_given_back_at_once() -> None:
    desk = two_nodes_and_a_spare()
    report(desk, "spare-2")
    leave(desk)  # its standbys, which were killed
    assert one(desk.said, ReleaseHost).faulty
    assert placed(desk.said) <= {"node-0", "node-1"}


def test_another_host_is_ordered_and_this_machine_is_excluded() -> None:
    desk = a_job()
    desk.tell(ev.AgentJoined(agent="spare-2", slots=2, spare=True, life="x", machine="n7"))
    said = report(desk, "spare-2")
    order = one(said, OrderHost)
    assert order.exclude == ("n7", "node-0", "node-1")
    leave(desk)
    assert one(desk.said, ReleaseHost).agent == "spare-2"
    assert ordered(host_comes(desk, "ordered-1", machine="n8")) == []
    lose(desk, "ordered-1")
    assert one(desk.said, OrderHost).exclude == ("n7", "node-0", "node-1")


def test_another_host_is_ordered_also_while_the_first_cannot_be_left() -> None:
    desk = a_job(standbys=0)
    lose(desk, "spare-2")
    host_comes(desk, "ordered-1", machine="n8")
    report(desk, "node-0")
    report(desk, "node-1")
    assert set(desk.controller.job.hosts.draining) == {"node-0"}  # one host has no room for the ranks of two
    assert len(desk.controller.job.orders.open) == 3


def test_a_machine_that_comes_back_is_used_only_where_no_other_has_room() -> None:
    desk = two_nodes_and_a_spare()
    desk.tell(ev.AgentJoined(agent="node-1", slots=2, life="1", machine="n7"))
    report(desk)
    pause(desk)
    recover(desk)
    said = desk.tell(ev.AgentJoined(agent="node-1", slots=2, life="2", machine="n7"))
    assert "node-1 (n7) reported a fault" in one(said, Notice).why
    assert not [c for c in said if isinstance(c, ReleaseHost)], "it would come back again and again"
    assert "with a fault, so used only where no other has room: n7 (GPU 1" in desk.controller.supplying.describe(0.0)
    join_spare(desk, "spare-3", slots=9)
    for process in list(desk.controller.members.standbys()):
        desk.exits(process.name, step=0)
        assert "node-1" not in placed(desk.said)


def left_in_favour_of_the_spare(**settings: float | str) -> Desk:
    """node-1 on machine n7 has reported a fault, and its ranks have moved; its cluster makes such hosts again."""
    desk = Desk(world_size=4, standbys=2, nodes=2, spare_nodes=1, slots=2, fault_status=75, **settings)
    join_spare(desk, "spare-2", slots=2)
    desk.tell(ev.AgentJoined(agent="node-1", slots=2, life="0", machine="n7"))
    desk.train()
    report(desk)
    pause(desk)
    recover(desk)
    return desk


def come(desk: Desk, life: int, machine: str = "n7", agent: str = "node-1") -> tuple[Command, ...]:
    return desk.tell(ev.AgentJoined(agent=agent, slots=2, life=str(life), machine=machine))


def test_a_machine_that_comes_again_is_given_back_a_few_times_if_another_may_come() -> None:
    desk = left_in_favour_of_the_spare()
    for life in range(1, MAX_RETURNS + 1):
        said = come(desk, life)
        assert one(said, ReleaseHost).faulty
        assert "node-1 came on n7, which reported a fault" in one(said, Notice).why
        assert not placed(said)
        assert "node-1" not in desk.controller.job.hosts
    said = come(desk, MAX_RETURNS + 1)
    assert "used only where no other host has room" in one(said, Notice).why
    assert not [c for c in said if isinstance(c, ReleaseHost)], "the cluster has no other one"
    assert "node-1" in desk.controller.job.hosts


def test_another_machine_is_welcome_at_once() -> None:
    desk = left_in_favour_of_the_spare()
    come(desk, 1)
    said = come(desk, 2, "n8")
    assert not [c for c in said if isinstance(c, ReleaseHost)]
    assert one(said, Notice).why.startswith("node-1 joined")


def test_a_host_that_was_given_back_hears_so_again_with_the_reason() -> None:
    desk = left_in_favour_of_the_spare()
    come(desk, 1)
    assert one(come(desk, 1), ReleaseHost).faulty  # else its node would count as done
    assert one(come(desk, 0), ReleaseHost).faulty
    assert not any("no more" in text for text in desk.controller.report().notices)


def test_a_machine_that_was_lost_twice_is_given_back_too() -> None:
    desk = left_in_favour_of_the_spare()
    for life in range(2):
        come(desk, life + 1, "n8")
        lose(desk, "node-1")
    assert "was lost twice" in one(come(desk, 3, "n8"), ReleaseHost).why


def test_a_host_that_cannot_leave_or_was_ordered_is_kept() -> None:
    """The cluster makes neither of them again: the controller is on one, and the supplier cancels the other."""
    desk = left_in_favour_of_the_spare(staying_host="node-1")
    assert not [c for c in come(desk, 1) if isinstance(c, ReleaseHost)]
    desk = left_in_favour_of_the_spare(supplier="a command")
    (order,) = desk.controller.job.orders.open
    assert not [c for c in come(desk, 1, agent=order) if isinstance(c, ReleaseHost)]


def test_while_a_rank_needs_a_place_a_machine_that_comes_again_is_kept() -> None:
    desk = left_in_favour_of_the_spare()
    desk.exits(desk.controller.rank_processes()[0], step=1)
    assert desk.controller.stage is not Stage.TRAINING
    assert not [c for c in come(desk, 1) if isinstance(c, ReleaseHost)]


def test_a_restarted_controller_knows_it() -> None:
    events: list[ev.Event] = [ev.AgentJoined(agent="node-0", slots=1), ev.HostFaulty(agent="node-0", reason=XID)]
    records = [Record(event=event, now=float(number)) for number, event in enumerate(events)]
    successor = replay(ControllerSettings(world_size=1, nodes=2), records)
    assert successor.job.hosts.faulty == {"node-0": XID}
