"""Serves connections of agents: welcomes them, keeps their pace, and confirms what they have reported."""

import asyncio
import time

from relight.core.detection.pace import SAMPLE_SECONDS, TRACED_RANKS, sample_seconds
from relight.core.protocol.events import AgentJoined, ProcessExited
from relight.core.protocol.position import Position
from relight.server.job.driver import Driver
from relight.server.job.job import Job
from relight.server.job.job_end import JobEnd
from relight.server.network.admission import Admission, Peer
from relight.server.network.agents import Agent
from relight.server.network.connection import Connection
from relight.server.sessions.health import HealthMonitor
from relight.server.sessions.presence import Presence
from relight.server.sessions.router import AgentRouter
from relight.wire.connection.framing import decode, make_decoder
from relight.wire.connection.outbox import COUNTED
from relight.wire.connection.streams import read_payload
from relight.wire.messages import AgentUp, Hello, Pace, Refused
from relight.wire.versions import describe_difference, installed_versions

CONFIRM_SECONDS = 0.1  # until a report is confirmed, if no command goes to the agent before


class AgentSessions:
    """One session for each connection of an agent, from its Hello to the end of the connection."""

    def __init__(
        self,
        job: Job,
        admission: Admission,
        router: AgentRouter,
        driver: Driver,
        health: HealthMonitor,
        presence: Presence,
        end: JobEnd,
    ) -> None:
        self._job = job
        self._admission = admission
        self._router = router
        self._driver = driver
        self._health = health
        self._presence = presence
        self._end = end
        self._sample_seconds = SAMPLE_SECONDS  # the pace that agents were given last
        self._versions = installed_versions()
        self._unconfirmed: list[Agent] = []  # with reports to be confirmed together
        self._decode = make_decoder(AgentUp)

    async def serve(self, connection: Connection, peer: Peer) -> None:
        """Serve one connection. Raises ProtocolError."""
        hello = peer.hello
        if self._end.command is not None:
            self._admission.welcome(connection, peer)
            self._end.tell_agent(connection)
            while await read_payload(connection.reader) is not None:
                pass
            self._end.note_agent_gone(hello.name)
            return
        reason = self._why_refused(hello)
        if reason:
            if self._job.agents.get(hello.name) is None:
                self._job.refusals.note(f"refused {hello.name} ({connection.peer}): {reason}")
            connection.send(Refused(reason=reason))
            return
        agent = self._welcome(connection, peer)
        try:
            while (payload := await read_payload(connection.reader)) is not None:
                message = decode(self._decode, payload)
                if not agent.speaks_through(connection):
                    return
                self._router.take(agent, message)
                if isinstance(message, COUNTED) and agent.note_received():
                    self._confirm_soon(agent)
        finally:
            if agent.detach(connection):
                if self._end.command is not None:
                    self._end.note_agent_gone(agent.name)
                elif agent.released:
                    self._job.agents.remove(agent)
                else:
                    self._presence.note_left(agent, connection.silent_seconds())

    def _why_refused(self, hello: Hello) -> str:
        agent = self._job.agents.get(hello.name)
        if agent is not None and agent.overflowed:
            return "this agent was away for so long that commands for it were lost"
        if agent is not None and agent.is_double(hello):
            return f"an agent named {hello.name} is connected already; give this one another --name or --node-rank"
        return describe_difference(self._versions, hello.versions)

    def _welcome(self, connection: Connection, peer: Peer) -> Agent:
        hello = peer.hello
        self._presence.note_returned(hello.name)
        agent = self._job.agents.get(hello.name)
        is_new = agent is None
        if agent is None:
            if not any(self._job.agents):
                self._job.clock.restart()
            agent = self._job.agents.add(hello.name)
        # A new controller knows from the journal which life of each agent its predecessor heard last.
        restarted = agent.life not in ("", hello.life)
        life = agent.recognise(hello, self._admission.life)
        self._admission.welcome(connection, peer, life, agent.received)
        unseen = agent.attach(connection, hello.processes)
        self._set_pace(agent, hello.slots)
        joined = AgentJoined(
            agent=hello.name, slots=hello.slots, spare=hello.spare, life=hello.life, machine=hello.machine
        )
        if is_new:
            self._driver.feed(joined)
        for process in unseen:
            self._router.take_exit(agent, _unseen_exit(process))
        if restarted:
            self._driver.feed(joined)
        return agent

    def _set_pace(self, agent: Agent, slots: int) -> None:
        """Tell this agent how often to report, and all agents if this one makes the pace slower."""
        seconds = sample_seconds(max(self._job.settings.nodes, len(self._job.agents)))
        receivers = [agent]
        if seconds != self._sample_seconds:
            self._sample_seconds = seconds
            self._health.expect(seconds)
            receivers = list(self._job.agents)
        for each in receivers:
            each.say(Pace(sample_seconds=seconds, trace=(each.number - 1) * slots < TRACED_RANKS))

    def _confirm_soon(self, agent: Agent) -> None:
        """Confirm several reports in one message; most often the next command carries the confirmation."""
        if not self._unconfirmed:
            asyncio.get_running_loop().call_later(CONFIRM_SECONDS, self._confirm)
        self._unconfirmed.append(agent)

    def _confirm(self) -> None:
        agents, self._unconfirmed = self._unconfirmed, []
        for agent in agents:
            agent.tell_received()


def _unseen_exit(process: str) -> ProcessExited:
    return ProcessExited(
        process=process,
        exit_status=None,
        evidence="ended while its agent was away",
        position=Position(),
        noticed_ns=time.monotonic_ns(),
    )
