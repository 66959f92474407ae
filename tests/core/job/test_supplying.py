"""Hosts that are ordered of the cluster: how many, what the cluster's answers change, and how orders end."""

import pytest

from relight.core.controller import Stage
from relight.core.protocol import events as ev
from relight.core.protocol.commands import CancelHost, Command, EndJob, Kill, Notice, OrderHost, ReleaseHost
from tests.core.membership.test_hosts import join, join_spare, lose
from tests.core.test_controller import Desk, one

TIMEOUT_SECONDS = 100.0
IDLE_SECONDS = 50.0


def ordered(said: "tuple[Command, ...] | list[Command] | list[object]") -> list[str]:
    return [command.order for command in said if isinstance(command, OrderHost)]


def cancelled(said: "tuple[Command, ...] | list[Command] | list[object]") -> list[tuple[str, str]]:
    return [(command.order, command.identifier) for command in said if isinstance(command, CancelHost)]


def a_job(supply_spares: int | None = None, standbys: int = 2) -> Desk:
    """Four ranks on two nodes and a spare, in training."""
    desk = Desk(
        world_size=4,
        standbys=standbys,
        nodes=2,
        slots=2,
        spare_nodes=1,
        supplier="command",
        supply_spares=supply_spares,
        supply_timeout_seconds=TIMEOUT_SECONDS,
        supply_idle_seconds=IDLE_SECONDS,
    )
    join_spare(desk, "spare-2")
    join(desk, "node-1")
    return desk.train()


def host_comes(desk: Desk, order: str, machine: str = "") -> tuple[Command, ...]:
    return desk.tell(ev.AgentJoined(agent=order, slots=2, spare=True, life=f"of {order}", machine=machine))


def refuse(desk: Desk, order: str, *, uncertain: bool = False) -> tuple[Command, ...]:
    return desk.tell(ev.HostRefused(order=order, reason="QOSMaxNodePerUserLimit", uncertain=uncertain))


def recover(desk: Desk) -> None:
    """After the loss of a host: what was lost with it follows from rank and step."""
    processes = list(desk.controller.rank_processes().values())
    for process in processes:
        desk.stands(process, derivable=True)
    for process in processes:
        desk.restores(process)
    for process in processes:
        desk.commits(process, 0)


def stage(desk: Desk) -> Stage:
    return desk.controller.stage


def test_without_a_supplier_nothing_is_ordered() -> None:
    desk = Desk(world_size=4, nodes=2, slots=2)
    join(desk, "node-1")
    desk.train()
    assert not ordered(lose(desk, "node-1"))


def test_a_lost_host_is_replaced_and_nothing_waits_for_it() -> None:
    desk = a_job()
    said = lose(desk, "node-1")
    assert ordered(said) == ["ordered-1"]
    assert stage(desk) is Stage.STOPPING
    assert not ordered(desk.tell(ev.HostOrdered(order="ordered-1", identifier="17")))
    recover(desk)
    assert stage(desk) is Stage.TRAINING
    host_comes(desk, "ordered-1")
    assert not desk.controller.job.orders.awaited
    assert ordered(lose(desk, "ordered-1")) == ["ordered-2"]


def test_before_the_first_step_nothing_is_ordered() -> None:
    desk = Desk(world_size=4, nodes=2, slots=2, supplier="command", supply_spares=2)
    join(desk, "node-1")
    assert not ordered(desk.said)
    desk.started()
    said = [desk.enters(process, rank) for rank, process in desk.controller.rank_processes().items()]
    assert ordered(said[-1]) == ["ordered-1", "ordered-2"]


def test_so_many_spares_are_kept() -> None:
    desk = a_job(supply_spares=2)
    assert ordered(desk.said) == []  # with Begin, before the standbys were warm
    assert [order.name for order in desk.controller.job.orders.awaited] == ["ordered-1"]
    host_comes(desk, "ordered-1")
    assert ordered(lose(desk, "spare-2")) == ["ordered-2"]


def test_no_spares_may_be_wanted_though_some_were_there() -> None:
    desk = a_job(supply_spares=0)
    assert not ordered(lose(desk, "node-1"))
    recover(desk)
    assert ordered(lose(desk, "spare-2")) == ["ordered-1"]


def test_a_drained_host_is_replaced() -> None:
    desk = a_job()
    assert ordered(desk.tell(ev.HostDraining(agent="node-1", reason="maintenance"))) == ["ordered-1"]


def test_after_a_refusal_another_order_follows_after_ever_longer_pauses() -> None:
    desk = a_job()
    lose(desk, "spare-2")
    said = refuse(desk, "ordered-1")
    assert "QOSMaxNodePerUserLimit" in one(said, Notice).why
    assert not ordered(said)
    assert not ordered(desk.wait(9.0))
    assert ordered(desk.wait(2.0)) == ["ordered-2"]
    refuse(desk, "ordered-2")
    assert not ordered(desk.wait(19.0))
    assert ordered(desk.wait(2.0)) == ["ordered-3"]
    desk.tell(ev.HostOrdered(order="ordered-3"))
    host_comes(desk, "ordered-3")
    lose(desk, "ordered-3")
    refuse(desk, "ordered-4")
    assert ordered(desk.wait(11.0)) == ["ordered-5"], "an order that was placed ends the row of refusals"
    assert sum("QOSMaxNodePerUserLimit" in text for text in desk.controller.report().notices) == 3


def test_refusals_for_a_month_end_nothing() -> None:
    desk = a_job()
    lose(desk, "spare-2")
    for _ in range(4000):
        for order in desk.controller.job.orders.awaited:
            refuse(desk, order.name)
        for command in desk.wait(600.0):
            if isinstance(command, CancelHost):
                desk.tell(ev.HostCancelled(order=command.order))
    assert stage(desk) is Stage.TRAINING
    assert len(desk.controller.job.orders.cancelling) + len(desk.controller.job.orders.open) <= 1


def test_a_command_that_hung_may_have_placed_the_order() -> None:
    desk = a_job()
    lose(desk, "spare-2")
    said = refuse(desk, "ordered-1", uncertain=True)
    assert cancelled(said) == [("ordered-1", "")]
    assert one(host_comes(desk, "ordered-1"), ReleaseHost).agent == "ordered-1"


def test_a_host_that_does_not_come_is_cancelled_and_asked_for_again() -> None:
    desk = a_job()
    lose(desk, "spare-2")
    desk.tell(ev.HostOrdered(order="ordered-1", identifier="17"))
    assert not cancelled(desk.wait(TIMEOUT_SECONDS - 1))
    assert cancelled(desk.wait(2.0)) == [("ordered-1", "17")]
    assert ordered(desk.wait(11.0)) == ["ordered-2"]


def test_why_a_host_has_not_come_is_told_once_and_decides_nothing() -> None:
    desk = a_job()
    lose(desk, "spare-2")
    desk.tell(ev.HostOrdered(order="ordered-1", identifier="17"))
    waits = ev.HostWaits(order="ordered-1", reason="PENDING (QOSMaxNodePerUserLimit)")
    assert "ordered-1 has not come yet: PENDING (QOSMaxNodePerUserLimit)" in one(desk.tell(waits), Notice).why
    assert not desk.tell(waits)
    assert "on order for 0 s (PENDING (QOSMaxNodePerUserLimit))" in desk.controller.supplying.describe(desk.now)
    said = desk.wait(TIMEOUT_SECONDS + 1)
    assert cancelled(said) == [("ordered-1", "17")]
    assert any("QOSMaxNodePerUserLimit" in command.why for command in said if isinstance(command, Notice))
    assert not desk.tell(waits), "its order is over"
    assert not desk.tell(ev.HostWaits(order="ordered-9", reason="")), "no such order was placed"


def test_a_host_that_comes_after_its_order_was_cancelled_goes_away_again() -> None:
    desk = a_job()
    lose(desk, "spare-2")
    desk.wait(TIMEOUT_SECONDS + 1)
    said = host_comes(desk, "ordered-1")
    assert [type(command) for command in said] == [ReleaseHost]
    assert "ordered-1" not in desk.controller.job.hosts


def test_a_lost_host_that_comes_back_makes_the_order_needless() -> None:
    desk = a_job()
    lose(desk, "spare-2")
    said = desk.tell(ev.AgentJoined(agent="spare-2", slots=2, spare=True))
    assert cancelled(said) == [("ordered-1", "")]
    said = desk.tell(ev.HostOrdered(order="ordered-1", identifier="17"))
    assert cancelled(said) == [("ordered-1", "17")], "the cluster's word for it was not known before"
    assert not desk.tell(ev.HostCancelled(order="ordered-1"))
    assert not desk.controller.job.orders.cancelling


def test_what_cannot_be_cancelled_is_said() -> None:
    desk = a_job()
    lose(desk, "spare-2")
    desk.tell(ev.AgentJoined(agent="spare-2", slots=2, spare=True))
    assert "no such job" in one(desk.tell(ev.HostCancelled(order="ordered-1", error="no such job")), Notice).why


def test_one_host_too_many_is_given_back_once_it_was_long_without_use() -> None:
    desk = a_job()
    lose(desk, "spare-2")
    host_comes(desk, "ordered-1")
    desk.tell(ev.AgentJoined(agent="spare-2", slots=2, spare=True))
    assert not [command for command in desk.wait(IDLE_SECONDS - 1) if isinstance(command, ReleaseHost)]
    said = desk.wait(2.0)
    for kill in [command for command in said if isinstance(command, Kill)]:
        said += desk.exits(kill.process)
    assert [command.agent for command in said if isinstance(command, ReleaseHost)] == ["ordered-1"]
    assert cancelled(said) == [("ordered-1", "")]
    assert desk.controller.next_deadline() is None
    assert not ordered(desk.tell(ev.HostCancelled(order="ordered-1")))


def test_a_host_with_ranks_is_not_given_back() -> None:
    desk = a_job(standbys=4)
    lose(desk, "spare-2")
    host_comes(desk, "ordered-1")
    desk.warm(next(s.name for s in desk.controller.members.standbys() if s.agent == "ordered-1"))
    desk.wait(1.0)
    lose(desk, "node-1")
    recover(desk)
    assert "ordered-1" in desk.controller.rank_hosts().values()
    for name in ("node-1", "spare-2"):
        desk.tell(ev.AgentJoined(agent=name, slots=2, spare=True))
    assert not [command for command in desk.wait(3 * IDLE_SECONDS) if isinstance(command, ReleaseHost)]


@pytest.mark.parametrize("is_here", [False, True])
def test_no_order_outlives_the_job(is_here: bool) -> None:
    desk = a_job()
    lose(desk, "spare-2")
    if is_here:
        host_comes(desk, "ordered-1")
    said = desk.tell(ev.ShutdownRequested(reason="SIGINT"))
    assert cancelled(said) == [("ordered-1", "")]
    assert isinstance(said[-1], EndJob)
    assert desk.controller.supplying.leftover(), "for the successor of a controller that dies before it can say so"


def test_machines_that_failed_twice_are_not_ordered_again() -> None:
    desk = a_job()
    lose(desk, "spare-2")
    excluded = []
    for number in (1, 2):
        host_comes(desk, f"ordered-{number}", machine="n7")
        lose(desk, f"ordered-{number}")
        excluded.append(set(one(desk.said, OrderHost).exclude))
    assert excluded == [{"node-0", "node-1"}, {"n7", "node-0", "node-1"}]
    said = host_comes(desk, "ordered-3", machine="n7")
    assert any("ordered-3 (n7) was lost twice" in command.why for command in said if isinstance(command, Notice))


def a_job_with_a_failed_machine() -> Desk:
    """`n7` was lost twice, and ordered-3 is on its way."""
    desk = a_job()
    lose(desk, "spare-2")
    for number in (1, 2):
        host_comes(desk, f"ordered-{number}", machine="n7")
        lose(desk, f"ordered-{number}")
    return desk


def released(said: "tuple[Command, ...] | list[Command]") -> list[str]:
    return [command.agent for command in said if isinstance(command, ReleaseHost)]


def pass_time(desk: Desk, seconds: float) -> list[Command]:
    """Let processes end that are told to; return all that is ordered."""
    said = list(desk.wait(seconds))
    for kill in [command for command in said if isinstance(command, Kill)]:
        said += desk.exits(kill.process)
    return said


def test_a_failed_machine_that_the_cluster_gives_again_is_not_counted() -> None:
    """It may help out, and another host is ordered: after ever longer pauses, since it may be the same again."""
    desk = a_job_with_a_failed_machine()
    said = host_comes(desk, "ordered-3", machine="n7")
    assert not ordered(said)
    assert not released(said)
    words = "no host of use came of ordered-3: n7 came, which was lost twice in this job; another one is placed in 10 s"
    assert any(words in command.why for command in said if isinstance(command, Notice))
    assert not ordered(desk.wait(9.0))
    assert ordered(desk.wait(2.0)) == ["ordered-4"]
    desk.tell(ev.HostOrdered(order="ordered-4", identifier="17"))
    host_comes(desk, "ordered-4", machine="n7")
    assert not ordered(desk.wait(19.0))
    assert ordered(desk.wait(2.0)) == ["ordered-5"]
    host_comes(desk, "ordered-5", machine="n8")
    assert not ordered(desk.wait(TIMEOUT_SECONDS))
    assert ordered(lose(desk, "ordered-5")) == ["ordered-6"], "a host of use ends the row"


def test_a_failed_machine_is_given_back_once_there_are_enough_others() -> None:
    desk = a_job_with_a_failed_machine()
    host_comes(desk, "ordered-3", machine="n7")
    desk.wait(11.0)
    host_comes(desk, "ordered-4", machine="n8")
    assert not released(pass_time(desk, IDLE_SECONDS - 1))
    assert released(pass_time(desk, 2.0)) == ["ordered-3"]
    assert "ordered-4" in desk.controller.job.hosts
    assert not ordered(pass_time(desk, 3 * IDLE_SECONDS))


def test_a_cluster_that_gives_the_same_failed_machine_for_ever_gets_all_but_one_back() -> None:
    desk = a_job_with_a_failed_machine()
    most = 0
    for _ in range(200):
        for order in desk.controller.job.orders.awaited:
            host_comes(desk, order.name, machine="n7")
        pass_time(desk, 60.0)
        most = max(most, len(desk.controller.job.hosts))
    assert most <= 6, "the pauses grow, and idle hosts go"
    assert len(desk.controller.job.hosts) <= 4
    assert stage(desk) is Stage.TRAINING


def test_a_successor_places_orders_again_whose_answer_is_not_known() -> None:
    desk = a_job()
    lose(desk, "spare-2")
    said = desk.tell(ev.ControllerRestarted())
    assert ordered(said) == ["ordered-1"]
    desk.tell(ev.HostOrdered(order="ordered-1", identifier="17"))
    assert not ordered(desk.tell(ev.ControllerRestarted()))
    desk.tell(ev.AgentJoined(agent="spare-2", slots=2, spare=True))
    assert cancelled(desk.tell(ev.ControllerRestarted())) == [("ordered-1", "17")]


def test_people_see_what_is_on_order_and_which_machines_are_avoided() -> None:
    desk = a_job()
    supplying = desk.controller.supplying
    assert supplying.describe(desk.now) == "3 here, 3 wanted"
    lose(desk, "spare-2")
    desk.tell(ev.HostOrdered(order="ordered-1", identifier="17"))
    assert supplying.describe(desk.now + 5.0).startswith("2 here, 3 wanted; ordered-1 (17) on order for 5 s")
    host_comes(desk, "ordered-1", machine="n7")
    lose(desk, "ordered-1")
    host_comes(desk, "ordered-2", machine="n7")
    lose(desk, "ordered-2")
    refuse(desk, "ordered-3")
    said = supplying.describe(desk.now)
    assert "no host of use came of the last order: QOSMaxNodePerUserLimit; the next one in 10 s" in said
    assert "lost twice, so used only where no other has room: n7" in said
