"""The agents as the server knows them: the processes they run, and orders for them, also while they are away."""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from relight.core.membership.members import Process
from relight.core.protocol.commands import Kill, ReleaseHost, Spawn, WorkerCommand
from relight.server.network.connection import Connection
from relight.wire import messages as msg
from relight.wire.connection.framing import encode_frame, encode_payload
from relight.wire.connection.outbox import Outbox

KEPT_UNASKED = 256  # an agent may say the end of a process twice


class Agent:
    """Outlives its connections: orders that come up while the agent is away are kept until it is back."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number  # 1: the first that joined; one that was lost and comes back is another one
        self.running: set[str] = set()  # ordered to start and not known to have ended
        self._connection: Connection | None = None
        self._outbox = Outbox()
        self.released = False  # its host was given back: it is to end
        self.life = ""  # of the agent's process, as it says
        self.received = 0  # counted messages of that life
        self._confirmed = 0  # of these, how many are confirmed

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def overflowed(self) -> bool:
        """True if orders for it were lost, because too many came up while it was away."""
        return self._outbox.overflowed

    def send(self, message: msgspec.Struct) -> None:
        """Send an order that must arrive, now or when the agent is back."""
        frame = self._outbox.put(message)
        if self._connection is not None:
            if self.received != self._confirmed:  # in the same breath
                frame = self._confirmation() + frame
            self._connection.send_frame(frame)

    def say(self, message: msgspec.Struct) -> None:
        """Send a message that matters only if the agent is connected."""
        if self._connection is not None:
            self._connection.send(message)

    def is_double(self, hello: msg.Hello) -> bool:
        """Return whether this is another agent with the name of one that is connected."""
        return self.connected and hello.life != self.life

    def recognise(self, hello: msg.Hello, life: str) -> str:
        """Continue the count of messages with an agent; return the controller's life as this agent knows it."""
        life = f"{life}.{self.number}"
        if hello.life != self.life:
            self.life, self.received = hello.life, 0
            self._outbox.begin_anew()
        elif hello.controller == life:
            self._outbox.confirm(hello.received)
        return life

    def attach(self, connection: Connection, present: tuple[str, ...]) -> tuple[str, ...]:
        """Use this connection from now on. Returns the processes whose end was never reported.

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
        """Return whether this is the agent's connection. Messages of an older one come again on the newer one."""
        return self._connection is connection

    def note_received(self) -> bool:
        """Count one of its messages as dealt with; return whether `tell_received` has become due."""
        was_due = self.received != self._confirmed
        self.received += 1
        return not was_due

    def tell_received(self) -> None:
        """Confirm all messages that have been dealt with, unless an order has done so meanwhile."""
        if self._connection is not None and self.received != self._confirmed:
            self._connection.send_frame(self._confirmation())

    def _confirmation(self) -> bytes:
        self._confirmed = self.received
        return encode_frame(msg.Received(count=self.received))

    def confirm(self, count: int) -> None:
        self._outbox.confirm(count)

    def detach(self, connection: Connection) -> bool:
        """Forget a connection that has ended; return False if a newer one has taken over already."""
        if self._connection is not connection:
            return False
        self._connection = None
        return True


class Agents:
    """All agents of the job, and which of them runs which process."""

    def __init__(self, staying: str = "") -> None:
        """`staying`: the agent of a host that does not leave before the job is over, as its controller cannot move."""
        self._staying = staying
        self._agents: dict[str, Agent] = {}
        self._owner: dict[str, Agent] = {}  # process -> the agent that was ordered to start it
        self._count = 0
        self._dead: set[str] = set()  # processes whose pages may still be asked for
        self._forgotten: set[str] = set()  # which their agents have been ordered to forget
        self._unasked: collections.deque[str] = collections.deque()  # the same of those that never held a rank

    def __iter__(self) -> Iterator[Agent]:
        return iter(self._agents.values())

    def __len__(self) -> int:
        return len(self._agents)

    def recall(self, lives: Mapping[str, str], processes: Iterable[Process]) -> None:
        """Restore after a restart: the agents that were connected, their processes, and which of these have ended.

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
        """Forget a lost agent and all that it ran: should it come back, it is a new one."""
        del self._agents[agent.name]
        self._owner = {process: owner for process, owner in self._owner.items() if owner is not agent}
        self._dead = {process for process in self._dead if process in self._owner}

    def release(self, command: ReleaseHost) -> None:
        """Let an agent end whose host is given back. That of a controller that cannot move stays, without processes."""
        agent = self._agents.get(command.agent)
        if agent is not None and agent.name != self._staying:
            agent.released = True
            agent.say(msg.StopAgent(why=command.why))

    def owns(self, agent: Agent, process: str) -> bool:
        """Return whether this agent was ordered to start this process, which may have ended since."""
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
        """Ask for the stack of a process; return False if its agent is not connected."""
        agent = self._owner.get(process)
        if agent is None or not agent.connected:
            return False
        agent.say(msg.TakeStack(process=process))
        return True

    def note_exit(self, agent: Agent, process: str) -> None:
        agent.running.discard(process)
        self._dead.add(process)

    def order(self, processes: Iterable[str], command: WorkerCommand | msg.StoreLost) -> None:
        """Send a command in one frame to each agent that runs any of these processes."""
        payload = encode_payload(command)
        names_of: dict[Agent, list[str]] = {}
        for name in processes:
            agent = self._owner.get(name)
            if agent is not None:
                names_of.setdefault(agent, []).append(name)
        for agent, names in names_of.items():
            agent.send(msg.ToWorkers(processes=tuple(names), payload=payload))

    def tell_store_lost(self, processes: Sequence[str]) -> None:
        """Ask these processes to say again what they had put into the store."""
        self.order(processes, msg.StoreLost())

    def reply(self, process: str, reply: msg.StoreReply) -> None:
        owner = self._owner.get(process)
        if owner is not None:
            owner.send(msg.ToWorkers(processes=(process,), payload=encode_payload(reply)))

    def copy_private(self, sources: Sequence[str], target: str, version: int) -> None:
        """Copy a rank's private state from the pages of its dead holders to that of its new one, before that restores.

        `sources` come newest last, so the newest overwrites what an older one may have left of the same version.
        """
        for source in sources:
            holder, taker = self._owner.get(source), self._owner[target]
            if holder is taker:
                taker.send(msg.CopyPrivate(source=source, target=target, version=version))
            elif holder is not None:
                holder.send(msg.TakePrivate(source=source, target=target, version=version))

    def take_private(self, sources: Sequence[str], target: str, version: int) -> None:
        """Ask for the private state of these dead holders of a rank, newest last, for a checkpoint."""
        for source in sources:
            holder = self._owner.get(source)
            if holder is not None:
                holder.send(msg.TakePrivate(source=source, target=target, version=version))

    def pass_on(self, state: msg.PrivateState) -> None:
        """Send private state to the host of its target, if there still is one."""
        taker = self._owner.get(state.target)
        if taker is not None:
            taker.send(state)

    def forget(self, process: str) -> None:
        """Have the agent forget a process that ended and never held a rank."""
        owner = self._owner.get(process)
        if owner is None:
            return
        self._dead.discard(process)
        owner.send(msg.ForgetProcess(process=process))
        self._unasked.append(process)
        if len(self._unasked) > KEPT_UNASKED:
            self._owner.pop(self._unasked.popleft(), None)

    def forget_dead(self) -> None:
        """Have agents forget the dead processes: all ranks are restored, so their private state is not needed again."""
        for process in self._forgotten:  # the last time: by now what was still on its way has come
            self._owner.pop(process, None)
        for process in sorted(self._dead):
            if process in self._owner:
                self._owner[process].send(msg.ForgetProcess(process=process))
        self._forgotten, self._dead = self._dead, set()
