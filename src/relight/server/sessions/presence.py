"""Agents that are away, and the time at which an absence becomes the loss of a host."""

import asyncio

from relight.core.protocol.events import AgentLost
from relight.server.job.driver import Driver
from relight.server.job.job import Job
from relight.server.network.agents import Agent


class Presence:
    """Gives each agent that is not connected a time to return; after that, its host is lost.

    The last agent of a job has as much time as a controller has: no other host could take over its ranks, and they
    may well be training on.
    """

    def __init__(self, job: Job, driver: Driver) -> None:
        self._job = job
        self._agent_timeout_seconds = job.settings.agent_timeout_seconds
        self._controller_timeout_seconds = job.settings.controller_timeout_seconds
        self._driver = driver
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def await_all(self, since: str) -> None:
        """Wait for every agent; `since` says in words from when on."""
        for agent in self._job.agents:
            self._await(agent, since)

    def note_left(self, agent: Agent, silent_seconds: float = 0.0) -> None:
        """The connection to this agent has ended. Its host had been silent for so long: that time counts."""
        seconds = self._agent_timeout_seconds
        if self._is_alone(agent):
            seconds = max(seconds, self._controller_timeout_seconds)
        rest = max(0.0, seconds - silent_seconds)
        self._job.observers.tell(
            "warning",
            f"lost the connection to agent {agent.name}; waiting {rest:.3g} s for it to return",
        )
        self._await(agent, silent_seconds=silent_seconds)

    def note_returned(self, name: str) -> None:
        """An agent of this name has connected."""
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def stop(self) -> None:
        """Cancel all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _is_alone(self, agent: Agent) -> bool:
        return not any(other.connected for other in self._job.agents if other is not agent)

    def _await(self, agent: Agent, since: str = "", waited: float = 0.0, silent_seconds: float = 0.0) -> None:
        seconds, loop = self._agent_timeout_seconds, asyncio.get_running_loop()
        rest = max(0.0, seconds - silent_seconds)
        self._timers[agent.name] = loop.call_later(rest, self._miss, agent, since, waited + silent_seconds + rest)

    def _miss(self, agent: Agent, since: str, waited: float) -> None:
        if self._is_alone(agent) and waited < self._controller_timeout_seconds:
            self._await(agent, since, waited)
            return
        evidence = " ".join(f"no connection to agent {agent.name} for {waited:g} s {since}".split())
        del self._timers[agent.name]
        self._job.agents.remove(agent)
        # Its ranks may have trained on with the others until now: then no rank was waiting.
        silent_seconds = min(waited, self._job.board.idle_seconds(agent.name))
        version = self._job.board.committed()
        self._driver.feed(
            AgentLost(agent=agent.name, evidence=evidence, silent_seconds=silent_seconds, version=version)
        )
