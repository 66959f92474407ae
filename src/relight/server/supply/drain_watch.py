"""Asks Slurm now and then which nodes of the job are to be drained, and has the job leave them in order."""

import asyncio
import os
from collections.abc import Callable

from relight.core.controller import Controller
from relight.core.protocol.events import HostDraining
from relight.server.supply.run import Failed, run_command
from relight.server.supply.slurm import ask_for_draining, read_draining

LOOK_SECONDS = 15.0
COMMAND_SECONDS = 30.0


class DrainWatch:
    """Reports each node once, and again if the job has other hosts than when it could not be left."""

    def __init__(self, core: Controller, feed: Callable[[HostDraining], None], say: Callable[[str], None]) -> None:
        """`say`: tell people."""
        self._core = core
        self._feed = feed
        self._say = say
        self._failed = ""  # why Slurm could not be asked the last time
        self._asked: set[tuple[str, int]] = set()  # agents, each with the number of hosts at that time

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Ask once. While Slurm does not answer, nothing is drained, and that is said once."""
        hosts = self._core.job.hosts
        agents = {hosts.machine(agent): agent for agent in hosts.in_order()}
        try:
            output = await run_command(ask_for_draining(agents, os.environ), COMMAND_SECONDS)
        except Failed as failure:
            if str(failure) != self._failed:
                self._failed = str(failure)
                self._say(f"nodes that Slurm drains are not noticed now: {failure}")
            return
        self._failed = ""
        for machine, reason in sorted(read_draining(output).items()):
            self._leave(agents.get(machine, ""), f"Slurm drains {machine}: {reason}")

    def _leave(self, agent: str, reason: str) -> None:
        hosts = self._core.job.hosts
        if agent in hosts and agent not in hosts.draining and (agent, len(hosts)) not in self._asked:
            self._asked.add((agent, len(hosts)))
            self._feed(HostDraining(agent=agent, reason=reason))
