"""The end of the job: reported once, announced to observers and agents, and waited for."""

import asyncio
import contextlib

from relight.core.protocol.commands import EndJob
from relight.server.job.job import Job
from relight.server.job.report_files import ReportFiles
from relight.server.network.connection import Connection
from relight.wire.messages import JobEnded, StopAgent

AGENT_STOP_SECONDS = 10.0  # for the agents to end their processes once the job is over
OBSERVER_SECONDS = 2.0  # for observers of a dead controller to connect to this one


class JobEnd:
    """Knows whether the job has ended, and which peers have yet to learn it."""

    def __init__(self, job: Job, reports: ReportFiles) -> None:
        self._job = job
        self.command: EndJob | None = None  # None: the job is running
        self._reports = reports
        self._begun = asyncio.Event()
        self._observed = asyncio.Event()  # at least one observer has been informed
        self._agents_gone = asyncio.Event()
        self._uninformed: set[str] = set()  # agents of a job that had ended before this controller was started

    def begin(self, command: EndJob) -> None:
        """End the job; a second call has no effect."""
        if self.command is not None:
            return
        self.command = command
        self._reports.write_report(command.error)
        self._job.observers.send(JobEnded(error=command.error, details=command.details))
        if self._job.observers:
            self._observed.set()
        for agent in self._job.agents:
            agent.say(StopAgent(why=command.error or "training finished"))
        self._begun.set()

    def expect_agents(self) -> None:
        """Wait also for the agents that are not connected: no controller has told them of the end yet."""
        self._uninformed = {agent.name for agent in self._job.agents}

    def tell_observer(self, connection: Connection) -> None:
        """Inform an observer that has connected, if the job has ended."""
        if self.command is not None:
            connection.send(JobEnded(error=self.command.error, details=self.command.details))
            self._observed.set()

    def tell_agent(self, connection: Connection) -> None:
        """Have an agent that has connected after the end stop."""
        connection.send(StopAgent(why="the job is over"))

    def note_agent_gone(self, name: str) -> None:
        """Note that the connection to this agent has ended."""
        self._uninformed.discard(name)
        if not self._uninformed and not any(agent.connected for agent in self._job.agents):
            self._agents_gone.set()

    def hurry(self) -> None:
        """Do not wait for agents any longer."""
        self._agents_gone.set()

    async def wait(self) -> None:
        """Wait until the job has ended."""
        await self._begun.wait()

    async def wait_for_peers(self, *, resumed: bool) -> None:
        """Wait until agents have ended, and, after a restart, until an observer has had the time to connect."""
        if any(agent.connected for agent in self._job.agents) or self._uninformed:
            try:
                await asyncio.wait_for(self._agents_gone.wait(), AGENT_STOP_SECONDS)
            except TimeoutError:
                self._job.observers.tell("warning", f"an agent did not end within {AGENT_STOP_SECONDS:g} s")
        if resumed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._observed.wait(), OBSERVER_SECONDS)
