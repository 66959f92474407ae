"""Controllers with a planted bug in how they order hosts and give them back."""

from relight.core.job.job import Job, Stage
from relight.core.job.supplying import Supplying
from relight.core.membership.host_orders import HostOrder, HostOrders
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Command
from relight.core.stages.agents import Agents


class ForgetsWhatIsOnOrder(Supplying):
    """Hosts are missing until they are here: another one is ordered after each event."""

    def advance(self, now: float) -> list[Command]:
        out = super().advance(now)
        missing = self._wanted - self._staying
        return [*out, self._place(now)] if self._is_needed and missing > 0 and self.is_on else out


class ForgetsOrderedHosts(Supplying):
    """A host that came is not counted, so that the next one is ordered, and so on."""

    @property
    def _staying(self) -> int:
        return super()._staying - len(self._job.orders.here)


class TakesHostsWhoseOrderIsOver(Agents):
    """A host that comes after its order was cancelled is welcome: but the cluster may take it away at any moment."""

    def on_joined(self, event: ev.AgentJoined, now: float) -> list[Command]:
        orders = self._job.orders
        is_closed = orders.is_closed
        orders.is_closed = lambda name: False  # type: ignore[method-assign] # noqa: ARG005
        try:
            return super().on_joined(event, now)
        finally:
            orders.is_closed = is_closed  # type: ignore[method-assign]


class LeavesOrdersAtTheEnd(Supplying):
    """The job ends, and its orders for hosts stay with the cluster."""

    def advance(self, now: float) -> list[Command]:
        return [] if self._job.stage in (Stage.FINISHING, Stage.ENDED) else super().advance(now)


class EndsWhenRefused(Supplying):
    """A cluster that refuses a host ends the job."""

    def on_refused(self, event: ev.HostRefused, now: float) -> list[Command]:
        return self._job.end(f"the cluster refuses a host: {event.reason}", now)


class OrdersAtOnceAfterAFailedHost(Supplying):
    """The cluster gives a machine that has failed before, and another one is ordered at once, and so on."""

    def _on_arrival(self, order: HostOrder, now: float) -> list[Command]:
        retry_at = self._retry_at
        said = super()._on_arrival(order, now)
        self._retry_at = retry_at
        return said


class _ShortMemory(HostOrders):
    def close(self, order: HostOrder) -> None:
        super().close(order)
        self._next_number -= not self.open


class UsesNamesAgain(Job):
    """The name of an order that is over is used again: a host that comes late is taken for another one."""

    def __init__(self, *arguments, **settings) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*arguments, **settings)
        self.orders = _ShortMemory()
