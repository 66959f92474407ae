"""The agents as the server knows them: the processes they run, and what they have to be told, also while away."""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from relight.core.commands import Kill, Spawn, WorkerCommand
from relight.core.members import Process
from relight.server.connection import Connection
from relight.wire.framing import encode_frame, encode_payload
from relight.wire.messages import (
    CopyPrivate,
    ForgetProcess,
    Hello,
    PrivateState,
    Received,
    StoreLost,
    StoreReply,
    TakePrivate,
    TakeStack,
    ToWorkers,
)
from relight.wire.outbox import Outbox

KEPT_UNASKED = 256  # an agent may say the end of a process twice


class Agent:
    """Outlives its connections: orders that come up while the agent is away are kept until it is back."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number  # 1: the first that joined; one that was lost and comes back is another one
        self.running: set[str] = set()  # ordered to start and not known to have ended
        self._connection: Connection | None = None
        self._outbox = Outbox()
        self.life = ""  # of the agent's process, as it says
        self.received = 0  # counted messages of that life
        self._confirmed = 0  # of these, how many it has been told of

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
            if self.received != self._confirmed:  # in the same breath
                frame = self._confirmation() + frame
            self._connection.send_frame(frame)

    def say(self, message: msgspec.Struct) -> None:
        """Something that is for the agent only if it is here."""
        if self._connection is not None:
            self._connection.send(message)

    def is_double(self, hello: Hello) -> bool:
        """Whether this is another agent that calls itself by the name of one that is here."""
        return self.connected and hello.life != self.life

    def recognise(self, hello: Hello, life: str) -> str:
        """The agent is (back) here. `life` is the controller's; returns what to call it towards this agent."""
        life = f"{life}.{self.number}"
        if hello.life != self.life:
            self.life, self.received = hello.life, 0
            self._outbox.begin_anew()
        elif hello.controller == life:
            self._outbox.confirm(hello.received)
        return life

    def attach(self, connection: Connection, present: tuple[str, ...]) -> tuple[str, ...]:
        """Speak through this connection from now on. Returns the processes that ended without a word about it.

        `present` are the processes that the agent has, or whose end it is about to report. A newer connection takes
        over from an older one: an agent that came back knows better than we do whether its old connection is dead.
        """
        if self._connection is not None:
            self._connection.abort()
        self._connection = connection
        self._confirmed = self.received  # the Welcome has said so
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

    def note_received(self) -> bool:
        """One more of its counted messages has been dealt with. Whether `tell_received` is due now, and was not yet."""
        was_due = self.received != self._confirmed
        self.received += 1
        return not was_due

    def tell_received(self) -> None:
        """Confirm all that have been dealt with, in one word, unless an order has done so meanwhile."""
        if self._connection is not None and self.received != self._confirmed:
            self._connection.send_frame(self._confirmation())

    def _confirmation(self) -> bytes:
        self._confirmed = self.received
        return encode_frame(Received(count=self.received))

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
        self._count = 0
        self._dead: set[str] = set()  # processes whose pages may still be asked for
        self._forgotten: set[str] = set()  # of which their agents were told that nobody will ask any more
        self._unasked: collections.deque[str] = collections.deque()  # the same of those that never held a rank

    def __iter__(self) -> Iterator[Agent]:
        return iter(self._agents.values())

    def __len__(self) -> int:
        return len(self._agents)

    def recall(self, lives: Mapping[str, str], processes: Iterable[Process]) -> None:
        """After a restart: the agents that were here, who was ordered to start what, and what has ended.

        `lives`: which run of each agent it was, so that another one is noticed that has taken its place meanwhile.
        """
        for name, life in lives.items():
            self.add(name).life = life
        for process in processes:
            agent = self._agents.get(process.agent)
            if agent is None:  # its host was lost with it
                continue
            self._owner[process.name] = agent
            if process.alive:
                agent.running.add(process.name)
            else:
                self._dead.add(process.name)

    def get(self, name: str) -> Agent | None:
        return self._agents.get(name)

    def add(self, name: str) -> Agent:
        self._count += 1
        agent = self._agents[name] = Agent(name, self._count)
        return agent

    def remove(self, agent: Agent) -> None:
        """It is lost, and with it all that it ran: should it come back, it is a new one."""
        del self._agents[agent.name]
        self._owner = {process: owner for process, owner in self._owner.items() if owner is not agent}
        self._dead = {process for process in self._dead if process in self._owner}

    def owns(self, agent: Agent, process: str) -> bool:
        """Whether this agent was ordered to start this process, which may have ended since."""
        return self._owner.get(process) is agent

    def spawn(self, command: Spawn) -> None:
        agent = self._agents[command.agent]
        agent.running.add(command.process)
        self._owner[command.process] = agent
        agent.send(command)

    def kill(self, command: Kill) -> None:
        agent = self._owner.get(command.process)
        if agent is not None:  # or its host was lost, before a restart of ours
            agent.send(command)

    def ask_for_stack(self, process: str) -> bool:
        """Ask what a process is doing. False: its agent is not here to be asked."""
        agent = self._owner.get(process)
        if agent is None or not agent.connected:
            return False
        agent.say(TakeStack(process=process))
        return True

    def note_exit(self, agent: Agent, process: str) -> None:
        agent.running.discard(process)
        self._dead.add(process)

    def order(self, processes: Sequence[str], command: WorkerCommand | StoreLost) -> None:
        """One frame for each agent that runs any of these processes, in the order of the first of them."""
        payload = encode_payload(command)
        names_of: dict[Agent, list[str]] = {}
        for name in processes:
            agent = self._owner.get(name)
            if agent is not None:
                names_of.setdefault(agent, []).append(name)
        for agent, names in names_of.items():
            agent.send(ToWorkers(processes=tuple(names), payload=payload))

    def tell_store_lost(self, processes: Sequence[str]) -> None:
        """Ask these processes to say again what they had put into the store."""
        self.order(processes, StoreLost())

    def reply(self, process: str, reply: StoreReply) -> None:
        owner = self._owner.get(process)
        if owner is not None:
            owner.send(ToWorkers(processes=(process,), payload=encode_payload(reply)))

    def copy_private(self, sources: Sequence[str], target: str, version: int) -> None:
        """A rank's private state lies beside its dead holder's page; its new holder needs it before it restores.

        `sources` come newest last, so the newest overwrites what an older one may have left of the same version.
        """
        for source in sources:
            holder, taker = self._owner.get(source), self._owner[target]
            if holder is taker:
                taker.send(CopyPrivate(source=source, target=target, version=version))
            elif holder is not None:
                holder.send(TakePrivate(source=source, target=target, version=version))

    def take_private(self, sources: Sequence[str], target: str, version: int) -> None:
        """Ask for what these dead holders of a rank left behind, newest last, for a checkpoint."""
        for source in sources:
            holder = self._owner.get(source)
            if holder is not None:
                holder.send(TakePrivate(source=source, target=target, version=version))

    def pass_on(self, state: PrivateState) -> None:
        """To the host of its target, if that still is one."""
        taker = self._owner.get(state.target)
        if taker is not None:
            taker.send(state)

    def forget(self, process: str) -> None:
        """It ended and never held a rank: what it left behind will not be asked for."""
        owner = self._owner.get(process)
        if owner is None:
            return
        self._dead.discard(process)
        owner.send(ForgetProcess(process=process))
        self._unasked.append(process)
        if len(self._unasked) > KEPT_UNASKED:
            self._owner.pop(self._unasked.popleft(), None)

    def forget_dead(self) -> None:
        """Everyone is restored: what dead processes left behind will not be asked for again."""
        for process in self._forgotten:  # the last time: by now what was still on its way has come
            self._owner.pop(process, None)
        for process in sorted(self._dead):
            if process in self._owner:
                self._owner[process].send(ForgetProcess(process=process))
        self._forgotten, self._dead = self._dead, set()
