"""An agent of a simulated job: the production decisions about a host's processes, carried out on simulated ones.

What an agent decides comes from `agent/decisions`; here is what `agent/workers.py` does with threads and sockets.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from relight.agent.decisions import host
from relight.core.protocol.commands import Assign, WorkerCommand
from relight.wire.messages import CopyPrivate, PrivateState, TakeStack

if TYPE_CHECKING:
    from relight.sim.world.world import World

_PRIVATE_BYTES = 9


class SimulatedAgent:
    """One agent, from its start to its end."""

    __slots__ = ("decisions", "hold", "host", "table")

    def __init__(self, name: str, table: Mapping[str, int | None], hold: int = 0) -> None:
        """`table`: the processes that predecessors have started on this host, and their ranks. `hold`: see below."""
        self.host = name
        self.table = dict(table)
        self.decisions = host.Host(table)
        self.hold = hold  # goes up whenever a Hold ends: what was planned for an older one is void

    def copy(self) -> "SimulatedAgent":
        """Return a copy that can take another course."""
        twin = SimulatedAgent.__new__(SimulatedAgent)
        twin.host, twin.table, twin.hold = self.host, self.table.copy(), self.hold
        twin.decisions = self.decisions.copy()
        return twin

    def successor(self) -> "SimulatedAgent":
        """Return the agent that comes after this one has died: it knows the table, and has adopted nothing yet."""
        return SimulatedAgent(self.host, self.table, self.hold + 1)

    def feed(self, world: "World", event: host.Event) -> None:
        """Hand an event to the decisions, and carry out what they answer."""
        for action in self.decisions.handle(event):
            _CARRY_OUTS[type(action)](world, self, action)

    def obey(self, world: "World", process: str, message: host.Order | WorkerCommand) -> None:
        """Take an order of the controller, or pass on one for a worker."""
        if isinstance(message, host.ORDERS):
            self.feed(world, host.Ordered(message))
        else:
            self.feed(world, host.Addressed((process,), message, message if isinstance(message, Assign) else None))

    def expire(self, world: "World", hold: int) -> None:
        """End a Hold, unless it has ended before."""
        if hold == self.hold:
            self.hold += 1
            self.feed(world, host.HoldExpired())


# --- how actions are carried out ----------------------------------------------------------------------------------
def _start(world: "World", agent: SimulatedAgent, action: host.Start) -> None:
    process, rank = action.order.process, action.order.rank
    worker = world.workers[process] = world.worker_kind(world, process, rank)
    agent.table[process] = rank
    agent.feed(world, host.Started(process, 1, rank))
    worker.begin()


def _terminate(world: "World", agent: SimulatedAgent, action: host.Terminate) -> None:  # noqa: ARG001
    world.own(action.process).die(-9)


def _ask_to_leave(world: "World", agent: SimulatedAgent, action: host.AskToLeave) -> None:  # noqa: ARG001
    world.own(action.process).page.asked_to_leave = True


def _deliver(world: "World", agent: SimulatedAgent, action: host.Deliver) -> None:  # noqa: ARG001
    for process in action.processes:
        world.own(process).receive(action.message)  # type: ignore[arg-type]


def _take_rank(world: "World", agent: SimulatedAgent, action: host.TakeRank) -> None:  # noqa: ARG001
    agent.table[action.process] = action.rank


def _release(world: "World", agent: SimulatedAgent, action: host.Release) -> None:
    agent.table.pop(action.process, None)
    if action.process in world.workers:
        world.own(action.process).page.slots = [None, None]


def _access(world: "World", agent: SimulatedAgent, action: host.Access) -> None:
    order = action.order
    if isinstance(order, TakeStack) or order.target not in world.workers:
        return
    if isinstance(order, PrivateState):
        target = world.own(order.target)
        target.page.inherit(order.version, int.from_bytes(order.payload, signed=True))
        target.poke()
        return
    source = world.workers.get(order.source)
    private = None if source is None else source.page.read_private(order.version)
    if private is None:
        return
    if isinstance(order, CopyPrivate):
        world.own(order.target).page.inherit(order.version, private)
        return
    payload = private.to_bytes(_PRIVATE_BYTES, signed=True)
    state = PrivateState(source=order.source, target=order.target, version=order.version, payload=payload)
    agent.feed(world, host.Read(state))


def _report(world: "World", agent: SimulatedAgent, action: host.Report) -> None:  # noqa: ARG001
    message: Any = action.message
    if isinstance(message, PrivateState):
        world.tell(message.target, message)  # by way of the controller, which does not look into it
    else:
        world.post(message.process, message)


def _report_together(world: "World", agent: SimulatedAgent, action: host.ReportTogether) -> None:  # noqa: ARG001
    world.post_together(action.messages)


def _hold(world: "World", agent: SimulatedAgent, action: host.Hold) -> None:  # noqa: ARG001
    world.hold(agent)


def _end_hold(world: "World", agent: SimulatedAgent, action: host.EndHold) -> None:  # noqa: ARG001
    agent.hold += 1


def _warn(world: "World", agent: SimulatedAgent, action: host.Warn) -> None:
    world.note("warning", f"{agent.host}: {action.text}")


_CARRY_OUTS: dict[type[host.Action], Callable[["World", SimulatedAgent, Any], None]] = {
    host.Start: _start,
    host.Terminate: _terminate,
    host.AskToLeave: _ask_to_leave,
    host.Deliver: _deliver,
    host.TakeRank: _take_rank,
    host.Release: _release,
    host.Access: _access,
    host.Report: _report,
    host.ReportTogether: _report_together,
    host.Hold: _hold,
    host.EndHold: _end_hold,
    host.Warn: _warn,
}
