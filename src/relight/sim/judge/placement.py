"""Judge where processes are started: not on hosts that are lost or given back, and the first ones not on spares."""

from collections.abc import Collection

from relight.core.protocol.commands import ReleaseHost, Spawn
from relight.core.protocol.events import AgentJoined, AgentLost, Event


class Placement:
    """The hosts of a job, as far as they matter for what is started there."""

    def __init__(self) -> None:
        self._lost: set[str] = set()
        self._spares: set[str] = set()

    def hear(self, event: Event) -> None:
        """Take note of hosts that come and go."""
        match event:
            case AgentJoined():
                self._lost.discard(event.agent)
                if event.spare:  # the job must not start on it
                    self._spares.add(event.agent)
            case AgentLost():
                self._lost.add(event.agent)

    def fault(self, order: Spawn | ReleaseHost, held: Collection[str] = ()) -> str:
        """Describe what is wrong with an order about a host, on which the processes `held` have ranks; or nothing."""
        if isinstance(order, ReleaseHost):
            self._lost.add(order.agent)  # nothing may be started there any more
            return f"I17: {order.agent} is given back with {sorted(held)}, which hold ranks" if held else ""
        if order.agent in self._lost:
            return f"I14: {order.process} is placed on {order.agent}, which is lost"
        if order.rank is not None and order.agent in self._spares:
            return f"I16: rank {order.rank} is started on {order.agent}, which is a spare"
        return ""
