"""The server: sockets and a clock around the core. Event -> journal -> core -> commands -> journal -> carry out.

It decides nothing. Everything runs in one thread, so the core sees one event at a time, in the order of the journal.
"""

import asyncio
import collections
import contextlib
import datetime
import functools
import importlib.metadata
import itertools
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from relight.chaos.plan import describe_fault
from relight.core.commands import (
    Assign,
    Begin,
    Command,
    EndJob,
    FallbackTier,
    Kill,
    Notice,
    Release,
    Restore,
    Resume,
    Save,
    Spawn,
    Stop,
    WindDown,
)
from relight.core.controller import Controller, ControllerSettings
from relight.core.detector import Detector, DetectorSettings
from relight.core.events import (
    AgentJoined,
    AgentLost,
    CommunicationStalled,
    ControllerRestarted,
    Event,
    ProcessDying,
    ProcessExited,
    ProcessStarted,
    ProcessSuspected,
    ShutdownRequested,
)
from relight.core.pace import SAMPLE_SECONDS, TRACED_RANKS, sample_seconds
from relight.core.position import Position
from relight.core.replay import replay
from relight.core.report import JobReport, StorageWait, encode_report
from relight.core.stragglers import Stragglers
from relight.errors import ProtocolError
from relight.server.agents import Agent, Agents
from relight.server.connection import MAX_STRANGERS, Connection, Gate
from relight.server.faults import ControllerFault
from relight.server.journal import Journal, JournalLine, records
from relight.server.observers import Observers
from relight.server.stack_capture import StackCaptures
from relight.server.status import StatusBoard
from relight.server.store import Store
from relight.server.trace import StatusFile, TraceFile, read_statuses
from relight.timeline.publications import Publications
from relight.wire.framing import decode, make_decoder, read_payload
from relight.wire.messages import (
    AgentUp,
    FromWorker,
    FromWorkers,
    Hello,
    JobEnded,
    ObserverUp,
    Pace,
    PrivateState,
    Received,
    Refused,
    Samples,
    StackTaken,
    StopAgent,
    StoreAdd,
    StoreRecall,
    StoreSet,
    StoreWait,
    TraceChunk,
    WorkerHello,
    WorkerUp,
    private_key,
)
from relight.wire.outbox import COUNTED
from relight.wire.settings import SUPERSEDED, JobSettings, part_of
from relight.wire.status import GpuStatus, PublishStatus, RestoreStatus
from relight.wire.tls import Tls

STATUS_SECONDS = 0.5
LIFE_SECONDS = 5.0  # between two signs of life to people who see only the files
LAUNCHER_GONE = "`relight run` was killed"
LONG_WRITE_SECONDS = 0.02  # for the journal: worth a word in the report
MAX_LONG_WRITES = 1000
AGENT_STOP_SECONDS = 10.0  # for the agents to end their processes once the job is over
FLUSH_SECONDS = 2.0
CONFIRM_SECONDS = 0.1  # until agents hear that what they said has arrived, if they are told nothing else meanwhile


class Server:
    """One job's server, from the first connection to EndJob. `resume`: go on where a dead one stopped."""

    def __init__(
        self,
        settings: JobSettings,
        token: bytes,
        *,
        tls: Tls | None = None,
        resume: bool = False,
        take_over: bool = False,
    ) -> None:
        """`take_over`: also the journal of a controller that lives, but is out of reach (see server.journal)."""
        self._settings = settings
        self._resume = resume
        self._take_over_journal = take_over
        self._run_dir = Path(settings.run_dir)
        self._core = Controller(part_of(ControllerSettings, settings))
        self._detector = Detector(part_of(DetectorSettings, settings))
        self._stragglers = Stragglers(settings.slow_factor, settings.slow_window_seconds)
        self._gate = Gate(token, settings, tls)
        self._agents = Agents()
        self._observers = Observers()
        self._store = Store(self._agents.reply)
        self._board = StatusBoard(settings.job, self._core)
        self._journal: Journal  # opened by `listen`
        self._trace = TraceFile(self._run_dir, self._observers.alarm)
        self._status = StatusFile(self._run_dir, self._observers.alarm)
        self._publications = Publications()
        self._stack_captures = StackCaptures(self._agents.ask_for_stack, self.feed)
        self._storage_waits: list[StorageWait] = []  # under this controller
        self._away: dict[str, asyncio.TimerHandle] = {}  # agents that may come back
        self._sample_seconds = SAMPLE_SECONDS  # that agents were told
        self._to_confirm: list[Agent] = []  # who hear, once all that has arrived is dealt with, that it has
        self._timer: asyncio.TimerHandle | None = None  # for the core's next deadline
        self._timer_deadline: float | None = None  # which that is
        self._started = time.monotonic()
        self._started_wall = time.time()
        self._ended: EndJob | None = None
        self._over = asyncio.Event()
        self._ended_before: set[str] = set()  # agents of a job that had ended before this controller was started
        self._fault = ControllerFault(life=0)
        self._observed = asyncio.Event()  # somebody has heard of the end
        self._agents_gone = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._decode_agent = make_decoder(AgentUp)
        self._decode_observer = make_decoder(ObserverUp)
        self._decode_worker = make_decoder(WorkerUp)

    # --- life ---------------------------------------------------------------------------------------------------
    async def listen(self, port: int = 0) -> tuple[str, int]:
        """Open the port, then the journal; returns the address for peers.

        `port` is one to try first, if the settings leave the choice to the system. Raises OSError if the port of the
        settings is taken, JournalInUse if another controller serves this job.
        """
        settings = self._settings
        self._listener = await self._open_port(settings.controller_port or port)
        self._journal = Journal(
            self._run_dir,
            settings,
            self._observers.tell,
            resume=self._resume,
            take_over=self._take_over_journal,
            give_way=_give_way,
        )
        lines = self._journal.found()
        first = next(lines, None)
        if first is not None:
            self._take_over(itertools.chain([first], lines), behind=self._journal.behind)
        await self._listener.start_serving()
        host, port = self._listener.sockets[0].getsockname()[:2]
        return host, port

    async def _open_port(self, port: int) -> asyncio.Server:
        address = self._settings.controller_address
        try:
            return await self._start_server(address, port)
        except OSError:
            if self._settings.controller_port:
                raise
        return await self._start_server(address, 0)

    async def _start_server(self, address: str, port: int) -> asyncio.Server:
        return await asyncio.start_server(
            self._on_connection, address, port, backlog=MAX_STRANGERS, start_serving=False
        )

    def _take_over(self, lines: Iterator[JournalLine], *, behind: bool) -> None:
        """Learn from the journal what the dead controller knew, then find out what has become of its orders."""
        passed = _Passed(lines)
        failure: EndJob | None = None
        try:
            self._core = replay(self._core.settings, records(passed))
        except msgspec.DecodeError:
            raise
        except Exception as error:  # as in `_obey`: it ended the job then, and does so again
            text = f"the controller failed ({error!r}); this is a defect in relight"
            failure = EndJob(error=text, details=traceback.format_exc(), why=text)
            collections.deque(passed, maxlen=0)
        written = datetime.datetime.fromisoformat(passed.wall).timestamp() if passed.wall else time.time()
        now = max(passed.last, passed.dated + time.time() - written)
        self._started, self._started_wall = time.monotonic() - now, written - passed.dated
        if failure is not None:
            self._end_job(failure)
            return
        self._fault = ControllerFault(life=self._core.job_stats.controller_restarts + 1)
        for status in read_statuses(self._run_dir):
            if isinstance(status, PublishStatus):
                self._publications.take(status)
        self._board = StatusBoard(self._settings.job, self._core)
        self._store.open(self._core.generation)
        lives = {name: self._core.job.hosts.life(name) for name in self._core.job.hosts.in_order()}
        self._agents.recall(lives, self._core.members.processes.values())
        if self._core.ended is None and behind:
            text = (
                "the controller died while its journal could not be written, so what the job has done since is not "
                "known. Resume from your last checkpoint once there is room on the disk"
            )
            self._core.job_stats.ended(text, now)
            self._core.job.ended = EndJob(error=text, details="", why=text)
        if self._core.ended is not None:
            if not passed.has_end:  # it died just before: whoever reads the journal is to find the end there
                self._record(now, (self._core.ended,))
            self._ended_before = {agent.name for agent in self._agents}
            self._end_job(self._core.ended)
            return
        self.feed(ControllerRestarted())
        ranks = tuple(self._core.rank_processes().values())
        self._store.recall(ranks)
        self._agents.tell_store_lost(ranks)
        for agent in self._agents:
            self._give_time(agent, "after the controller's restart")

    async def run(self) -> int:
        """Serve until the job has ended; returns the exit status."""
        ticker = asyncio.create_task(self._tick())
        await self._over.wait()
        ticker.cancel()
        if any(agent.connected for agent in self._agents) or self._ended_before:
            try:
                await asyncio.wait_for(self._agents_gone.wait(), AGENT_STOP_SECONDS)
            except TimeoutError:
                self._observers.tell("warning", f"an agent did not end within {AGENT_STOP_SECONDS:g} s")
        if self._resume:  # those who are to hear of the end may be on their way here
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._observed.wait(), FLUSH_SECONDS)
        if self._listener is not None:
            self._listener.close()
        await self._observers.finish(FLUSH_SECONDS)
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self._journal.close()
        return 0 if self._ended is not None and not self._ended.error else 1

    def shut_down(self, reason: str) -> None:
        """Somebody wants the job to end: a signal, or `relight run` by its observer connection."""
        if self._ended is not None:
            self._agents_gone.set()  # asked again: do not wait
            return
        version = self._board.committed()  # the core is told of steps only when something happens
        self.feed(ShutdownRequested(reason=reason, after_step=reason in ("SIGTERM", LAUNCHER_GONE), version=version))

    # --- the loop -----------------------------------------------------------------------------------------------
    def feed(self, event: Event) -> None:
        """Give one fact to the core and carry out what it orders."""
        if self._ended is not None:
            return
        now = self._now()
        self._journal.event(now, event)
        self._fault.pass_by("event", event)
        self._obey(lambda: self._core.handle(event, now), now)

    def _expire(self) -> None:
        self._timer = None
        deadline, now = self._core.next_deadline(), self._now()
        if self._ended is not None or deadline is None:
            return
        if now < deadline:  # the loop's clock is a little coarser than ours
            self._arm_timer(now)
            return
        self._journal.expiry(now)
        self._obey(lambda: self._core.expire(now), now)

    def _obey(self, decide: Callable[[], Sequence[Command]], now: float) -> None:
        try:
            commands = decide()
            refused = self._record(now, commands)
            if refused:
                commands = (EndJob(error=refused, details="", why=refused),)
            for command in commands:
                self._fault.pass_by("orders", command)
            for command in commands:
                self._carry_out(command)
                self._fault.pass_by("sent", command)
        except Exception as error:  # a defect of ours must not leave a job without anyone in charge
            text = f"the controller failed ({error!r}); this is a defect in relight"
            self._end_job(EndJob(error=text, details=traceback.format_exc(), why=text))
        self._arm_timer(now)

    def _record(self, now: float, commands: Sequence[Command]) -> str:
        """Into the journal; returns why they must not be given, or nothing."""
        since = time.monotonic()
        refused = self._journal.commands(now, commands)
        waited = time.monotonic() - since
        if waited >= LONG_WRITE_SECONDS and len(self._storage_waits) < MAX_LONG_WRITES:
            self._storage_waits.append(StorageWait(at_seconds=now, seconds=waited))
        return refused

    def _arm_timer(self, now: float) -> None:
        deadline = self._core.next_deadline() if self._ended is None else None
        if deadline == self._timer_deadline and self._timer is not None:
            return  # as after most reports
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_deadline = None, deadline
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - now), self._expire)

    def _now(self) -> float:
        return time.monotonic() - self._started

    # --- carrying out commands ----------------------------------------------------------------------------------
    def _carry_out(self, command: Command) -> None:
        match command:
            case Spawn():
                self._agents.spawn(command)
            case Kill():
                self._agents.kill(command)
            case Assign():
                self._store.open(command.generation)
                self._agents.order((command.process,), command)
            case Begin() | Stop():
                if isinstance(command, Begin):
                    self._write_coverage()
                self._store.open(command.generation)
                self._agents.order(self._core.audience(command.audience), command)
            case Restore():
                self._hand_over_private_state(command)
                self._agents.order(self._core.audience(command.audience), command)
            case Resume():
                self._agents.order(self._core.audience(command.audience), command)
                self._agents.forget_dead()
            case Save():
                for rank in sorted(set(command.absent) - set(command.derived)):
                    holders = self._core.predecessors.get(rank, ())
                    self._agents.take_private(holders, self._core.rank_processes()[command.rank], command.target)
                self._agents.order(self._core.audience(command.audience), command)
            case WindDown():
                self._agents.order(self._core.audience(command.audience), command)
            case Release():
                self._agents.order(self._core.audience(command.audience), command)
            case Notice():
                self._observers.tell(command.level, command.why)
            case EndJob():
                self._end_job(command)

    def _hand_over_private_state(self, restore: Restore) -> None:
        if restore.tier is not FallbackTier.REPLICA:
            return  # it comes with the rest, of an older version than any page has
        holders = self._core.rank_processes()
        for rank in restore.targets:
            self._agents.copy_private(self._core.predecessors.get(rank, ()), holders[rank], restore.target)

    def _publish_private(self, state: PrivateState, save: Save) -> None:
        """What a dead rank had for itself goes into the last checkpoint: to whoever writes that, through the store."""
        rank = next((rank for rank, names in self._core.predecessors.items() if state.source in names), None)
        if rank is not None and state.version == save.target:
            self._store.set(
                state.source, StoreSet(generation=save.generation, key=private_key(rank), value=state.payload)
            )

    def _end_job(self, command: EndJob) -> None:
        if self._ended is not None:
            return
        self._ended = command
        self._write_report()
        self._observers.send(JobEnded(error=command.error, details=command.details))
        if self._observers:
            self._observed.set()
        for agent in self._agents:
            agent.say(StopAgent(why=command.error or "training finished"))
        self._over.set()

    def _write_coverage(self) -> None:
        """Of a divided state, for programs: what people were told in words."""
        if self._core.coverage is not None:
            text = msgspec.json.format(msgspec.json.encode(self._core.coverage), indent=2)
            self._write(self._run_dir / "coverage.json", "the coverage", text + b"\n")

    def _account(self) -> JobReport:
        """Of the whole job, also where the core has kept only the newest of its failures."""
        report = self._core.report()
        if not self._core.job_stats.forgot:
            return report
        try:
            remember_all = functools.partial(Controller, full_account=True)
            return replay(self._core.settings, records(self._journal.so_far()), remember_all).report()
        except Exception as error:  # whatever it is: the job's end is not to be lost by it
            count = self._core.job_stats.failures.count
            text = f"only the newest of {count} failures are listed: the journal cannot be read ({error})"
            return msgspec.structs.replace(report, notices=(*report.notices, text))

    def _write_report(self) -> None:
        report = self._account()
        idle = [fault for fault in self._settings.plan.faults if fault not in self._core.faults_struck]
        for fault in idle:
            self._observers.tell("warning", f'planned, but did not happen: "{describe_fault(fault)}"')
        report = msgspec.structs.replace(
            report,
            job=self._settings.job,
            started_wall=self._started_wall,
            published=self._publications.report(),
            storage_waits=tuple(self._storage_waits),
            notices=(*report.notices, *(f'planned, but did not happen: "{describe_fault(f)}"' for f in idle)),
            error=self._ended.error if self._ended else "",
            versions={**_versions(), **report.versions},
        )
        self._write(self._run_dir / "report.json", "the report", encode_report(report))

    def _write(self, path: Path, what: str, text: bytes) -> None:
        """All of a file or nothing of it."""
        try:
            draft = path.with_suffix(".tmp")
            draft.write_bytes(text)
            draft.replace(path)
        except OSError as error:
            self._observers.alarm(f"{what} {path} cannot be written: {error.strerror or error}")

    # --- connections --------------------------------------------------------------------------------------------
    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(Connection(reader, writer)))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: Connection) -> None:
        try:
            hello = await self._gate.admit(connection)
            if isinstance(hello, str):
                self._refuse(f"refused a connection from {connection.peer}: {hello}")
            elif hello.role == "agent":
                await self._serve_agent(connection, hello)
            else:
                self._gate.welcome(connection, hello)
                await self._serve_observer(connection, hello.name)
        except ProtocolError as error:
            self._refuse(f"closed the connection from {connection.peer}: {error}")
        except Exception as error:
            traceback.print_exc()
            self._refuse(f"closed the connection from {connection.peer} after a defect of ours: {error!r}")
        finally:
            await connection.finish(FLUSH_SECONDS)

    def _refuse(self, text: str) -> None:
        """Note that something was refused, as often as a person can read."""
        now = self._now()
        if self._observers.tell_refusal(text, now):
            self._journal.note(now, text)

    async def _serve_observer(self, connection: Connection, name: str) -> None:
        self._observers.add(connection, name)
        try:
            if self._ended is not None:
                connection.send(JobEnded(error=self._ended.error, details=self._ended.details))
                self._observed.set()
            while (payload := await read_payload(connection.reader)) is not None:
                message = decode(self._decode_observer, payload)
                if isinstance(message, StopAgent):
                    self.shut_down(message.why)
        finally:
            self._observers.discard(connection)

    async def _tick(self) -> None:
        """Tell observers how the job is doing, and whoever looks at the files that it has a controller."""
        shown = time.monotonic()
        while True:
            self._observers.send(self._board.update(self._now()))
            if time.monotonic() - shown >= LIFE_SECONDS:
                shown = time.monotonic()
                self._journal.show_life()
            await asyncio.sleep(STATUS_SECONDS)

    async def _serve_agent(self, connection: Connection, hello: Hello) -> None:
        agent = self._agents.get(hello.name)
        if self._ended is not None:
            self._gate.welcome(connection, hello)
            connection.send(StopAgent(why="the job is over"))
            await self._await_end(connection)
            self._ended_before.discard(hello.name)
            self._note_agents_gone()
            return
        if agent is not None and agent.overflowed:
            connection.send(Refused(reason="this agent was away for so long that orders for it were lost"))
            return
        if agent is not None and agent.is_double(hello):
            connection.send(
                Refused(
                    reason=f"an agent named {hello.name} is here already; give this one another --name or --node-rank"
                )
            )
            return
        agent = self._welcome_agent(connection, hello)
        try:
            while (payload := await read_payload(connection.reader)) is not None:
                message = decode(self._decode_agent, payload)
                if not agent.speaks_through(connection):
                    return
                self._on_agent_message(agent, message)
                if isinstance(message, COUNTED) and agent.note_received():
                    self._confirm_soon(agent)
        finally:
            if agent.detach(connection):
                self._on_agent_away(agent)

    def _confirm_soon(self, agent: Agent) -> None:
        """One word for all that arrives until then, and most often none: it goes along with the next order."""
        if not self._to_confirm:
            asyncio.get_running_loop().call_later(CONFIRM_SECONDS, self._confirm)
        self._to_confirm.append(agent)

    def _confirm(self) -> None:
        agents, self._to_confirm = self._to_confirm, []
        for agent in agents:
            agent.tell_received()

    async def _await_end(self, connection: Connection) -> None:
        while await read_payload(connection.reader) is not None:
            pass

    def _welcome_agent(self, connection: Connection, hello: Hello) -> Agent:
        timer = self._away.pop(hello.name, None)
        if timer is not None:
            timer.cancel()
        agent = self._agents.get(hello.name)
        is_new = agent is None
        if agent is None:
            if not any(self._agents):  # the job's clock starts here
                self._started, self._started_wall = time.monotonic(), time.time()
            agent = self._agents.add(hello.name)
        # A controller that is new itself knows from the journal whom the dead one had heard last.
        restarted = agent.life not in ("", hello.life)
        life = agent.recognise(hello, self._gate.life)
        self._gate.welcome(connection, hello, life, agent.received)
        unseen = agent.attach(connection, hello.processes)
        self._set_pace(agent, hello.slots)
        if is_new:
            self.feed(AgentJoined(agent=hello.name, slots=hello.slots, life=hello.life))
        for process in unseen:
            evidence, now_ns = "ended while its agent was away", time.monotonic_ns()
            self._on_exit(
                agent,
                ProcessExited(
                    process=process, exit_status=None, evidence=evidence, position=Position(), noticed_ns=now_ns
                ),
            )
        if restarted:
            self.feed(AgentJoined(agent=hello.name, slots=hello.slots, life=hello.life))
        return agent

    def _set_pace(self, agent: Agent, slots: int) -> None:
        """How much this agent is to say; the others too, if it is one too many for what they were told."""
        seconds = sample_seconds(max(self._settings.nodes, len(self._agents)))
        if seconds != self._sample_seconds:
            self._sample_seconds = seconds
            self._detector.expect(seconds)
            for other in self._agents:
                other.say(Pace(sample_seconds=seconds, trace=(other.number - 1) * slots < TRACED_RANKS))
        else:
            agent.say(Pace(sample_seconds=seconds, trace=(agent.number - 1) * slots < TRACED_RANKS))

    def _exit_unseen(self, event: ProcessExited) -> ProcessExited:
        """It died together with its agent, and with both the last mapping of its private state."""
        position = msgspec.structs.replace(self._board.position(event.process), private_versions=(-1, -1))
        return msgspec.structs.replace(event, position=position)

    def _on_agent_away(self, agent: Agent) -> None:
        if self._ended is not None:
            self._note_agents_gone()
            return
        seconds = self._settings.agent_timeout_seconds
        if self._is_alone(agent):
            seconds = max(seconds, self._settings.controller_timeout_seconds)
        self._observers.tell("warning", f"lost the connection to agent {agent.name}; it has {seconds:g} s to come back")
        self._give_time(agent)

    def _note_agents_gone(self) -> None:
        if not self._ended_before and not any(agent.connected for agent in self._agents):
            self._agents_gone.set()

    def _is_alone(self, agent: Agent) -> bool:
        """Whether no other agent is here: nobody could take over what it runs, and its processes may well train on."""
        return not any(other.connected for other in self._agents if other is not agent)

    def _give_time(self, agent: Agent, since: str = "", waited: float = 0.0) -> None:
        """It is not here: it has a while to come back, as long as a controller has if it is the last one."""
        seconds = self._settings.agent_timeout_seconds
        loop = asyncio.get_running_loop()
        self._away[agent.name] = loop.call_later(seconds, self._miss_agent, agent, since, waited + seconds)

    def _miss_agent(self, agent: Agent, since: str, waited: float) -> None:
        if self._is_alone(agent) and waited < self._settings.controller_timeout_seconds:
            self._give_time(agent, since, waited)
            return
        evidence = " ".join(f"no connection to agent {agent.name} for {waited:g} s {since}".split())
        self._lose_agent(agent, evidence, waited)

    def _lose_agent(self, agent: Agent, evidence: str, waited: float) -> None:
        del self._away[agent.name]
        self._agents.remove(agent)
        # Its ranks may have trained on with the others until now: then nothing stood still.
        silent_seconds = min(waited, self._board.idle_seconds(agent.name))
        version = self._board.committed()
        self.feed(AgentLost(agent=agent.name, evidence=evidence, silent_seconds=silent_seconds, version=version))

    # --- messages -----------------------------------------------------------------------------------------------
    def _on_agent_message(self, agent: Agent, message: AgentUp) -> None:
        match message:
            case FromWorker():
                self._on_worker_message(agent, message)
            case FromWorkers():
                self._on_worker_messages(agent, message.messages)
            case Samples():
                self._on_samples(agent, message)
            case TraceChunk():
                self._trace.append(message)
            case GpuStatus():
                if message.agent == agent.name:
                    self._status.append(self._now(), message)
            case StackTaken():
                if self._runs(agent, message.process):
                    self._stack_captures.take(message)
            case ProcessExited():
                self._on_exit(agent, message)
            case ProcessStarted() | ProcessDying():
                if self._runs(agent, message.process):
                    self.feed(message)
            case Received():
                agent.confirm(message.count)
            case PrivateState():
                if not self._agents.owns(agent, message.source):
                    self._refuse(f"ignored private state from agent {agent.name} that another one holds")
                elif message.problem:
                    self.shut_down(f"rank-private state cannot be moved to another host: {message.problem}")
                elif self._core.saving_order is not None:
                    self._publish_private(message, self._core.saving_order)
                else:
                    self._agents.pass_on(message)
            case Hello():
                raise ProtocolError(f"agent {agent.name} said Hello twice")

    def _on_exit(self, agent: Agent, event: ProcessExited) -> None:
        if self._runs(agent, event.process):
            if event.exit_status is None and not event.position.stamp_ns:
                event = self._exit_unseen(event)
            self._agents.note_exit(agent, event.process)
            self._store.forget(event.process)
            self._board.forget(event.process)
            self.feed(event)
            if event.process not in self._core.members.processes:
                self._agents.forget(event.process)

    def _on_samples(self, agent: Agent, message: Samples) -> None:
        samples = tuple(sample for sample in message.samples if sample.process in agent.running)
        for sample in samples:
            self._board.observe(sample)
        members, now = self._core.rank_processes(), self._now()
        for event in self._detector.observe(samples, members, now):
            self._suspect(event)
        for slow in self._stragglers.observe(samples, members, self._core.rank_hosts, now):
            self.feed(slow)

    def _suspect(self, event: Event) -> None:
        """Before anyone is given up for a hang: ask what it was doing. A frozen process cannot say."""
        if isinstance(event, ProcessSuspected) and event.kind == "hang":
            process = self._core.members.processes.get(event.process)
            rank = None if process is None else process.rank
            self._stack_captures.begin(event, {event.process: "it" if rank is None else f"rank {rank}"})
        elif isinstance(event, CommunicationStalled):
            self._stack_captures.begin(event, {p: f"rank {rank}" for rank, p in self._core.rank_processes().items()})
        else:
            self.feed(event)

    def _on_worker_messages(self, agent: Agent, messages: Sequence[FromWorker]) -> None:
        """Reports of a host's ranks, in one go: one line of the journal each, and one write for all of them.

        Orders that one of them leads to are not given before it is written, and nothing is confirmed before all are.
        """
        with self._journal.gathered():
            for message in messages:
                self._on_worker_message(agent, message)

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
            case StoreRecall():
                self._store.recalled(process, message)
            case _ if message.process != process:
                self._refuse(f"ignored {type(message).__name__} of {message.process[:64]!r} that came from {process}")
            case PublishStatus() | RestoreStatus():
                self._status.append(self._now(), message)
                self._board.take(message)
                if isinstance(message, PublishStatus):
                    self._publications.take(message)
            case _:
                self.feed(message)

    def _runs(self, agent: Agent, process: str) -> bool:
        """Whether this agent may speak about this process."""
        if process in agent.running:
            return True
        if not self._agents.owns(agent, process):
            self._refuse(f"ignored a message of agent {agent.name} about {process[:64]!r}, which it does not run")
        return False


class _Passed:
    """Lines that pass by, when the newest of them was written, and whether the job's end was among them."""

    def __init__(self, lines: Iterator[JournalLine]) -> None:
        self._lines = lines
        self.last = 0.0  # `now` of the newest
        self.dated, self.wall = 0.0, ""  # `now` of the newest that has a wall time, and that time
        self.has_end = False

    def __iter__(self) -> Iterator[JournalLine]:
        for line in self._lines:
            self.last = line.now
            self.has_end |= isinstance(line.command, EndJob)
            if line.wall:
                self.dated, self.wall = line.now, line.wall
            yield line


def _give_way() -> None:
    """The job has another controller. Not a word to anyone: agents that still listen here must not obey two of them."""
    print("relight: another controller has taken over this job; this one ends", file=sys.stderr, flush=True)
    os._exit(SUPERSEDED)


def _versions() -> dict[str, str]:
    """Of what the workers run, without loading it."""
    found = {"python": platform.python_version()}
    for name in ("relight", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
