"""The agent as a child of `relight run` or `relight agent`."""

import asyncio
import os
from pathlib import Path

from relight.children import Child, start_module
from relight.launch.children.restart_policy import RestartPolicy
from relight.launch.children.supervisor import Supervisor
from relight.launch.observer import Observer
from relight.launch.progress import JobProgress, first_of
from relight.terminal import Screen
from relight.wire.connection.address import Address
from relight.wire.settings import CONTROLLER_LOST, JobSettings

GRACE_SECONDS = 2.0  # for the news of the job's end, which an agent may have heard first


class AgentChild:
    """Keeps an agent running: its workers outlive it, and a successor adopts them."""

    def __init__(
        self,
        settings: JobSettings,
        private_dir: Path,
        name: str,
        screen: Screen,
        progress: JobProgress,
        observer: Observer,
        *,
        joins: bool,
        spare: bool = False,
    ) -> None:
        """`joins`: the controller is on another host, and may have this agent leave while the job continues.

        `spare`: this host is none of the nodes that the job starts on.
        """
        self._private_dir = private_dir
        self._name = name
        self._screen = screen
        self._progress = progress
        self._observer = observer
        self._joins = joins
        self._flags = ("--spare",) if spare else ()
        self._supervisor = Supervisor(
            "agent",
            RestartPolicy(settings.agent_timeout_seconds / 3),
            *(progress, screen, settings.frozen_timeout_seconds),
            lambda status: "its workers train on, and a new agent adopts them" if status < 0 else "starting another",
        )
        self._pumps: set[asyncio.Task[None]] = set()
        self.child: Child | None = None  # the newest one

    async def keep(self, controller: Address) -> None:
        """Run agents until the job has ended, or this host leaves it."""

        async def live(again: bool) -> Child | None:
            return await self._live(controller, ("--adopt",) if again else ())

        given_up = await self._supervisor.keep(live)
        if given_up:
            self._observer.ask_to_end(given_up)

    async def flush(self, timeout_seconds: float) -> None:
        """Show what is left of the workers' output."""
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=timeout_seconds)

    async def _live(self, controller: Address, flags: tuple[str, ...]) -> Child | None:
        agent = self.child = await start_module(
            *("relight.agent", "--controller", f"{controller.host}:{controller.port}", "--name", self._name),
            *("--private-dir", str(self._private_dir), "--parent", str(os.getpid()), *self._flags, *flags),
            pipe=True,
        )
        self._pump(agent)
        await first_of(agent.wait(), self._supervisor.kill_if_frozen(agent))
        status = await agent.wait()
        if status >= 0:  # it ended in order, most likely because the job did: that news may be late
            await first_of(self._progress.ending.wait(), asyncio.sleep(GRACE_SECONDS))
        if self._progress.ending.is_set() or self._observer.ended is not None or self._progress.signal:
            return None
        if status in (0, CONTROLLER_LOST) and self._joins:
            return None  # it was ordered to end, or has lost the controller, as it has said
        return agent

    def _pump(self, agent: Child) -> None:
        """Show what the agent relays from its workers, also what is left in the pipe after its death."""
        pump = asyncio.create_task(self._show_output(agent.output))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    async def _show_output(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(65536):
            await self._screen.output(chunk)
