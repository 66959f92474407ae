"""The supplier of a simulated job: a cluster that refuses, forgets, delays and doubles orders, and gives failed hosts.

Modelled, not production: server/supply, and the cluster behind it. Orders and cancellations are decided by the core.
"""

from typing import TYPE_CHECKING

from relight.core.protocol import events as ev
from relight.core.protocol.commands import CancelHost, OrderHost

if TYPE_CHECKING:
    from relight.sim.timed.job import SimulatedJob

ANSWER_SECONDS = (0.01, 3.0)
ARRIVAL_SECONDS = (0.5, 8.0)
LATE_SECONDS = (20.0, 60.0)  # around the time that a job waits for the host of an order
# What becomes of an order, and how often. "lost": neither an answer nor a host; "hangs": the command did not end in
# time, and the host comes all the same; "doubled": two hosts come under its name, of which the second is refused.
FATES = (
    *("comes", "comes", "comes", "comes", "late", "refused", "refused", "lost"),
    *("never", "hangs", "doubled", "before the answer"),
)
AGAIN = 0.5  # how often a machine is given that has failed before, if there is one


class Supplier:
    """Draws the fate of each order."""

    def __init__(self, job: "SimulatedJob") -> None:
        self._job = job
        self._cancelled: set[str] = set()
        self._machines: dict[str, str] = {}  # that come of orders though they are to be avoided

    def order(self, command: OrderHost) -> None:
        """Take an order; one that is given again may have been placed before."""
        job, name = self._job, command.order
        drawn = job.chance() * len(FATES)
        fate = FATES[int(drawn)]
        machine = self._failed_machine(command) if drawn % 1 < AGAIN else ""
        job.note("SUPPLIER", f"{name}: {fate}{machine and ', '}{machine}")
        if machine:
            self._machines[name] = machine
        job.checker.disturbed.add("supply")
        answered = job.between(ANSWER_SECONDS)
        if fate == "before the answer":
            job.after(answered * job.chance(), ("supplier", "arrives", name))
        if fate not in ("lost", "never", "refused", "before the answer"):
            arrived = answered + job.between(LATE_SECONDS if fate == "late" else ARRIVAL_SECONDS)
            job.after(arrived, ("supplier", "arrives", name))
            if fate == "doubled":
                job.after(arrived + job.between(ARRIVAL_SECONDS), ("supplier", "arrives", name))
        if fate != "lost":
            job.after(answered, ("supplier", "answers", name, fate))

    def _failed_machine(self, command: OrderHost) -> str:
        """Return one of those that are excluded since they have failed; empty if there is none."""
        hosts = self._job.controller.job.hosts
        failed = {*hosts.lost_machines, *(machine for machine, _ in hosts.faults)}
        return next((machine for machine in command.exclude if machine in failed), "")

    def cancel(self, command: CancelHost) -> None:
        """Cancel an order, most often before its host comes."""
        job = self._job
        if job.chance() < 0.7:
            self._cancelled.add(command.order)
        job.after(job.between(ANSWER_SECONDS), ("supplier", "confirms", command.order))

    def perform(self, what: str, *arguments: str) -> None:
        """Let something happen to an order."""
        getattr(self, what)(*arguments)

    # --- what happens to orders -----------------------------------------------------------------------------------
    def answers(self, name: str, fate: str) -> None:
        """Tell the controller what became of an order. One that is away does not hear it."""
        if fate in ("refused", "hangs"):
            self._job.feed(ev.HostRefused(order=name, reason="a word of the cluster", uncertain=fate == "hangs"))
        else:
            self._job.feed(ev.HostOrdered(order=name, identifier=f"id of {name}"))
            if fate in ("late", "never"):
                self._job.feed(ev.HostWaits(order=name, reason="a quota"))

    def confirms(self, name: str) -> None:
        """Tell the controller that an order is cancelled."""
        self._job.feed(ev.HostCancelled(order=name))

    def arrives(self, name: str) -> None:
        """Let the agent of a host connect, unless one of that name is or was here."""
        job = self._job
        if job.end is None and name not in self._cancelled and not job.hosts.has(name):
            job.hosts.joins(name, self._machines.get(name, ""))
