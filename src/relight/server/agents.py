"""The agents as the server knows them: the processes they run, and what they have to be told, also while away."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from relight.core.commands import Kill, Spawn, WorkerCommand
from relight.core.members import Process
from relight.server.connection import Connection
from relight.wire.framing import encode_payload
from relight.wire.messages import CopyPrivate, ForgetProcess, Hello, Received, StoreLost, StoreReply, ToWorkers
from relight.wire.outbox import Outbox


class Agent:
    """Outlives its connections: orders that come up while the agent is away are kept until it is back."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.running: set[str] = set()  # ordered to start and not known to have ended
        self._connection: Connection | None = None
        self._outbox = Outbox()
        self.life = ""  # of the agent's process, as it says
        self.received = 0  # counted messages of that life

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def overflowed(self) -> bool:
        """Whether orders for it were lost, because too many came up while it was away."""
        return self._outbox.overflowed

    def send(self, message: msgspec.Struct) -> None:
        """An order that must arrive, now or when the agent is back."""
        frame = self._outbox.put(message)
        if self._connection is not None:
            self._connection.send_frame(frame)

    def say(self, message: msgspec.Struct) -> None:
        """Something that is for the agent only if it is here."""
        if self._connection is not None:
            self._connection.send(message)

    def recognise(self, hello: Hello, life: str) -> int:
        """The agent is (back) here: how many of its messages have been received. `life` is our own."""
        if hello.life != self.life:
            self.life, self.received = hello.life, 0
            self._outbox.begin_anew()
        elif hello.controller == life:
            self._outbox.confirm(hello.received)
        return self.received

    def attach(self, connection: Connection, present: tuple[str, ...]) -> tuple[str, ...]:
        """Speak through this connection from now on. Returns the processes that ended without a word about it.

        `present` are the processes that the agent has, or whose end it is about to report. A newer connection takes
        over from an older one: an agent that came back knows better than we do whether its old connection is dead.
        """
        if self._connection is not None:
            self._connection.abort()
        self._connection = connection
        coming = {message.process for message in self._outbox if isinstance(message, Spawn)}
        for frame in self._outbox.frames():
            connection.send_frame(frame)
        for process in present:
            if process not in self.running:
                self.send(Kill(process=process, why="this job does not know it"))
        return tuple(sorted(self.running - set(present) - coming))

    def speaks_through(self, connection: Connection) -> bool:
        """Whether this is its connection. What an older one still had to say comes again on the newer one."""
        return self._connection is connection

    def note_received(self) -> None:
        """One more of its counted messages has been dealt with."""
        self.received += 1
        self.say(Received(count=self.received))

    def confirm(self, count: int) -> None:
        self._outbox.confirm(count)

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

    def recall(self, processes: Iterable[Process]) -> None:
        """After a restart: who was ordered to start what, and what has ended."""
        for process in processes:
            agent = self._agents.get(process.agent) or self.add(process.agent)
            self._owner[process.name] = agent
            if process.alive:
                agent.running.add(process.name)
            else:
                self._dead.add(process.name)

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

    def order(self, processes: Sequence[str], command: WorkerCommand | StoreLost) -> None:
        """One frame for each agent that runs any of these processes."""
        payload = encode_payload(command)
        for agent in self._agents.values():
            names = tuple(name for name in processes if self.owns(agent, name))
            if names:
                agent.send(ToWorkers(processes=names, payload=payload))

    def tell_store_lost(self, processes: Sequence[str]) -> None:
        """Ask these processes to say again what they had put into the store."""
        self.order(processes, StoreLost())

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
