"""Hosts that are ordered of the cluster, in any stage: ordered, cancelled, asked for again, and given back.

    OrderHost -> HostOrdered -> AgentJoined, under the name of the order -> ... -> CancelHost -> HostCancelled

`advance` compares the hosts that are here and on order with those that are wanted, after every event. A host whose
machine is to be avoided is not counted, so another one is ordered beside it. Training never waits for any of it, and no
answer of the supplier ends a job.
"""

from collections.abc import Sequence

from relight.core.job.draining import Draining
from relight.core.job.job import Job, Stage
from relight.core.membership.host_orders import HostOrder
from relight.core.protocol import events as ev
from relight.core.protocol.commands import CancelHost, Command, Notice, OrderHost

FIRST_PAUSE_SECONDS = 10.0  # after an order that was refused; twice as long after each one that follows
LONGEST_PAUSE_SECONDS = 600.0


class Supplying:
    """Orders by number alone: `settings.supply_spares` beside the nodes, or as many hosts as the job once had."""

    def __init__(self, job: Job, draining: Draining) -> None:
        self._job, self._draining = job, draining
        self._most = 0  # hosts that were here at once, ordered ones not counted
        self._refused = 0  # orders in a row
        self._retry_at: float | None = None
        self._last_reason = ""  # why no host came of the last order that failed; for people

    # --- numbers ------------------------------------------------------------------------------------------------
    @property
    def is_on(self) -> bool:
        """True if hosts are ordered at all."""
        return bool(self._job.settings.supplier)

    @property
    def _staying(self) -> int:
        """The number of hosts that are here, and neither to be left nor to be avoided."""
        return self._job.hosts.staying

    @property
    def _wanted(self) -> int:
        """The number of hosts that the job is to have."""
        settings = self._job.settings
        return self._most if settings.supply_spares is None else settings.nodes + settings.supply_spares

    @property
    def _is_needed(self) -> bool:
        """True if a host that comes now could be of use."""
        return self._job.stage in (Stage.TRAINING, Stage.STOPPING, Stage.RESTORING)

    # --- after every event --------------------------------------------------------------------------------------
    def advance(self, now: float) -> list[Command]:
        """Order the hosts that are missing, cancel the orders that are not needed, give back idle hosts."""
        job = self._job
        if not self.is_on or job.stage is Stage.STARTING:
            return []
        out = self._settle(now)
        if job.stage is Stage.ENDED:
            return out + [self._cancel(order, "the job is over") for order in list(job.orders.open.values())]
        self._most = max(self._most, len(job.hosts) - len(job.orders.here))
        missing = self._wanted - self._staying if self._is_needed else 0
        out += self._expire(now)
        awaited = job.orders.awaited
        for order in awaited[max(0, missing) :]:
            out.append(self._cancel(order, "the host is not needed any more"))
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
        if missing > len(awaited) and self._retry_at is None:
            out += [self._place(now) for _ in range(missing - len(awaited))]
        return out + self._give_back(-missing, now)

    def _settle(self, now: float) -> list[Command]:
        """Note the hosts that have joined, and cancel the orders whose hosts are lost or given back."""
        hosts, out = self._job.hosts, list[Command]()
        for order in list(self._job.orders.open.values()):
            if not order.here and order.name in hosts:
                order.here = True
                out += self._on_arrival(order, now)
            elif order.here and order.name not in hosts:
                out.append(self._cancel(order, "its host is lost, or was given back"))
        return out

    def _on_arrival(self, order: HostOrder, now: float) -> list[Command]:
        """A host came of an order. If it is one to be avoided, the cluster may give it again: the next order waits."""
        hosts = self._job.hosts
        if why := hosts.why_avoided(order.name):
            return self._put_off(order.name, f"{hosts.machine(order.name)} came, which {why}", now)
        self._refused = 0
        return []

    def _place(self, now: float) -> OrderHost:
        why = f"{self._staying} hosts are here, and {self._wanted} are wanted"
        return self._order(self._job.orders.place(now), why)

    def _order(self, order: HostOrder, why: str) -> OrderHost:
        exclude = self._job.hosts.unwanted_machines
        return OrderHost(order=order.name, wanted=self._wanted, exclude=exclude, why=why)

    def _cancel(self, order: HostOrder, why: str) -> CancelHost:
        orders = self._job.orders
        orders.close(order)
        orders.cancelling[order.name] = order.identifier
        return CancelHost(order=order.name, identifier=order.identifier, why=why)

    def _expire(self, now: float) -> list[Command]:
        limit, out = self._job.settings.supply_timeout_seconds, list[Command]()
        for order in self._job.orders.awaited:
            if now >= order.placed_at + limit:
                reason = f"no host came of it within {limit:g} s (--supply-timeout-seconds)"
                reason += f": {order.waits_for}" if order.waits_for else ""
                out.append(self._cancel(order, reason))
                out += self._put_off(order.name, reason, now)
        return out

    def _give_back(self, surplus: int, now: float) -> list[Command]:
        """Leave the hosts that are too many, once they have been without ranks for long."""
        job, out = self._job, list[Command]()
        here = [order for order in job.orders.here if order.name not in job.hosts.draining]
        needless = self._needless(here, surplus)
        for order in reversed(here):
            if order.name not in needless:
                order.idle_since = None
                continue
            if order.idle_since is None:
                order.idle_since = now
            if now >= order.idle_since + job.settings.supply_idle_seconds and job.stage is Stage.TRAINING:
                out += self._draining.begin(order.name, "more hosts are here than are needed", now)
        return out + self._settle(now)

    def _needless(self, here: Sequence[HostOrder], surplus: int) -> set[str]:
        """Return the ordered hosts without ranks that are too many, the newest first.

        Those to be avoided are, once there are enough others; before that, all but the first on each such machine.
        """
        hosts, needless, machines = self._job.hosts, set[str](), set[str]()
        avoided = [order.name for order in here if hosts.is_unreliable(order.name)]
        if surplus <= 0 and not avoided:
            return needless
        busy = {process.agent for process in self._job.members.by_rank().values()}
        for name in avoided:
            if name not in busy and (surplus >= 0 or hosts.machine(name) in machines):
                needless.add(name)
            machines.add(hosts.machine(name))
        others = [order.name for order in reversed(here) if order.name not in (*avoided, *busy)]
        return needless | set(others[: max(0, surplus)])

    # --- what the supplier says ---------------------------------------------------------------------------------
    def on_answer(
        self, event: ev.HostOrdered | ev.HostWaits | ev.HostRefused | ev.HostCancelled, now: float
    ) -> list[Command]:
        """The supplier says what became of an order, or of its cancellation."""
        match event:
            case ev.HostOrdered():
                return self.on_ordered(event)
            case ev.HostWaits():
                return self.on_waits(event)
            case ev.HostRefused():
                return self.on_refused(event, now)
            case ev.HostCancelled():
                return self.on_cancelled(event)

    def on_ordered(self, event: ev.HostOrdered) -> list[Command]:
        """An order is placed. If it was cancelled meanwhile, it is cancelled again, by the cluster's word for it."""
        orders = self._job.orders
        order = orders.open.get(event.order)
        if order is not None:
            order.identifier, order.answered = event.identifier, True
            return []
        if not orders.is_closed(event.order):
            return []
        orders.cancelling[event.order] = event.identifier
        return [CancelHost(order=event.order, identifier=event.identifier, why="it was cancelled before it was placed")]

    def on_waits(self, event: ev.HostWaits) -> list[Command]:
        """The cluster says why the host of an order has not come yet."""
        order = self._job.orders.open.get(event.order)
        if order is None or order.here or order.waits_for == event.reason:
            return []
        order.waits_for = event.reason
        return [Notice(why=f"{order.name} has not come yet: {event.reason}", level="info")]

    def on_refused(self, event: ev.HostRefused, now: float) -> list[Command]:
        """No host comes of an order: another one is placed after a pause, each time a longer one."""
        orders = self._job.orders
        order = orders.open.get(event.order)
        if order is None or order.here:
            return []
        if event.uncertain:
            out: list[Command] = [self._cancel(order, f"it may have been placed: {event.reason}")]
        else:
            orders.close(order)
            out = []
        return out + self._put_off(event.order, event.reason, now)

    def on_cancelled(self, event: ev.HostCancelled) -> list[Command]:
        """An order is cancelled; if that failed, people must see to it."""
        self._job.orders.cancelling.pop(event.order, None)
        if not event.error:
            return []
        return self._say(f"the order {event.order} could not be cancelled, see to it by hand: {event.error}")

    def repeat(self) -> list[Command]:
        """Say again what the supplier of a dead controller may not have done."""
        orders, why = self._job.orders, "again: the controller was restarted"
        out: list[Command] = [self._order(order, why) for order in orders.awaited if not order.answered]
        return out + self.leftover()

    def remaining(self) -> list[CancelHost]:
        """Return the cancellations of all orders, for a job that ends without a decision."""
        why = "the job is over"
        placed = self._job.orders.open.values()
        return [CancelHost(order=o.name, identifier=o.identifier, why=why) for o in placed] + self.leftover()

    def leftover(self) -> list[CancelHost]:
        """Return the cancellations that the supplier has not confirmed."""
        why = "again: the controller was restarted"
        cancelling = self._job.orders.cancelling
        return [CancelHost(order=name, identifier=word, why=why) for name, word in cancelling.items()]

    def _put_off(self, order: str, reason: str, now: float) -> list[Command]:
        seconds = min(FIRST_PAUSE_SECONDS * 2.0 ** min(self._refused, 10), LONGEST_PAUSE_SECONDS)
        self._refused += 1
        self._last_reason = reason
        self._retry_at = now + seconds
        return self._say(f"no host of use came of {order}: {reason}", f"; another one is placed in {seconds:g} s")

    def _say(self, text: str, more: str = "") -> list[Command]:
        self._job.job_stats.notice(text)
        return [Notice(why=text + more, level="warning")]

    def describe(self, now: float) -> str:
        """Say how many hosts are here, wanted and on order, and which machines are avoided; for people."""
        job, said = self._job, list[str]()
        if self.is_on and job.stage is not Stage.STARTING:
            said.append(f"{self._staying} here, {self._wanted} wanted")
        for order in job.orders.awaited:
            word = f" ({order.identifier})" if order.identifier else ""
            why = f" ({order.waits_for})" if order.waits_for else ""
            said.append(f"{order.name}{word} on order for {now - order.placed_at:.0f} s{why}")
        if self._retry_at is not None:
            wait = max(0.0, self._retry_at - now)
            said.append(f"no host of use came of the last order: {self._last_reason}; the next one in {wait:.0f} s")
        if failed := job.hosts.lost_machines:
            said.append(f"lost twice, so used only where no other has room: {', '.join(failed)}")
        if faults := job.hosts.faults:
            named = ", ".join(f"{machine} ({fault})" for machine, fault in faults)
            said.append(f"with a fault, so used only where no other has room: {named}")
        return "; ".join(said)

    # --- time ---------------------------------------------------------------------------------------------------
    def next_at(self) -> float | None:
        """Return the time at which `advance` wants to be called, or None."""
        if not self.is_on or self._job.stage in (Stage.STARTING, Stage.ENDED):
            return None
        settings, orders = self._job.settings, self._job.orders
        moments = [order.placed_at + settings.supply_timeout_seconds for order in orders.awaited]
        if self._retry_at is not None and self._is_needed:
            moments.append(self._retry_at)
        if self._job.stage is Stage.TRAINING:
            staying = [order for order in orders.here if order.name not in self._job.hosts.draining]
            idle = [order.idle_since for order in staying if order.idle_since is not None]
            moments += [since + settings.supply_idle_seconds for since in idle]
        return min(moments, default=None)
