"""The processes of one host, as their agent sees them: `handle(event) -> actions`.

Events are orders of the controller, and what the host's processes do. Actions are what the agent has to do, in this
order. Reports that every rank of the host sends once are gathered into one message (core/protocol/gathering.py). Two
drivers carry actions out: `agent/workers.py` with real processes, and `sim/world/agent.py` in virtual time. Messages
between the controller and workers are passed on unread, in the form that the driver gives them.
"""

from collections.abc import Iterable
from typing import assert_never

import msgspec

from relight.core.protocol.commands import Assign, Kill, Spawn
from relight.core.protocol.events import ProcessDying, ProcessExited, ProcessStarted
from relight.core.protocol.gathering import Gathering, subject
from relight.core.protocol.position import Position
from relight.wire import messages as msg

Order = Spawn | Kill | msg.CopyPrivate | msg.TakePrivate | msg.PrivateState | msg.ForgetProcess | msg.TakeStack
ORDERS = (Spawn, Kill, msg.CopyPrivate, msg.TakePrivate, msg.PrivateState, msg.ForgetProcess, msg.TakeStack)
Relayed = msgspec.Struct | msgspec.Raw


# --- events -----------------------------------------------------------------------------------------------------
class Ordered(msgspec.Struct, frozen=True):
    """The controller has sent an order."""

    order: Order


class Addressed(msgspec.Struct, frozen=True):
    """The controller has sent a message to workers. `assign`: it is this, which concerns the agent as well."""

    processes: tuple[str, ...]
    message: Relayed
    assign: Assign | None = None


class Started(msgspec.Struct, frozen=True):
    """A process runs: the agent has started it, or has adopted it from a predecessor."""

    process: str
    pid: int
    rank: int | None  # None: a standby
    lost: bool = False  # the controller counts it as dead already


class NotStarted(msgspec.Struct, frozen=True):
    """A process could not be started."""

    process: str
    evidence: str
    noticed_ns: int


class Dying(msgspec.Struct, frozen=True):
    """The main thread of a process has ended; its memory is not freed yet."""

    process: str
    position: Position
    noticed_ns: int


class Exited(msgspec.Struct, frozen=True):
    """A process is gone."""

    report: ProcessExited


class Said(msgspec.Struct, frozen=True):
    """A worker has sent a message to the controller, which goes there as `relayed`."""

    process: str
    message: msgspec.Struct
    relayed: msgspec.Struct


class Read(msgspec.Struct, frozen=True):
    """The private state that a TakePrivate order asked for has been read."""

    state: msg.PrivateState


class HoldExpired(msgspec.Struct, frozen=True):
    """The time of a Hold action has passed."""


class Ending(msgspec.Struct, frozen=True):
    """The agent ends."""

    why: str


Event = Ordered | Addressed | Started | NotStarted | Dying | Exited | Said | Read | HoldExpired | Ending


# --- actions ----------------------------------------------------------------------------------------------------
class Start(msgspec.Struct, frozen=True):
    """Start a process; answered by Started or NotStarted."""

    order: Spawn


class Terminate(msgspec.Struct, frozen=True):
    """Kill a process; `why` is evidence of its end."""

    process: str
    why: str


class AskToLeave(msgspec.Struct, frozen=True):
    """Have a worker end by itself, between two steps."""

    process: str


class Deliver(msgspec.Struct, frozen=True):
    """Send a message to live workers."""

    processes: tuple[str, ...]
    message: Relayed


class TakeRank(msgspec.Struct, frozen=True):
    """A standby has been given a rank: its output is labelled so from now on."""

    process: str
    rank: int


class Release(msgspec.Struct, frozen=True):
    """Release the page and the output of a dead process."""

    process: str


class Access(msgspec.Struct, frozen=True):
    """Copy, read or write private state in the pages of processes, or capture a stack."""

    order: msg.CopyPrivate | msg.TakePrivate | msg.PrivateState | msg.TakeStack


class Report(msgspec.Struct, frozen=True):
    """Send a message to the controller: it must arrive."""

    message: msgspec.Struct


class ReportTogether(msgspec.Struct, frozen=True):
    """Send relayed messages of several workers as one message to the controller: it must arrive."""

    messages: tuple[msgspec.Struct, ...]


class Hold(msgspec.Struct, frozen=True):
    """Feed HoldExpired after HOLD_SECONDS, unless an EndHold comes before."""


class EndHold(msgspec.Struct, frozen=True):
    """Cancel the Hold."""


class Warn(msgspec.Struct, frozen=True):
    """Print a line for people."""

    text: str


Reports = Report | ReportTogether
Action = Start | Terminate | AskToLeave | Deliver | TakeRank | Release | Access | Reports | Hold | EndHold | Warn


# --- the machine ------------------------------------------------------------------------------------------------
class _Live(msgspec.Struct, frozen=True):
    rank: int | None
    ends: bool = False  # it was seen dying, or was killed: it has nothing more to say


class Host:
    """Decides what to do about the processes of one host."""

    def __init__(self, started_before: Iterable[str] = ()) -> None:
        """`started_before`: the processes that predecessors of this agent have started."""
        self._live: dict[str, _Live] = {}
        self._started = set(started_before)
        self._gathering: Gathering[msgspec.Struct] = Gathering()
        self._holds = False

    def copy(self) -> "Host":
        """Return an equal one that shares nothing that changes."""
        twin = Host(self._started)
        twin._live, twin._gathering, twin._holds = self._live.copy(), self._gathering.copy(), self._holds
        return twin

    @property
    def live(self) -> tuple[str, ...]:
        """The names of the live processes, sorted."""
        return tuple(sorted(self._live))

    def handle(self, event: Event) -> list[Action]:
        """Take in one event; return the actions that follow from it, in order."""
        match event:
            case Ordered():
                return self._on_order(event.order)
            case Addressed():
                receivers = tuple([name for name in event.processes if name in self._live])
                return [*self._take_rank(event.assign), Deliver(receivers, event.message)]
            case Started():
                return self._on_started(event)
            case NotStarted():
                return self._report(
                    ProcessExited(
                        process=event.process,
                        exit_status=None,
                        evidence=f"could not be started: {event.evidence}",
                        position=Position(),
                        noticed_ns=event.noticed_ns,
                    )
                )
            case Dying():
                return self._on_dying(event)
            case Exited():
                self._live.pop(event.report.process, None)
                return self._report(event.report)
            case Said():
                return self._on_said(event)
            case Read():
                return self._report(event.state)
            case HoldExpired():
                self._holds = False
                return self._send_gathered()
            case Ending():
                return [*(Terminate(name, event.why) for name in self.live), *self._send_gathered()]
            case _:
                assert_never(event)

    def _on_order(self, order: Order) -> list[Action]:
        match order:
            case Spawn():
                if order.process in self._started:
                    return []  # given again by a restarted controller, which cannot know that it had arrived
                self._started.add(order.process)
                return [Start(order)]
            case Kill():
                live = self._live.get(order.process)
                if live is None:
                    return []
                if order.after_step:
                    return [AskToLeave(order.process)]
                self._live[order.process] = _Live(live.rank, ends=True)
                return [Terminate(order.process, order.why)]
            case msg.ForgetProcess():
                if order.process in self._live:
                    return [Warn(f"{order.process} is not forgotten: it is alive")]
                return [Release(order.process)]
            case msg.CopyPrivate() | msg.TakePrivate() | msg.PrivateState() | msg.TakeStack():
                return [Access(order)]

    def _take_rank(self, assign: Assign | None) -> list[Action]:
        live = None if assign is None else self._live.get(assign.process)
        if assign is None or live is None or live.rank == assign.rank:
            return []
        self._live[assign.process] = _Live(assign.rank, live.ends)
        return [TakeRank(assign.process, assign.rank)]

    def _on_started(self, event: Started) -> list[Action]:
        self._started.add(event.process)
        self._live[event.process] = _Live(event.rank, ends=event.lost)
        actions = self._report(ProcessStarted(process=event.process, pid=event.pid))
        if event.lost:
            actions.append(Terminate(event.process, "it came back after it had been counted as lost"))
        return actions

    def _on_dying(self, event: Dying) -> list[Action]:
        live = self._live.get(event.process)
        if live is None:
            return []
        self._live[event.process] = _Live(live.rank, ends=True)
        return self._report(ProcessDying(process=event.process, position=event.position, noticed_ns=event.noticed_ns))

    def _on_said(self, event: Said) -> list[Action]:
        about = subject(event.message)
        if about is None:
            return self._report(event.relayed)
        actions = [] if self._gathering.joins(about) else self._send_gathered()
        expected = [name for name, live in self._live.items() if live.rank is not None and not live.ends]
        if self._gathering.add(event.process, about, event.relayed, expected):
            actions += self._send_gathered()
        elif len(self._gathering) == 1:
            self._holds = True
            actions.append(Hold())
        return actions

    def _report(self, message: msgspec.Struct) -> list[Action]:
        """Report after what has been gathered, so that no message overtakes another."""
        return [*self._send_gathered(), Report(message)]

    def _send_gathered(self) -> list[Action]:
        actions: list[Action] = [EndHold()] if self._holds else []
        self._holds = False
        gathered = self._gathering.take()
        if gathered:
            actions.append(Report(gathered[0]) if len(gathered) == 1 else ReportTogether(tuple(gathered)))
        return actions
