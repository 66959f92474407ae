"""The agent of one node: an event loop between the controller and this node's processes. It decides nothing."""

import asyncio
import contextlib
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from relight.agent.adoption import adopt, kill_unadoptable, open_pages, open_shared_barrier
from relight.agent.controller_connection import ControllerConnection
from relight.agent.gpus import Gpus
from relight.agent.link import MAX_RELAYED_BYTES, Mailbox, Reception
from relight.agent.output import Output, Printer
from relight.agent.page import Page, Pages
from relight.agent.probes import MemoryKills, start_time
from relight.agent.process import STATUS_UNKNOWN, Launch, Process, spawn
from relight.agent.process_table import ProcessTable, Record
from relight.agent.stacks import NoStack, take_stack
from relight.core.commands import Assign, Kill, Spawn
from relight.core.events import ProcessDying, ProcessExited, ProcessStarted
from relight.core.gathering import HOLD_SECONDS, Gathering, subject
from relight.core.pace import SAMPLE_SECONDS
from relight.core.position import Position
from relight.errors import ProtocolError
from relight.wire.framing import decode, encode_frame, make_decoder
from relight.wire.messages import (
    PROTOCOL_VERSION,
    CopyPrivate,
    ForgetProcess,
    FromWorker,
    FromWorkers,
    Hello,
    Pace,
    PrivateState,
    Received,
    Sample,
    Samples,
    StackTaken,
    StopAgent,
    TakePrivate,
    TakeStack,
    ToWorkers,
    TraceChunk,
    Welcome,
    WorkerHello,
)
from relight.wire.outbox import COUNTED, Outbox
from relight.wire.shared_barrier import MAX_RANKS, SharedBarrier
from relight.wire.stacks import ALL_STACKS
from relight.wire.status import Gpu, GpuStatus
from relight.wire.tls import Tls

LOOK_SECONDS = 0.1  # between two looks at a process that was stopped, or whose stop nobody tells this agent
TRACE_SECONDS = 0.95  # between two reports of phases at least; they go with a sample
GPU_SECONDS = 5.0  # between two looks at the health of GPUs, if there are any
ADDRESS_SECONDS = 2.0  # between two looks whether the job has a controller elsewhere
END_SECONDS = 10.0  # for killed processes to be gone
FLUSH_SECONDS = 2.0
CONFIRM_SECONDS = 0.1  # until an order is confirmed, if nothing else is said meanwhile
RECONNECT_SECONDS = 0.1  # between two attempts to reach a controller that is gone
RECONNECTS_PER_SECOND = 2000  # of all agents together: one controller answers no more
STOPPED = "T"  # process state
CONTROLLER_LOST = 3  # exit status
_assign_decoder = make_decoder(Assign)


class _Worker:
    """A process with its mailbox and its output."""

    def __init__(self, process: Process, output: Output) -> None:
        self.process = process
        self.output = output
        self.life_watched = False
        self.ends = False  # it was seen dying, or was told to: nothing more is to be expected of it
        self.mailbox = Mailbox()


class Agent:
    """Feed it with `run`; it returns the exit status."""

    def __init__(
        self,
        name: str,
        launch: Launch,
        token: bytes,
        find_controller: Callable[[], tuple[str, int]],
        *,
        tls: Tls | None = None,
        server_name: Callable[[tuple[str, int]], str] = lambda address: address[0],
    ) -> None:
        """`find_controller` gives the controller's address, which may change when it is restarted.

        `tls`, `server_name` (of such an address): see ControllerConnection.connect.
        """
        self._name = name
        self._launch = launch
        self._token = token
        self._find_controller = find_controller
        self._tls = tls
        self._server_name = server_name
        self._printer = Printer(launch.settings.run_dir)
        self._memory_kills = MemoryKills()
        self._table: ProcessTable  # opened by `run`, like the next three
        self._reception: Reception
        self._pages: Pages
        self._shared_barrier: int | None  # a descriptor
        self._live: dict[str, _Worker] = {}
        self._known: dict[str, _Worker] = {}  # the live ones, and dead ones until the controller forgets them
        self._left: dict[str, Page] = {}  # of those that died while there was no agent, until they are forgotten
        self._started: set[str] = set()  # all that were ever started, or could not be
        self._controller_connection: ControllerConnection | None = None
        self._outbox = Outbox()
        self._life = secrets.token_hex(8)
        self._controller_life = ""
        self._received = 0  # counted messages of that controller
        self._address = ("", 0)  # of that controller
        self._unconfirmed = False  # some of them, by this agent
        self._confirming: asyncio.TimerHandle | None = None
        self._gathering: Gathering[FromWorker] = Gathering()
        self._hold: asyncio.TimerHandle | None = None  # until when what it has gathered waits
        self._pace = Pace(sample_seconds=SAMPLE_SECONDS, trace=True)
        self._ending = asyncio.Event()
        self._none_live = asyncio.Event()
        self._gpus: tuple[Gpu, ...] = ()  # as they were told of last
        self._asking: set[asyncio.Task[None]] = set()  # for stacks
        self._told = asyncio.Event()  # by the kernel: a child was stopped, or goes on, or is gone

    # --- life ---------------------------------------------------------------------------------------------------
    async def run(self, *, take_over: bool) -> int:
        """Serve until the controller or a signal ends it. `take_over`: go on where a dead predecessor stopped.

        Raises UsageError if another agent of this name is running, OSError if the socket cannot be made.
        """
        self._table = ProcessTable(self._launch.private_dir / f"agent-{self._name}.pids", keep=take_over)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._ending.set)
        loop.add_signal_handler(signal.SIGCHLD, self._told.set)
        self._reception = Reception(self._launch.socket_path, self)
        self._take_over()
        self._shared_barrier = self._find_shared_barrier()
        self._watch_gpus()
        serving = asyncio.create_task(self._serve())
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
            return serving.result() if serving.done() else 0
        finally:
            serving.cancel()
            await self._end_all()
            self._reception.close()

    async def _serve(self) -> int:
        """Until this agent is told to stop, or nobody is left who could tell it."""
        evidence = await self._connect()
        while self._controller_connection is not None:
            controller_connection = self._controller_connection
            async with asyncio.TaskGroup() as group:
                works = (self._sample(controller_connection), self._leave_for_another(controller_connection))
                watching = [group.create_task(work) for work in works]
                evidence = await self._obey_orders(controller_connection)
                for task in watching:
                    task.cancel()
            if not evidence:
                return 0
            self._controller_connection = None
            controller_connection.abort()
            seconds = self._launch.settings.controller_timeout_seconds
            self._say(f"lost the controller ({evidence}); training goes on, it has {seconds:g} s to come back")
            evidence = await self._connect()
        # Without a controller nobody can order a recovery: the processes end with this agent.
        self._say(f"the controller is gone ({evidence}); ending {len(self._live)} process(es)")
        return CONTROLLER_LOST

    async def _connect(self) -> str:
        """Find the controller, which may be starting or being restarted. Returns why it was given up, if it was.

        One that refuses this agent at first will do so for ever; later, it may have been in a hurry.
        """
        seconds = self._launch.settings.controller_timeout_seconds
        deadline = time.monotonic() + seconds
        while True:
            address = self._address = await asyncio.to_thread(self._find_controller)
            try:
                self._controller_connection, welcome = await ControllerConnection.connect(
                    address, self._token, self._hello(), tls=self._tls, server_name=self._server_name(address)
                )
            except (OSError, ProtocolError) as error:
                evidence = f"no connection to {address[0]}:{address[1]}: {str(error) or type(error).__name__}"
                if isinstance(error, ProtocolError) and not self._controller_life:
                    return evidence
            else:
                self._take_up(self._controller_connection, welcome)
                return ""
            if self._outbox.overflowed:
                return f"{evidence}; more has happened meanwhile than can be kept for it"
            if time.monotonic() > deadline:
                return f"{evidence}, for {seconds:g} s"
            crowd_seconds = self._launch.settings.nodes / RECONNECTS_PER_SECOND
            await asyncio.sleep(RECONNECT_SECONDS + 2 * crowd_seconds * random.random())

    async def _leave_for_another(self, controller_connection: ControllerConnection) -> None:
        """A controller elsewhere has taken over: the one here may be frozen, and its connection never end."""
        while True:
            await asyncio.sleep(ADDRESS_SECONDS)
            address = await asyncio.to_thread(self._find_controller)  # it may lie on storage that hangs
            if address != self._address:
                self._say(f"the job has another controller, at {address[0]}:{address[1]}")
                controller_connection.abort()
                return

    def _hello(self) -> Hello:
        """Names also the processes whose end the controller cannot know yet: the news of it comes next."""
        unconfirmed = {message.process for message in self._outbox if isinstance(message, ProcessExited)}
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            role="agent",
            name=self._name,
            mac=b"",
            slots=self._launch.slots,
            processes=tuple(sorted(unconfirmed | set(self._live))),
            life=self._life,
            controller=self._controller_life,
            received=self._received,
        )

    def _take_up(self, controller_connection: ControllerConnection, welcome: Welcome) -> None:
        """Go on where the last connection ended, or begin with another controller."""
        if welcome.life != self._controller_life:
            self._controller_life, self._received = welcome.life, 0
            self._outbox.begin_anew()
        self._outbox.confirm(welcome.received)
        for frame in self._outbox.frames():
            controller_connection.send(frame)

    async def _end_all(self) -> None:
        """Kill every process, wait until all are gone, and let go of what was printed and reported."""
        for _, worker in sorted(self._live.items()):
            worker.process.kill("the agent was told to end")
        self._send_gathered()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                while self._live:
                    self._none_live.clear()
                    await self._none_live.wait()
        for name in sorted(self._live):
            self._say(f"{name} (process {self._live[name].process.pid}) is still there {END_SECONDS:g} s after SIGKILL")
        for worker in self._known.values():
            worker.output.finish()
        if self._controller_connection is not None:
            await self._controller_connection.close(FLUSH_SECONDS)
        self._launch.socket_path.unlink(missing_ok=True)
        self._table.close(remove=not self._live)
        self._printer.flush(FLUSH_SECONDS)

    def _say(self, text: str) -> None:
        self._printer.say(f"relight: agent {self._name}: {text}")

    # --- processes ----------------------------------------------------------------------------------------------
    def _take_over(self) -> None:
        self._started.update(self._table.names())
        others: list[tuple[Record, str]] = []
        for record in self._table.standing():
            try:
                self._watch(adopt(record.process, record.pid, self._launch.private_dir, record))
            except (OSError, ProtocolError) as error:
                others.append((record, str(error)))
        self._pages = self._find_pages()
        for record, why in others:
            process = kill_unadoptable(record, self._pages, why)
            if process is not None:
                self._watch(process)
            else:
                self._report(self._exited_unseen(record))

    def _find_pages(self) -> Pages:
        """Those of all processes of this host, also of dead ones, as long as one of them lives."""
        for worker in self._live.values():
            with contextlib.suppress(OSError, ValueError, KeyError):
                return open_pages(worker.process.pid)
        return Pages.create()

    def _exited_unseen(self, record: Record) -> ProcessExited:
        """Of a process that died while there was no agent. What it left is kept, if it is to be had."""
        if record.pages == self._pages.token:
            with contextlib.suppress(OSError, ValueError):
                self._left[record.process] = self._pages.at(record.page)
        left = self._left.get(record.process)
        return ProcessExited(
            process=record.process,
            exit_status=None,
            evidence=STATUS_UNKNOWN,
            position=Position() if left is None else left.position(),
            noticed_ns=time.monotonic_ns(),
        )

    def _page_of(self, process: str) -> Page | None:
        """Dead or alive; None if nothing is known of it."""
        worker = self._known.get(process)
        return self._left.get(process) if worker is None else worker.process.page

    def _find_shared_barrier(self) -> int | None:
        """One for all workers of this host, also for those that a predecessor started. None: they do without."""
        for worker in self._live.values():
            with contextlib.suppress(OSError, ValueError):
                return open_shared_barrier(worker.process.pid)
        ranks = self._launch.settings.world_size
        with contextlib.suppress(OSError):
            return SharedBarrier.create(ranks) if ranks <= MAX_RANKS else None
        return None

    def _spawn(self, order: Spawn) -> None:
        if order.process in self._started:
            return  # an order that a restarted controller gives again, since it cannot know that it arrived
        self._started.add(order.process)
        try:
            process = spawn(self._launch, order.process, order.rank, order.slot, self._pages, self._shared_barrier)
        except (OSError, ValueError) as error:
            self._report(
                ProcessExited(
                    process=order.process,
                    exit_status=None,
                    evidence=f"could not be started: {error}",
                    position=Position(),
                    noticed_ns=time.monotonic_ns(),
                )
            )
            return
        with self._table_kept():
            self._table.add(
                Record(
                    process=process.name,
                    pid=process.pid,
                    start_time=start_time(process.pid),
                    rank=process.rank,
                    pages=self._pages.token,
                    page=process.page.offset,
                )
            )
        self._watch(process)

    def _watch(self, process: Process) -> None:
        output = Output(process.name, process.rank, process.outputs, self._printer)
        worker = self._live[process.name] = self._known[process.name] = _Worker(process, output)
        self._started.add(process.name)
        asyncio.get_running_loop().add_reader(process.pidfd, self._on_exit, worker)
        self._report(ProcessStarted(process=process.name, pid=process.pid))

    def _watch_life(self, worker: _Worker) -> None:
        """Its pidfd tells of its death only once its memory is freed; the lock in its page tells at once."""
        loop = asyncio.get_running_loop()

        def wait() -> None:
            if worker.process.page.await_death():
                noticed_ns = time.monotonic_ns()
                with contextlib.suppress(RuntimeError):  # the loop is closed: this agent ends too
                    loop.call_soon_threadsafe(self._on_dying, worker, noticed_ns)

        threading.Thread(target=wait, name=f"life-{worker.process.name}", daemon=True).start()

    def _on_dying(self, worker: _Worker, noticed_ns: int) -> None:
        process = worker.process
        if process.name not in self._live:
            return
        worker.ends = True
        self._reception.drain(process.pid)
        self._report(ProcessDying(process=process.name, position=process.page.position(), noticed_ns=noticed_ns))

    def _on_exit(self, worker: _Worker) -> None:
        noticed_ns = time.monotonic_ns()
        process = worker.process
        asyncio.get_running_loop().remove_reader(process.pidfd)
        end = process.reap(self._memory_kills)
        self._reception.drain(process.pid)  # its last words come before its end
        worker.mailbox.close()
        self._report_trace(process)
        self._report(
            ProcessExited(
                process=process.name,
                exit_status=end.status,
                evidence=end.evidence,
                position=process.page.position(),
                noticed_ns=noticed_ns,
            )
        )
        del self._live[process.name]
        if not self._live:
            self._none_live.set()

    def _forget(self, name: str) -> None:
        if name in self._live:
            self._say(f"{name} is not forgotten: it lives")
            return
        with self._table_kept():
            self._table.forget(name)
        worker = self._known.pop(name, None)
        if worker is not None:
            worker.output.finish()
            worker.process.page.clear()
        left = self._left.pop(name, None)
        if left is not None:
            left.clear()

    def _copy_private(self, order: CopyPrivate) -> None:
        """Without a word if that version is not there: an older predecessor may have left it."""
        source, target = self._page_of(order.source), self._page_of(order.target)
        if source is None or target is None:
            return
        payload = source.read_private(order.version)
        if payload is not None:
            target.inherit(order.version, payload, source.batch_mark())

    def _take_private(self, order: TakePrivate) -> None:
        """For a replacement on another host. Without a word if that version is not there, as above."""
        source = self._page_of(order.source)
        payload = source.read_private(order.version) if source is not None else None
        if source is None or payload is None:
            return
        problem = ""
        if len(payload) > MAX_RELAYED_BYTES:
            problem = f"{order.source} left {len(payload)} bytes, and no more than {MAX_RELAYED_BYTES} can be moved"
            payload = b""
        batch = source.batch_mark()
        self._report(
            PrivateState(
                source=order.source,
                target=order.target,
                version=order.version,
                payload=payload,
                batch=batch,
                problem=problem,
            )
        )

    def _put_private(self, state: PrivateState) -> None:
        target = self._live.get(state.target)
        if target is not None:
            target.process.page.inherit(state.version, state.payload, state.batch)

    @contextlib.contextmanager
    def _table_kept(self) -> Iterator[None]:
        """A table that cannot be written costs a successor its knowledge, not this agent its work."""
        try:
            yield
        except OSError as error:
            self._say(f"its list of processes cannot be written ({error.strerror}); a successor will kill them")

    # --- workers' connections (see link.Host) -------------------------------------------------------------------
    def admit(self, hello: WorkerHello, peer_pid: int) -> Mailbox:
        if hello.pid != peer_pid:
            raise ProtocolError(f"it calls itself process {hello.pid}")
        worker = self._live.get(hello.process)
        if worker is None:
            self._watch(adopt(hello.process, peer_pid, self._launch.private_dir, self._table.get(hello.process)))
            worker = self._live[hello.process]
            worker.process.kill("it came back after it had been counted as lost")
        if worker.process.pid != peer_pid:
            raise ProtocolError(f"{hello.process} is process {worker.process.pid}")
        if not worker.life_watched:
            worker.life_watched = True
            self._watch_life(worker)
        return worker.mailbox

    def relay(self, process: str, message: msgspec.Struct, payload: bytes) -> None:
        relayed = FromWorker(process=process, payload=msgspec.Raw(payload))
        about = subject(message)
        if about is None:
            self._report(relayed)
            return
        if not self._gathering.joins(about):
            self._send_gathered()
        expected = [name for name, worker in self._live.items() if worker.process.rank is not None and not worker.ends]
        if self._gathering.add(process, about, relayed, expected):
            self._send_gathered()
        elif len(self._gathering) == 1:
            self._hold = asyncio.get_running_loop().call_later(HOLD_SECONDS, self._send_gathered)

    def _send_gathered(self) -> None:
        """What waited for the other ranks of this host does so no longer."""
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None
        gathered = self._gathering.take()
        if gathered:
            self._put(gathered[0] if len(gathered) == 1 else FromWorkers(messages=tuple(gathered)))

    def refused(self, peer_pid: int, reason: str) -> None:
        self._say(f"closed a connection of process {peer_pid}: {reason}")

    # --- orders -------------------------------------------------------------------------------------------------
    async def _obey_orders(self, controller_connection: ControllerConnection) -> str:
        """Until the connection ends: returns why, or nothing if this agent was told to stop."""
        try:
            while (message := await controller_connection.receive()) is not None:
                if isinstance(message, StopAgent):
                    return ""
                self._obey(message)
                if isinstance(message, COUNTED):
                    self._received += 1
                    self._confirm_soon(controller_connection)
        except ProtocolError as error:
            return str(error)
        return "it closed the connection"

    def _obey(self, message: msgspec.Struct) -> None:
        match message:
            case Received():
                self._outbox.confirm(message.count)
            case Spawn():
                self._spawn(message)
            case Kill():
                worker = self._live.get(message.process)
                if worker is not None and message.after_step:
                    worker.process.page.ask_to_leave()
                elif worker is not None:
                    worker.ends = True
                    worker.process.kill(message.why)
            case ToWorkers():
                self._deliver(message)
            case CopyPrivate():
                self._copy_private(message)
            case TakePrivate():
                self._take_private(message)
            case PrivateState():
                self._put_private(message)
            case TakeStack():
                task = asyncio.create_task(self._take_stack(message.process))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)
            case ForgetProcess():
                self._forget(message.process)
            case Pace():
                self._pace = message

    def _deliver(self, message: ToWorkers) -> None:
        self._look_for_assign(message.payload)
        frame = encode_frame(message.payload)
        for name in message.processes:
            worker = self._live.get(name)
            if worker is not None:
                worker.mailbox.put(frame)

    def _look_for_assign(self, payload: msgspec.Raw) -> None:
        """The one message to workers that concerns the agent: whose output this is from now on."""
        try:
            assign: Assign = decode(_assign_decoder, payload)
        except ProtocolError:
            return
        worker = self._live.get(assign.process)
        if worker is not None and worker.process.rank != assign.rank:
            worker.process.rank = assign.rank
            worker.output.assign(assign.rank)
            with self._table_kept():
                self._table.assign(assign.process, assign.rank)

    # --- reports ------------------------------------------------------------------------------------------------
    def _report(self, message: msgspec.Struct) -> None:
        """Tell the controller, the one that is there or the one that comes."""
        self._send_gathered()
        self._put(message)

    def _put(self, message: msgspec.Struct) -> None:
        frame = self._outbox.put(message)
        if self._controller_connection is not None:
            self._confirm(self._controller_connection)
            self._controller_connection.send(frame)

    def _confirm_soon(self, controller_connection: ControllerConnection) -> None:
        """With the next report, most often; a word of its own would cost the controller more than the order did."""
        self._unconfirmed = True
        if self._confirming is None:
            self._confirming = asyncio.get_running_loop().call_later(
                CONFIRM_SECONDS, self._confirm, controller_connection
            )

    def _confirm(self, controller_connection: ControllerConnection) -> None:
        if self._confirming is not None:
            self._confirming.cancel()
            self._confirming = None
        if self._unconfirmed and controller_connection is self._controller_connection:
            self._unconfirmed = False
            controller_connection.send(encode_frame(Received(count=self._received)))

    async def _take_stack(self, name: str) -> None:
        worker = self._live.get(name)
        if worker is None:
            return
        process = worker.process
        try:
            text = await take_stack(process.pid, process.pidfd, name, self._launch.private_dir, ALL_STACKS)
            answer = StackTaken(process=name, text=text)
        except NoStack as error:
            answer = StackTaken(process=name, problem=str(error))
        if self._controller_connection is not None:
            self._controller_connection.send(encode_frame(answer))

    async def _sample(self, controller_connection: ControllerConnection) -> None:
        """Positions and process states: at once when a process was stopped, else now and then. Traces beside them."""
        sent = traced = 0.0
        stopped = False
        while True:
            self._told.clear()
            was_stopped, stopped = stopped, False
            samples = []
            for _, worker in sorted(self._live.items()):
                reading = worker.process.probe.read()
                if reading is None:
                    continue
                stopped |= reading.state == STOPPED
                samples.append(
                    Sample(
                        process=worker.process.name,
                        position=worker.process.page.position(),
                        state=reading.state,
                        run_delay_ns=reading.run_delay_ns,
                        rss_bytes=reading.rss_bytes,
                        sampled_ns=time.monotonic_ns(),
                    )
                )
            now = time.monotonic()
            pause = max(self._pace.sample_seconds, SAMPLE_SECONDS)
            is_due = stopped or was_stopped or now - sent >= pause
            if is_due and not controller_connection.congested():
                controller_connection.send(encode_frame(Samples(samples=tuple(samples))))
                sent = now
                if now - traced >= TRACE_SECONDS:
                    traced = now
                    for _, worker in sorted(self._live.items()):
                        self._report_trace(worker.process)
            if stopped or any(worker.process.is_adopted for worker in self._live.values()):
                seconds = LOOK_SECONDS
            else:
                seconds = sent + pause - now if now < sent + pause else SAMPLE_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._told.wait()

    def _watch_gpus(self) -> None:
        """In a thread that nobody waits for: a driver in trouble may keep whoever asks it waiting."""
        loop = asyncio.get_running_loop()

        def watch() -> None:
            gpus = Gpus.find()
            while gpus is not None:
                found = gpus.sample()
                with contextlib.suppress(RuntimeError):  # the loop is closed: this agent ends too
                    loop.call_soon_threadsafe(self._on_gpus, found)
                time.sleep(GPU_SECONDS)

        threading.Thread(target=watch, name="gpus", daemon=True).start()

    def _on_gpus(self, found: tuple[Gpu, ...]) -> None:
        if (
            found != self._gpus
            and self._controller_connection is not None
            and not self._controller_connection.congested()
        ):
            self._gpus = found
            self._controller_connection.send(encode_frame(GpuStatus(agent=self._name, gpus=found)))

    def _report_trace(self, process: Process) -> None:
        if self._controller_connection is None or not self._pace.trace:
            return  # the records wait in the page, as far as it can hold them
        records = process.page.drain_trace()
        if records:
            rank = process.page.position().rank
            offset_ns = time.time_ns() - time.monotonic_ns()
            chunk = TraceChunk(process=process.name, rank=rank, records=records, clock_offset_ns=offset_ns)
            self._controller_connection.send(encode_frame(chunk))
