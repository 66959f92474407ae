"""The server: sockets and a clock around the core. Event -> journal -> core -> commands -> journal -> carry out.

It decides nothing. Everything runs in one thread, so the core sees one event at a time, in the order of the journal.
"""

import asyncio
import platform
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec

from relight.core.commands import (
    Assign,
    Begin,
    Command,
    EndJob,
    Kill,
    Notice,
    Release,
    Restore,
    Resume,
    Spawn,
    Stop,
    WorkerCommand,
)
from relight.core.controller import Controller, ControllerSettings
from relight.core.detector import Detector, DetectorSettings
from relight.core.events import AgentJoined, AgentLost, Event, ProcessExited, ProcessStarted, ShutdownRequested
from relight.core.report import encode_report
from relight.errors import ProtocolError
from relight.server.agents import Agent
from relight.server.connection import Connection, Gate
from relight.server.journal import Journal
from relight.server.status import StatusBoard
from relight.server.store import Store
from relight.server.trace import TraceFile
from relight.wire.framing import decode, encode_payload, make_decoder, read_payload
from relight.wire.messages import (
    AgentUp,
    CopyPrivate,
    ForgetProcess,
    FromWorker,
    Hello,
    JobEnded,
    NoticeUpdate,
    ObserverUp,
    Samples,
    StopAgent,
    StoreAdd,
    StoreReply,
    StoreSet,
    StoreWait,
    ToWorkers,
    TraceChunk,
    WorkerHello,
    WorkerUp,
)
from relight.wire.settings import JobSettings

STATUS_SECONDS = 0.25
AGENT_STOP_SECONDS = 10.0  # for the agents to end their processes once the job is over
FLUSH_SECONDS = 2.0
REFUSALS_TOLD_PER_SECOND = 5  # a hostile peer must not flood the terminal


class Server:
    """One job's server, from the first connection to EndJob."""

    def __init__(self, settings: JobSettings, token: bytes) -> None:
        self._settings = settings
        self._run_dir = Path(settings.run_dir)
        self._core = Controller(controller_settings(settings))
        self._detector = Detector(detector_settings(settings))
        self._gate = Gate(token, settings.job)
        self._store = Store(self._reply_to_worker)
        self._board = StatusBoard(settings.job, self._core)
        self._trace = TraceFile(self._run_dir, self._alarm)
        self._agents: dict[str, Agent] = {}
        self._observers: set[Connection] = set()
        self._owner: dict[str, Agent] = {}  # process -> the agent that was ordered to start it
        self._dead: set[str] = set()  # processes whose pages may still be asked for
        self._away: dict[str, asyncio.TimerHandle] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._started = time.monotonic()
        self._started_wall = time.time()
        self._unheard: list[NoticeUpdate] = []  # said before anyone was there to hear it
        self._refusals: list[float] = []
        self._ended: EndJob | None = None
        self._over = asyncio.Event()
        self._agents_gone = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._journal: Journal  # opened by `listen`
        self._decode_agent = make_decoder(AgentUp)
        self._decode_observer = make_decoder(ObserverUp)
        self._decode_worker = make_decoder(WorkerUp)

    # --- life ---------------------------------------------------------------------------------------------------
    async def listen(self) -> tuple[str, int]:
        """Open the port, then the journal; returns the address for peers. Raises OSError if the port is taken."""
        settings = self._settings
        self._server = await asyncio.start_server(
            self._serve, settings.controller_address, settings.controller_port, backlog=128, start_serving=False
        )
        self._journal = Journal(self._run_dir / "journal.jsonl", settings, self._alarm)
        await self._server.start_serving()
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def run(self) -> int:
        """Serve until the job has ended; returns the exit status."""
        ticker = asyncio.create_task(self._tick())
        await self._over.wait()
        ticker.cancel()
        if any(agent.connected for agent in self._agents.values()):
            try:
                await asyncio.wait_for(self._agents_gone.wait(), AGENT_STOP_SECONDS)
            except TimeoutError:
                self._tell("warning", f"an agent did not end its processes within {AGENT_STOP_SECONDS:g} s")
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(observer.finish(FLUSH_SECONDS) for observer in list(self._observers)))
        for agent in self._agents.values():
            agent.abort()
        self._journal.close()
        return 0 if self._ended is not None and not self._ended.error else 1

    def shut_down(self, reason: str) -> None:
        """Somebody wants the job to end (a signal, or `relight run` by its observer connection)."""
        if self._ended is not None:
            self._agents_gone.set()  # asked again: do not wait
            return
        self.feed(ShutdownRequested(reason=reason))

    # --- the loop -----------------------------------------------------------------------------------------------
    def feed(self, event: Event) -> None:
        """Give one fact to the core and carry out what it orders."""
        if self._ended is not None:
            return
        now = self._now()
        self._journal.event(now, event)
        try:
            self._obey(self._core.handle(event, now), now)
        except Exception:
            self._give_up(f"the controller failed on {type(event).__name__}")

    def _expire(self) -> None:
        self._timer = None
        deadline, now = self._core.next_deadline(), self._now()
        if self._ended is not None or deadline is None:
            return
        if now >= deadline:
            self._journal.expiry(now)
            try:
                self._obey(self._core.expire(now), now)
            except Exception:
                self._give_up("the controller failed on a deadline")
        else:
            self._arm_timer(now)

    def _obey(self, commands: Sequence[Command], now: float) -> None:
        self._journal.commands(now, commands)
        for command in commands:
            self._carry_out(command)
        self._arm_timer(now)

    def _arm_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._core.next_deadline()
        self._timer = None
        if deadline is not None and self._ended is None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - now), self._expire)

    def _now(self) -> float:
        return time.monotonic() - self._started

    def _give_up(self, what: str) -> None:
        """A defect of ours must not leave a job without anyone in charge: end it, loudly."""
        self._end_job(
            EndJob(error=f"{what}; this is a defect in relight", details=traceback.format_exc(), why="defect")
        )

    # --- carrying out commands ----------------------------------------------------------------------------------
    def _carry_out(self, command: Command) -> None:
        match command:
            case Spawn():
                agent = self._agents[command.agent]
                agent.running.add(command.process)
                self._owner[command.process] = agent
                agent.send(command)
            case Kill():
                self._owner[command.process].send(command)
            case Assign():
                self._store.open(command.generation)
                self._send_to((command.process,), command)
            case Begin() | Stop():
                self._store.open(command.generation)
                self._send_to(self._core.audience(command.audience), command)
            case Restore():
                self._hand_over_private_state(command)
                self._send_to(self._core.audience(command.audience), command)
            case Resume():
                self._send_to(self._core.audience(command.audience), command)
                self._forget_dead_processes()
            case Release():
                self._send_to(self._core.audience(command.audience), command)
            case Notice():
                self._tell(command.level, command.why)
            case EndJob():
                self._end_job(command)

    def _send_to(self, processes: Sequence[str], command: WorkerCommand) -> None:
        """One frame for each agent that runs any of these processes."""
        payload = encode_payload(command)
        for agent in self._agents.values():
            names = tuple(name for name in processes if self._owner.get(name) is agent)
            if names:
                agent.send(ToWorkers(processes=names, payload=payload))

    def _hand_over_private_state(self, restore: Restore) -> None:
        """A rank's private state lies beside the dead process's page; its new holder needs it before it restores."""
        holders = self._core.rank_processes()
        for rank in restore.targets:
            target = holders[rank]
            # Newest last: it overwrites what an older predecessor may have left of the same version.
            for source in self._core.predecessors.get(rank, ()):
                self._owner[target].send(CopyPrivate(source=source, target=target, version=restore.target))

    def _forget_dead_processes(self) -> None:
        """Everyone is restored: what dead processes left behind will not be asked for again."""
        for process in sorted(self._dead):
            self._owner[process].send(ForgetProcess(process=process))
        self._dead.clear()

    def _end_job(self, command: EndJob) -> None:
        if self._ended is not None:
            return
        self._ended = command
        self._write_report()
        for observer in self._observers:
            observer.send(JobEnded(error=command.error, details=command.details))
        for agent in self._agents.values():
            agent.send(StopAgent(why=command.error or "training finished"))
        self._over.set()

    def _write_report(self) -> None:
        report = msgspec.structs.replace(
            self._core.report(),
            job=self._settings.job,
            started_wall=self._started_wall,
            error=self._ended.error if self._ended else "",
            versions={"python": platform.python_version(), **self._core.report().versions},
        )
        path = self._run_dir / "report.json"
        try:
            draft = path.with_suffix(".tmp")
            draft.write_bytes(encode_report(report))
            draft.replace(path)
        except OSError as error:
            self._tell("error", f"the report {path} cannot be written: {error.strerror or error}")

    # --- people -------------------------------------------------------------------------------------------------
    def _tell(self, level: str, text: str) -> None:
        update = NoticeUpdate(level=level, text=text)
        if not self._observers and len(self._unheard) < 100:
            self._unheard.append(update)
        for observer in self._observers:
            observer.send(update)

    def _alarm(self, text: str) -> None:
        self._tell("error", text)

    def _refuse(self, text: str) -> None:
        """Note that something was refused; on the terminal only as often as a person can read."""
        now = self._now()
        self._refusals = [told for told in self._refusals if now - told < 1.0]
        if len(self._refusals) < REFUSALS_TOLD_PER_SECOND:
            self._refusals.append(now)
            self._journal.note(now, text)
            self._tell("warning", text)

    async def _tick(self) -> None:
        while True:
            update = self._board.update(self._now())
            for observer in self._observers:
                observer.send(update)
            await asyncio.sleep(STATUS_SECONDS)

    # --- connections --------------------------------------------------------------------------------------------
    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        try:
            hello = await self._gate.admit(connection)
            if isinstance(hello, str):
                self._refuse(f"refused a connection from {_peer_name(writer)}: {hello}")
            elif hello.role == "agent":
                await self._serve_agent(connection, hello)
            else:
                await self._serve_observer(connection)
        except ProtocolError as error:
            self._refuse(f"closed the connection from {_peer_name(writer)}: {error}")
        except Exception as error:
            traceback.print_exc()
            self._refuse(f"closed the connection from {_peer_name(writer)} after a defect of ours: {error!r}")
        finally:
            await connection.finish(FLUSH_SECONDS)

    async def _serve_observer(self, connection: Connection) -> None:
        self._observers.add(connection)
        try:
            for update in self._unheard:
                connection.send(update)
            self._unheard.clear()
            if self._ended is not None:
                connection.send(JobEnded(error=self._ended.error, details=self._ended.details))
            while (payload := await read_payload(connection.reader)) is not None:
                message = decode(self._decode_observer, payload)
                if isinstance(message, StopAgent):
                    self.shut_down(message.why)
        finally:
            self._observers.discard(connection)

    async def _serve_agent(self, connection: Connection, hello: Hello) -> None:
        if self._ended is not None:
            connection.send(StopAgent(why="the job is over"))
            return
        agent = self._welcome_agent(connection, hello)
        try:
            while (payload := await read_payload(connection.reader)) is not None:
                self._on_agent_message(agent, decode(self._decode_agent, payload))
        finally:
            if agent.detach(connection):
                self._on_agent_away(agent)

    def _welcome_agent(self, connection: Connection, hello: Hello) -> Agent:
        timer = self._away.pop(hello.name, None)
        if timer is not None:
            timer.cancel()
        agent = self._agents.get(hello.name)
        if agent is None:
            if not self._agents:  # the job's clock starts here
                self._started, self._started_wall = time.monotonic(), time.time()
            agent = self._agents[hello.name] = Agent(hello.name, hello.slots)
            agent.attach(connection, hello.processes)
            self.feed(AgentJoined(agent=hello.name, slots=hello.slots))
        else:
            for process in agent.attach(connection, hello.processes):
                self._on_exit(agent, _exit_unseen(process, self._board))
        for process in hello.processes:
            if process not in agent.running:
                agent.send(Kill(process=process, why="this job does not know it"))
        return agent

    def _on_agent_away(self, agent: Agent) -> None:
        if self._ended is not None:
            if not any(other.connected for other in self._agents.values()):
                self._agents_gone.set()
            return
        seconds = self._settings.agent_timeout_seconds
        self._tell("warning", f"lost the connection to agent {agent.name}; it has {seconds:g} s to come back")
        evidence = f"no connection to agent {agent.name} for {seconds:g} s"
        self._away[agent.name] = asyncio.get_running_loop().call_later(seconds, self._lose_agent, agent, evidence)

    def _lose_agent(self, agent: Agent, evidence: str) -> None:
        del self._away[agent.name], self._agents[agent.name]
        self.feed(AgentLost(agent=agent.name, evidence=evidence))

    # --- messages -----------------------------------------------------------------------------------------------
    def _on_agent_message(self, agent: Agent, message: AgentUp) -> None:
        match message:
            case FromWorker():
                self._on_worker_message(agent, message)
            case Samples():
                self._on_samples(agent, message)
            case TraceChunk():
                self._trace.append(message)
            case ProcessExited():
                self._on_exit(agent, message)
            case ProcessStarted():
                if self._runs(agent, message.process):
                    self.feed(message)
            case Hello():
                raise ProtocolError(f"agent {agent.name} said Hello twice")

    def _on_exit(self, agent: Agent, event: ProcessExited) -> None:
        if self._runs(agent, event.process):
            agent.running.discard(event.process)
            self._dead.add(event.process)
            self._store.forget(event.process)
            self._board.forget(event.process)
            self.feed(event)

    def _on_samples(self, agent: Agent, message: Samples) -> None:
        samples = tuple(sample for sample in message.samples if sample.process in agent.running)
        for sample in samples:
            self._board.observe(sample)
        for event in self._detector.observe(samples, self._core.rank_processes(), self._now()):
            self.feed(event)

    def _on_worker_message(self, agent: Agent, relayed: FromWorker) -> None:
        process = relayed.process
        if not self._runs(agent, process):
            return
        try:
            message = decode(self._decode_worker, relayed.payload)
        except ProtocolError as error:
            self._refuse(f"ignored a message of {process}: {error}")
            return
        match message:
            case WorkerHello():
                pass  # meant for the agent
            case StoreSet():
                problem = self._store.set(process, message)
                if problem:
                    self._refuse(problem)
            case StoreAdd():
                self._store.add(process, message)
            case StoreWait():
                self._store.wait(process, message)
            case _ if message.process != process:
                self._refuse(f"ignored {type(message).__name__} of {message.process} that came from {process}")
            case _:
                self.feed(message)

    def _runs(self, agent: Agent, process: str) -> bool:
        """Whether this agent may speak about this process."""
        if process in agent.running:
            return True
        if self._owner.get(process) is not agent:
            self._refuse(f"ignored a message of agent {agent.name} about {process[:64]!r}, which it does not run")
        return False

    def _reply_to_worker(self, process: str, reply: StoreReply) -> None:
        self._owner[process].send(ToWorkers(processes=(process,), payload=encode_payload(reply)))


def controller_settings(settings: JobSettings) -> ControllerSettings:
    """The part of the job's settings that the core decides by."""
    return ControllerSettings(**{name: getattr(settings, name) for name in ControllerSettings.__struct_fields__})


def detector_settings(settings: JobSettings) -> DetectorSettings:
    """The part of the job's settings that the detector judges by."""
    return DetectorSettings(**{name: getattr(settings, name) for name in DetectorSettings.__struct_fields__})


def _exit_unseen(process: str, board: StatusBoard) -> ProcessExited:
    """It died together with its agent, and with both the last mapping of its private state."""
    return ProcessExited(
        process=process,
        exit_status=None,
        evidence="it ended while its agent was away",
        position=msgspec.structs.replace(board.position(process), private_versions=(-1, -1)),
        noticed_ns=time.monotonic_ns(),
    )


def _peer_name(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "an unknown peer"
