"""Runs the commands that order hosts and cancel orders. They may hang, fail or print anything: training goes on.

Commands about one order run one after another, so that an order is placed before it is cancelled.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable

from relight.core.protocol.commands import CancelHost, OrderHost
from relight.core.protocol.events import HostCancelled, HostOrdered, HostRefused
from relight.server.supply.backend import Backend, Call, read_identifier

COMMAND_SECONDS = 60.0  # then a command is killed
MAX_OUTPUT_BYTES = 64 * 1024
MAX_READS = 64  # of what is left in a pipe once a command has ended
MAX_WORDS = 300  # characters of a command's own words, for people

Report = Callable[[HostOrdered | HostRefused | HostCancelled], None]


class Failed(Exception):
    """A command did not do its work, and why. `uncertain`: it may have done it all the same."""

    def __init__(self, words: str, *, uncertain: bool = False) -> None:
        super().__init__(words)
        self.uncertain = uncertain


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
            output = await self._run(self._backend.order(order))
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
            await self._run(self._backend.cancel(order))
        except Failed as failure:
            self._report(HostCancelled(order=order.order, error=str(failure)))
        else:
            self._identifiers.pop(order.order, None)
            self._report(HostCancelled(order=order.order))

    async def _run(self, call: Call) -> str:
        """Run a command to its end; return its standard output. Raises Failed."""
        environment = dict(os.environ)
        for name, value in call.environment.items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        output, errors = _Output(), _Output()
        try:
            status = await self._run_with(call.command, environment, output, errors)
        finally:
            output.close()
            errors.close()
        if status:
            words = " ".join((errors.kept or output.kept).decode(errors="replace").split())[:MAX_WORDS]
            raise Failed(words or f"it ended with status {status}", uncertain=status < 0)
        return output.kept.decode(errors="replace")

    async def _run_with(
        self, command: tuple[str, ...], environment: dict[str, str], output: "_Output", errors: "_Output"
    ) -> int:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.write_end,
                stderr=errors.write_end,
                env=environment,
                start_new_session=True,  # so that all that it started can be killed with it
            )
        except OSError as error:
            raise Failed(f"{command[0]} cannot be run: {error.strerror or error}") from None
        try:
            return await asyncio.wait_for(process.wait(), self._seconds)
        except TimeoutError:
            raise Failed(f"it did not end within {self._seconds:g} s, and was killed", uncertain=True) from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


class _Output:
    """The beginning of what a command prints. A process that the command leaves may keep the pipe open."""

    def __init__(self) -> None:
        self.kept = b""
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        asyncio.get_running_loop().add_reader(self._read_end, self._take)

    def _take(self) -> bool:
        """Read what is there, and keep the first bytes: a command that prints without end must not fill the memory."""
        try:
            chunk = os.read(self._read_end, MAX_OUTPUT_BYTES)
        except BlockingIOError:
            return False
        self.kept += chunk[: MAX_OUTPUT_BYTES - len(self.kept)]
        return bool(chunk)

    def close(self) -> None:
        """Read the rest of what is there."""
        os.close(self.write_end)
        asyncio.get_running_loop().remove_reader(self._read_end)
        for _ in range(MAX_READS):
            if not self._take():
                break
        os.close(self._read_end)
