"""Routes messages: each one that an agent or a worker sends goes to the part of the server that it concerns."""

from collections.abc import Sequence

import msgspec

from relight.core.controller import Controller
from relight.core.events import ProcessDying, ProcessExited, ProcessStarted
from relight.core.position import Position
from relight.errors import ProtocolError
from relight.server.agents import Agent, Agents
from relight.server.clock import JobClock
from relight.server.driver import Driver
from relight.server.health import HealthMonitor
from relight.server.journal import Journal
from relight.server.private_state import PrivateStates
from relight.server.refusals import Refusals
from relight.server.shutdown import Shutdown
from relight.server.status import StatusBoard
from relight.server.store import Store
from relight.server.trace import StatusFile, TraceFile
from relight.timeline.publications import Publications
from relight.wire.framing import decode, make_decoder
from relight.wire.messages import (
    AgentUp,
    FromWorker,
    FromWorkers,
    Hello,
    PrivateState,
    Received,
    Samples,
    StackTaken,
    StoreAdd,
    StoreRecall,
    StoreSet,
    StoreWait,
    TraceChunk,
    WorkerHello,
    WorkerUp,
)
from relight.wire.status import GpuStatus, PublishStatus, RestoreStatus


class WorkerRouter:
    """Takes what workers say, through the agents that run them."""

    def __init__(
        self,
        driver: Driver,
        agents: Agents,
        store: Store,
        board: StatusBoard,
        publications: Publications,
        status: StatusFile,
        journal: Journal,
        clock: JobClock,
        refusals: Refusals,
    ) -> None:
        self._driver = driver
        self._agents = agents
        self._store = store
        self._board = board
        self._publications = publications
        self._status = status
        self._journal = journal
        self._clock = clock
        self._refusals = refusals
        self._decode = make_decoder(WorkerUp)

    def take_all(self, agent: Agent, messages: Sequence[FromWorker]) -> None:
        """Take the reports of a host's ranks together: one journal line each, and one write for all of them.

        Commands that one of them leads to are not sent before it is written, and nothing is confirmed before all are.
        """
        with self._journal.gathered():
            for message in messages:
                self.take(agent, message)

    def take(self, agent: Agent, relayed: FromWorker) -> None:
        """Take one message of a worker."""
        process = relayed.process
        if not self.may_speak_for(agent, process):
            return
        try:
            message = decode(self._decode, relayed.payload)
        except ProtocolError as error:
            self._refusals.note(f"ignored a message of {process}: {error}")
            return
        match message:
            case WorkerHello():
                pass  # meant for the agent
            case StoreSet():
                problem = self._store.set(process, message)
                if problem:
                    self._refusals.note(problem)
            case StoreAdd():
                self._store.add(process, message)
            case StoreWait():
                self._store.wait(process, message)
            case StoreRecall():
                self._store.recalled(process, message)
            case _ if message.process != process:
                self._refusals.note(
                    f"ignored {type(message).__name__} of {message.process[:64]!r} that came from {process}"
                )
            case PublishStatus() | RestoreStatus():
                self._status.append(self._clock.now(), message)
                self._board.take(message)
                if isinstance(message, PublishStatus):
                    self._publications.add(message)
            case _:
                self._driver.feed(message)

    def may_speak_for(self, agent: Agent, process: str) -> bool:
        """Return whether this agent runs this process; note a refusal if it never did."""
        if process in agent.running:
            return True
        if not self._agents.owns(agent, process):
            self._refusals.note(
                f"ignored a message of agent {agent.name} about {process[:64]!r}, which it does not run"
            )
        return False


class AgentRouter:
    """Takes what agents say."""

    def __init__(
        self,
        core: Controller,
        driver: Driver,
        agents: Agents,
        store: Store,
        board: StatusBoard,
        health: HealthMonitor,
        workers: WorkerRouter,
        private: PrivateStates,
        trace: TraceFile,
        status: StatusFile,
        clock: JobClock,
        refusals: Refusals,
        shutdown: Shutdown,
    ) -> None:
        self._core = core
        self._driver = driver
        self._agents = agents
        self._store = store
        self._board = board
        self._health = health
        self._workers = workers
        self._private = private
        self._trace = trace
        self._status = status
        self._clock = clock
        self._refusals = refusals
        self._shutdown = shutdown

    def take(self, agent: Agent, message: AgentUp) -> None:
        """Take one message of an agent."""
        match message:
            case FromWorker():
                self._workers.take(agent, message)
            case FromWorkers():
                self._workers.take_all(agent, message.messages)
            case Samples():
                self._health.observe(tuple(sample for sample in message.samples if sample.process in agent.running))
            case TraceChunk():
                self._trace.append(message)
            case GpuStatus():
                if message.agent == agent.name:
                    self._status.append(self._clock.now(), message)
            case StackTaken():
                if self._workers.may_speak_for(agent, message.process):
                    self._health.take_stack(message)
            case ProcessExited():
                self.take_exit(agent, message)
            case ProcessStarted() | ProcessDying():
                if self._workers.may_speak_for(agent, message.process):
                    self._driver.feed(message)
            case Received():
                agent.confirm(message.count)
            case PrivateState():
                self._take_private(agent, message)
            case Hello():
                raise ProtocolError(f"agent {agent.name} said Hello twice")

    def take_exit(self, agent: Agent, event: ProcessExited) -> None:
        """Take the end of a process."""
        if not self._workers.may_speak_for(agent, event.process):
            return
        if event.exit_status is None and not event.position.stamp_ns:
            event = self._complete(event)
        self._agents.note_exit(agent, event.process)
        self._store.forget(event.process)
        self._board.forget(event.process)
        self._driver.feed(event)
        if event.process not in self._core.members.processes:
            self._agents.forget(event.process)

    def _complete(self, event: ProcessExited) -> ProcessExited:
        """Add the last known position of a process that died with its agent, and so with its private state."""
        position: Position = msgspec.structs.replace(self._board.position(event.process), private_versions=(-1, -1))
        return msgspec.structs.replace(event, position=position)

    def _take_private(self, agent: Agent, state: PrivateState) -> None:
        if not self._agents.owns(agent, state.source):
            self._refusals.note(f"ignored private state from agent {agent.name} of a process that it does not run")
        elif state.problem:
            self._shutdown.request(f"rank-private state cannot be moved to another host: {state.problem}")
        else:
            self._private.pass_on(state)
