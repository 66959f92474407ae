"""Judge where processes are started: not on lost hosts, and the first ones not on spares."""

from relight.core.commands import Spawn
from relight.core.events import AgentJoined, AgentLost, Event


class Placement:
    """The hosts of a job, as far as they matter for what is started there."""

    def __init__(self) -> None:
        self._lost: set[str] = set()
        self._spares: set[str] = set()

    def hear(self, event: Event) -> None:
        """Take note of hosts that come and go."""
        match event:
            case AgentJoined():
                self._lost.discard(event.agent)
                if event.spare:  # the job must not start on it
                    self._spares.add(event.agent)
            case AgentLost():
                self._lost.add(event.agent)

    def fault(self, spawn: Spawn) -> str:
        """Describe what is wrong with the place of a process; an empty string if nothing is."""
        if spawn.agent in self._lost:
            return f"I14: {spawn.process} is placed on {spawn.agent}, which is lost"
        if spawn.rank is not None and spawn.agent in self._spares:
            return f"I16: rank {spawn.rank} is started on {spawn.agent}, which is a spare"
        return ""
