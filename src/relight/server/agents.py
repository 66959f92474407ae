"""The agents as the server knows them: the processes they run, and what they have to be told, also while away."""

from collections.abc import Iterator, Sequence

import msgspec

from relight.core.commands import Kill, Spawn, WorkerCommand
from relight.server.connection import Connection
from relight.wire.framing import encode_payload
from relight.wire.messages import CopyPrivate, ForgetProcess, StoreReply, ToWorkers

MAX_KEPT_MESSAGES = 10_000  # for an agent that is away; it is given up after `agent_timeout_seconds` anyway


class Agent:
    """Outlives its connections: orders that come up while the agent is away are kept until it is back."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.running: set[str] = set()  # ordered to start and not known to have ended
        self._connection: Connection | None = None
        self._kept: list[msgspec.Struct] = []

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def send(self, message: msgspec.Struct) -> None:
        if self._connection is not None:
            self._connection.send(message)
        elif len(self._kept) < MAX_KEPT_MESSAGES:
            self._kept.append(message)

    def attach(self, connection: Connection, live: tuple[str, ...]) -> tuple[str, ...]:
        """The agent is (back) here with these live processes. Returns those that ended without a word about it.

        A newer connection takes over from an older one: an agent that came back knows better than we do whether
        its old connection is dead.
        """
        if self._connection is not None:
            self._connection.abort()
        self._connection = connection
        kept, self._kept = self._kept, []
        coming = {message.process for message in kept if isinstance(message, Spawn)}
        for message in kept:
            connection.send(message)
        for process in live:
            if process not in self.running:
                connection.send(Kill(process=process, why="this job does not know it"))
        return tuple(sorted(self.running - set(live) - coming))

    def detach(self, connection: Connection) -> bool:
        """This connection ended. False if a newer one has taken over already."""
        if self._connection is not connection:
            return False
        self._connection = None
        return True


class Agents:
    """All agents of the job, and which of them runs which process."""

    def __init__(self) -> None:
        self._agents: dict[str, Agent] = {}
        self._owner: dict[str, Agent] = {}  # process -> the agent that was ordered to start it
        self._dead: set[str] = set()  # processes whose pages may still be asked for

    def __iter__(self) -> Iterator[Agent]:
        return iter(self._agents.values())

    def get(self, name: str) -> Agent | None:
        return self._agents.get(name)

    def add(self, name: str) -> Agent:
        agent = self._agents[name] = Agent(name)
        return agent

    def remove(self, agent: Agent) -> None:
        del self._agents[agent.name]

    def owns(self, agent: Agent, process: str) -> bool:
        """Whether this agent was ordered to start this process, which may have ended since."""
        return self._owner.get(process) is agent

    def spawn(self, command: Spawn) -> None:
        agent = self._agents[command.agent]
        agent.running.add(command.process)
        self._owner[command.process] = agent
        agent.send(command)

    def kill(self, command: Kill) -> None:
        self._owner[command.process].send(command)

    def note_exit(self, agent: Agent, process: str) -> None:
        agent.running.discard(process)
        self._dead.add(process)

    def order(self, processes: Sequence[str], command: WorkerCommand) -> None:
        """One frame for each agent that runs any of these processes."""
        payload = encode_payload(command)
        for agent in self._agents.values():
            names = tuple(name for name in processes if self.owns(agent, name))
            if names:
                agent.send(ToWorkers(processes=names, payload=payload))

    def reply(self, process: str, reply: StoreReply) -> None:
        self._owner[process].send(ToWorkers(processes=(process,), payload=encode_payload(reply)))

    def copy_private(self, sources: Sequence[str], target: str, version: int) -> None:
        """A rank's private state lies beside its dead holder's page; its new holder needs it before it restores.

        `sources` come newest last, so the newest overwrites what an older one may have left of the same version.
        """
        for source in sources:
            self._owner[target].send(CopyPrivate(source=source, target=target, version=version))

    def forget_dead(self) -> None:
        """Everyone is restored: what dead processes left behind will not be asked for again."""
        for process in sorted(self._dead):
            self._owner[process].send(ForgetProcess(process=process))
        self._dead.clear()
