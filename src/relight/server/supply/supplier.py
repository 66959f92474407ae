"""Runs the commands that order hosts and cancel orders. They may hang, fail or print anything: training goes on.

Commands about one order run one after another, so that an order is placed before it is cancelled.
"""

import asyncio
from collections.abc import Awaitable, Callable

from relight.core.protocol.commands import CancelHost, OrderHost
from relight.core.protocol.events import HostCancelled, HostOrdered, HostRefused
from relight.server.supply.backend import Backend, read_identifier
from relight.server.supply.run import Failed, run_command

COMMAND_SECONDS = 60.0  # then a command is killed

Report = Callable[[HostOrdered | HostRefused | HostCancelled], None]


class Supplier:
    """Places and cancels orders, and reports what became of them."""

    def __init__(self, backend: Backend, report: Report, command_seconds: float = COMMAND_SECONDS) -> None:
        self._backend = backend
        self._report = report
        self._seconds = command_seconds
        self._identifiers: dict[str, str] = {}  # of orders, as their commands have printed them
        self._last: dict[str, asyncio.Task[None]] = {}  # of each order: the newest work on it

    def order(self, order: OrderHost) -> None:
        """Place an order."""
        self._begin(order.order, lambda: self._order(order))

    def cancel(self, order: CancelHost) -> None:
        """Cancel an order, once the command that places it has ended."""
        self._begin(order.order, lambda: self._cancel(order))

    async def finish(self, seconds: float) -> tuple[str, ...]:
        """Wait for the commands that run; return the orders whose commands did not end in time."""
        if self._last:
            await asyncio.wait(self._last.values(), timeout=seconds)
        left = {name: task for name, task in self._last.items() if not task.done()}
        for task in left.values():
            task.cancel()
        await asyncio.gather(*left.values(), return_exceptions=True)
        return tuple(sorted(left))

    def _begin(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        before = self._last.get(name)

        async def run() -> None:
            if before is not None:
                await asyncio.wait([before])
            await work()

        task = self._last[name] = asyncio.create_task(run())
        task.add_done_callback(lambda done: self._forget(name, done))

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        if self._last.get(name) is task:
            del self._last[name]

    async def _order(self, order: OrderHost) -> None:
        try:
            output = await run_command(self._backend.order(order), self._seconds)
            identifier = read_identifier(output)
        except Failed as failure:
            self._report(HostRefused(order=order.order, reason=str(failure), uncertain=failure.uncertain))
        except ValueError as problem:
            self._report(HostRefused(order=order.order, reason=str(problem), uncertain=True))
        else:
            self._identifiers[order.order] = identifier
            self._report(HostOrdered(order=order.order, identifier=identifier))

    async def _cancel(self, order: CancelHost) -> None:
        known = self._identifiers.get(order.order, "")
        if not order.identifier and known:
            order = CancelHost(order=order.order, identifier=known, why=order.why)
        try:
            await run_command(self._backend.cancel(order), self._seconds)
        except Failed as failure:
            self._report(HostCancelled(order=order.order, error=str(failure)))
        else:
            self._identifiers.pop(order.order, None)
            self._report(HostCancelled(order=order.order))
