"""Asks Slurm now and then why the hosts of orders have not come: a job that waits, or has ended without an agent.

Slurm accepts jobs that a quota, a limit of the partition or a drained node keeps from running, and says so in the queue
alone.
"""

import asyncio
from collections.abc import Callable

from relight.core.controller import Controller
from relight.core.protocol.events import HostRefused, HostWaits
from relight.server.supply.run import Failed, run_command
from relight.server.supply.slurm import SlurmBackend, read_jobs

LOOK_SECONDS = 15.0  # as often as nodes that are drained
COMMAND_SECONDS = 30.0
_ON_THE_WAY = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STAGE_OUT")


class OrderWatch:
    """Reports what Slurm says of the orders whose hosts are awaited."""

    def __init__(
        self, core: Controller, backend: SlurmBackend, feed: Callable[[HostWaits | HostRefused], None]
    ) -> None:
        self._core = core
        self._backend = backend
        self._feed = feed

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Ask once. While Slurm does not answer, orders wait as before."""
        orders = [order.name for order in self._core.job.orders.awaited if order.answered]
        if not orders:
            return
        try:
            output = await run_command(self._backend.look(orders), COMMAND_SECONDS)
        except Failed:
            return
        jobs = read_jobs(output)
        for order in orders:
            if found := jobs.get(self._backend.name(order)):
                self._tell(order, *found)

    def _tell(self, order: str, state: str, reason: str, number: str) -> None:
        why = "" if reason in ("", "None") else f" ({reason})"
        if state in _ON_THE_WAY:
            self._feed(HostWaits(order=order, reason=f"Slurm's job {number} is {state}{why}"))
            return
        log = f"logs/{order}.out in the run directory has what it said"
        self._feed(HostRefused(order=order, reason=f"Slurm's job {number} has ended as {state}{why}; {log}"))
