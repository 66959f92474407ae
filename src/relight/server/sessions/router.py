"""Routes messages: each one that an agent or a worker sends goes to the part of the server that it concerns."""

from collections.abc import Sequence

import msgspec

from relight.core.protocol.events import HostFaulty, ProcessDying, ProcessExited, ProcessStarted
from relight.core.protocol.position import Position
from relight.errors import ProtocolError
from relight.server.job.driver import Driver
from relight.server.job.job import Job
from relight.server.job.private_state import PrivateStates
from relight.server.network.agents import Agent
from relight.server.records.trace import StatusFile, TraceFile
from relight.server.sessions.health import HealthMonitor
from relight.server.sessions.shutdown import Shutdown
from relight.wire import messages as msg
from relight.wire.connection.framing import decode, make_decoder
from relight.wire.status import GpuStatus, PublishStatus, RestoreStatus


class WorkerRouter:
    """Takes what workers say, through the agents that run them."""

    def __init__(self, job: Job, driver: Driver, status: StatusFile) -> None:
        self._job = job
        self._driver = driver
        self._status = status
        self._decode = make_decoder(msg.WorkerUp)

    def take_all(self, agent: Agent, messages: Sequence[msg.FromWorker]) -> None:
        """Take the reports of a host's ranks together: one journal line each, and one write for all of them.

        Commands that one of them leads to are not sent before it is written, and nothing is confirmed before all are.
        """
        with self._job.journal.gathered():
            for message in messages:
                self.take(agent, message)

    def take(self, agent: Agent, relayed: msg.FromWorker) -> None:
        """Take one message of a worker."""
        process = relayed.process
        if not self.may_speak_for(agent, process):
            return
        try:
            message = decode(self._decode, relayed.payload)
        except ProtocolError as error:
            self._job.refusals.note(f"ignored a message of {process}: {error}")
            return
        match message:
            case msg.WorkerHello():
                pass  # meant for the agent
            case msg.StoreSet():
                problem = self._job.store.set(process, message)
                if problem:
                    self._job.refusals.note(problem)
            case msg.StoreAdd():
                self._job.store.add(process, message)
            case msg.StoreWait():
                self._job.store.wait(process, message)
            case msg.StoreRecall():
                self._job.store.recalled(process, message)
            case _ if message.process != process:
                self._job.refusals.note(
                    f"ignored {type(message).__name__} of {message.process[:64]!r} that came from {process}"
                )
            case PublishStatus() | RestoreStatus():
                self._status.append(self._job.clock.now(), message)
                self._job.board.take(message)
                if isinstance(message, PublishStatus):
                    self._job.publications.add(message)
            case _:
                self._driver.feed(message)

    def may_speak_for(self, agent: Agent, process: str) -> bool:
        """Return whether this agent runs this process; note a refusal if it never did."""
        if process in agent.running:
            return True
        if not self._job.agents.owns(agent, process):
            self._job.refusals.note(
                f"ignored a message of agent {agent.name} about {process[:64]!r}, which it does not run"
            )
        return False


class AgentRouter:
    """Takes what agents say."""

    def __init__(
        self,
        job: Job,
        driver: Driver,
        health: HealthMonitor,
        workers: WorkerRouter,
        private: PrivateStates,
        trace: TraceFile,
        status: StatusFile,
        shutdown: Shutdown,
    ) -> None:
        self._job = job
        self._driver = driver
        self._health = health
        self._workers = workers
        self._private = private
        self._trace = trace
        self._status = status
        self._shutdown = shutdown

    def take(self, agent: Agent, message: msg.AgentUp) -> None:
        """Take one message of an agent."""
        match message:
            case msg.FromWorker():
                self._workers.take(agent, message)
            case msg.FromWorkers():
                self._workers.take_all(agent, message.messages)
            case msg.Samples():
                self._health.observe(tuple(sample for sample in message.samples if sample.process in agent.running))
            case msg.TraceChunk():
                self._trace.append(message)
            case GpuStatus():
                if message.agent == agent.name:
                    self._status.append(self._job.clock.now(), message)
            case msg.StackTaken():
                if self._workers.may_speak_for(agent, message.process):
                    self._health.take_stack(message)
            case ProcessExited():
                self.take_exit(agent, message)
            case ProcessStarted() | ProcessDying():
                if self._workers.may_speak_for(agent, message.process):
                    self._driver.feed(message)
            case HostFaulty():
                if message.agent == agent.name:
                    self._driver.feed(message)
            case msg.Received():
                agent.confirm(message.count)
            case msg.PrivateState():
                self._take_private(agent, message)
            case msg.Hello():
                raise ProtocolError(f"agent {agent.name} said Hello twice")

    def take_exit(self, agent: Agent, event: ProcessExited) -> None:
        """Take the end of a process."""
        if not self._workers.may_speak_for(agent, event.process):
            return
        if event.exit_status is None and not event.position.stamp_ns:
            event = self._complete(event)
        self._job.agents.note_exit(agent, event.process)
        self._job.store.forget(event.process)
        self._job.board.forget(event.process)
        self._driver.feed(event)
        if event.process not in self._job.core.members.processes:
            self._job.agents.forget(event.process)

    def _complete(self, event: ProcessExited) -> ProcessExited:
        """Add the last known position of a process that died with its agent, and so with its private state."""
        position: Position = msgspec.structs.replace(self._job.board.position(event.process), private_versions=(-1, -1))
        return msgspec.structs.replace(event, position=position)

    def _take_private(self, agent: Agent, state: msg.PrivateState) -> None:
        if not self._job.agents.owns(agent, state.source):
            self._job.refusals.note(f"ignored private state from agent {agent.name} of a process that it does not run")
        elif state.problem:
            self._shutdown.request(f"rank-private state cannot be moved to another host: {state.problem}")
        else:
            self._private.pass_on(state)
