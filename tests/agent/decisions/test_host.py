"""Decisions of an agent about the processes of its host, event by event."""

from typing import Any

import msgspec
import pytest

from relight.agent.decisions.host import (
    Access,
    Action,
    Addressed,
    AskToLeave,
    Deliver,
    Dying,
    EndHold,
    Ending,
    Exited,
    Hold,
    HoldExpired,
    Host,
    NotStarted,
    Ordered,
    Read,
    Release,
    Report,
    ReportTogether,
    Said,
    Start,
    Started,
    TakeRank,
    Terminate,
    Warn,
)
from relight.core.protocol.commands import Assign, Kill, Spawn
from relight.core.protocol.events import ProcessDying, ProcessExited, ProcessStarted, StepResumed, TrainingDone
from relight.core.protocol.position import Position
from relight.wire.connection.framing import encode_payload
from relight.wire.messages import ForgetProcess, FromWorker, PrivateState, TakePrivate


def spawn(process: str = "a", rank: int | None = 0) -> Spawn:
    return Spawn(process=process, agent="node-0", rank=rank, slot=0, why="")


def said(process: str, generation: int = 2) -> Said:
    message = StepResumed(
        process=process, rank=0, generation=generation, step=3, resumed_ns=1, forward_ns=2, commit_ns=3
    )
    return Said(process, message, FromWorker(process=process, payload=encode_payload(message)))


def done(process: str) -> Said:
    message = TrainingDone(
        process=process, rank=0, generation=2, version=3, lineage="", state_digest="", cut_collectives=0
    )
    return Said(process, message, FromWorker(process=process, payload=encode_payload(message)))


def exited(process: str) -> ProcessExited:
    return ProcessExited(process=process, exit_status=0, evidence="", position=Position(), noticed_ns=1)


def private(source: str) -> PrivateState:
    return PrivateState(source=source, target="b", version=1, payload=b"", batch=b"")


def reported(actions: list[Action]) -> list[msgspec.Struct]:
    return [action.message for action in actions if isinstance(action, Report)]


def processes(actions: list[Action]) -> list[str]:
    """Name the workers whose reports go together."""
    (together,) = [action for action in actions if isinstance(action, ReportTogether)]
    return [getattr(message, "process", "") for message in together.messages]


@pytest.fixture
def host() -> Host:
    """Three ranks and a standby."""
    host = Host()
    for name, rank in (("a", 0), ("b", 1), ("c", 2), ("d", None)):
        host.handle(Ordered(spawn(name, rank)))
        host.handle(Started(name, 100, rank))
    return host


def test_an_order_to_start_counts_once() -> None:
    host = Host()
    assert host.handle(Ordered(spawn())) == [Start(spawn())]
    assert host.handle(Ordered(spawn())) == []


@pytest.mark.parametrize("host", [Host(["a"])])
def test_a_process_of_a_predecessor_is_not_started_again(host: Host) -> None:
    assert host.handle(Ordered(spawn())) == []


def test_a_process_that_could_not_be_started_is_reported_as_gone() -> None:
    host = Host()
    host.handle(Ordered(spawn()))
    (end,) = reported(host.handle(NotStarted("a", "no memory", 7)))
    assert isinstance(end, ProcessExited)
    assert (end.evidence, end.exit_status, end.noticed_ns) == ("could not be started: no memory", None, 7)
    assert host.live == ()


def test_a_start_is_reported(host: Host) -> None:
    assert host.handle(Started("e", 5, 0)) == [Report(ProcessStarted(process="e", pid=5))]
    assert host.live == ("a", "b", "c", "d", "e")


def test_a_process_that_was_counted_as_lost_is_killed_when_it_comes_back(host: Host) -> None:
    start, kill = host.handle(Started("e", 5, 0, lost=True))
    assert start == Report(ProcessStarted(process="e", pid=5))
    assert isinstance(kill, Terminate)
    assert kill.process == "e"


def test_kill_reaches_live_processes_alone(host: Host) -> None:
    assert host.handle(Ordered(Kill(process="a", why="hang"))) == [Terminate("a", "hang")]
    assert host.handle(Ordered(Kill(process="b", why="slow", after_step=True))) == [AskToLeave("b")]
    assert host.handle(Ordered(Kill(process="x", why="hang"))) == []


def test_messages_are_delivered_to_live_processes(host: Host) -> None:
    payload = encode_payload(ForgetProcess(process="a"))
    assert host.handle(Addressed(("a", "x"), payload)) == [Deliver(("a",), payload)]


def test_a_standby_that_takes_a_rank_is_renamed_before_it_is_told(host: Host) -> None:
    assign = Assign(process="d", rank=1, generation=2, why="")
    payload = encode_payload(assign)
    order = Addressed(("d",), payload, assign)
    assert host.handle(order) == [TakeRank("d", 1), Deliver(("d",), payload)]
    assert host.handle(order) == [Deliver(("d",), payload)]


def test_only_the_dead_are_forgotten(host: Host) -> None:
    (warning,) = host.handle(Ordered(ForgetProcess(process="a")))
    assert isinstance(warning, Warn)
    host.handle(Exited(exited("a")))
    assert host.handle(Ordered(ForgetProcess(process="a"))) == [Release("a")]


def test_pages_are_accessed_as_ordered(host: Host) -> None:
    order = TakePrivate(source="a", target="b", version=1)
    assert host.handle(Ordered(order)) == [Access(order)]
    assert host.handle(Read(private("a"))) == [Report(private("a"))]


def test_a_report_of_every_rank_is_sent_once_for_the_host(host: Host) -> None:
    assert host.handle(said("a")) == [Hold()]
    assert host.handle(said("b")) == []
    actions = host.handle(said("c"))  # the standby is not waited for
    assert actions[0] == EndHold()
    assert processes(actions) == ["a", "b", "c"]


def test_a_late_rank_does_not_hold_the_others_up(host: Host) -> None:
    host.handle(said("a"))
    host.handle(said("b"))
    assert processes(host.handle(HoldExpired())) == ["a", "b"]
    (late,) = reported(host.handle(said("c")))
    assert isinstance(late, FromWorker)


@pytest.mark.parametrize("end", [Dying("c", Position(), 1), Ordered(Kill(process="c", why="hang"))])
def test_a_process_that_ends_is_not_waited_for(host: Host, end: Any) -> None:
    host.handle(end)
    host.handle(said("a"))
    assert processes(host.handle(said("b"))) == ["a", "b"]


@pytest.mark.parametrize("next_event", [Exited(exited("b")), Dying("b", Position(), 1), Read(private("b")), done("b")])
def test_no_report_overtakes_another(host: Host, next_event: Any) -> None:
    host.handle(said("a"))
    actions = host.handle(next_event)
    assert actions[0] == EndHold()
    first = reported(actions)[0]
    assert isinstance(first, FromWorker)
    assert first.process == "a"


def test_reports_of_two_generations_are_not_mixed(host: Host) -> None:
    host.handle(said("a"))
    actions = host.handle(said("b", generation=3))
    assert [type(action) for action in actions] == [EndHold, Report, Hold]


def test_a_death_is_reported_once_as_dying_and_not_after_the_end(host: Host) -> None:
    (dying,) = reported(host.handle(Dying("a", Position(), 3)))
    assert dying == ProcessDying(process="a", position=Position(), noticed_ns=3)
    assert reported(host.handle(Exited(exited("a")))) == [exited("a")]
    assert host.handle(Dying("a", Position(), 4)) == []
    assert host.live == ("b", "c", "d")


def test_at_the_end_all_are_killed_and_what_was_gathered_is_sent(host: Host) -> None:
    host.handle(done("a"))
    actions = host.handle(Ending("over"))
    assert actions[:4] == [Terminate(name, "over") for name in "abcd"]
    assert [type(action) for action in actions[4:]] == [EndHold, Report]


def test_a_copy_shares_nothing_that_changes(host: Host) -> None:
    host.handle(said("a"))
    twin = host.copy()
    host.handle(Exited(exited("b")))
    assert (host.live, twin.live) == (("a", "c", "d"), ("a", "b", "c", "d"))
    assert twin.handle(said("b")) == []
    assert processes(twin.handle(said("c"))) == ["a", "b", "c"]
