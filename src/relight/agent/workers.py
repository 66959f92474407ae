"""The processes of a host: carries out what `decisions.host` decides, and feeds it what happens."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from relight.agent.connection.session import ControllerSession
from relight.agent.decisions import host
from relight.agent.processes.adoption import adopt, adopt_all, find_shared_barrier, kill_unadoptable
from relight.agent.processes.host_pages import HostPages
from relight.agent.processes.link import Mailbox, Reception
from relight.agent.processes.output import Output, Printer
from relight.agent.processes.process import STATUS_UNKNOWN, Launch, Process
from relight.agent.processes.process_table import ProcessTable, Record
from relight.agent.processes.readings.probes import MemoryKills, start_time
from relight.agent.processes.stacks import capture_stack
from relight.agent.processes.starter import Starter
from relight.agent.traces import TraceReporter
from relight.core.protocol.commands import Assign, Spawn
from relight.core.protocol.events import ProcessExited
from relight.core.protocol.gathering import HOLD_SECONDS
from relight.errors import ProtocolError
from relight.wire import messages as msg
from relight.wire.connection.framing import decode, encode_frame, make_decoder

_assign_decoder = make_decoder(Assign)
END_SECONDS = 10.0  # for killed processes to be gone


class _Worker:
    """A process with its mailbox and its output."""

    def __init__(self, process: Process, printer: Printer) -> None:
        self.process = process
        self.output = Output(process.name, process.rank, process.outputs, printer)
        self.life_watched = False
        self.mailbox = Mailbox()


class Workers:
    """Starts, watches, kills and adopts the processes of a host."""

    def __init__(
        self,
        launch: Launch,
        table: ProcessTable,
        session: ControllerSession,
        traces: TraceReporter,
        printer: Printer,
        say: Callable[[str], None],
    ) -> None:
        """Adopt the processes of `table`. Raises OSError if the socket for workers cannot be made."""
        self._launch = launch
        self._table = table
        self._session = session
        self._traces = traces
        self._printer = printer
        self._say = say
        self._memory_kills = MemoryKills()
        self._host = host.Host(table.names())
        self._live: dict[str, _Worker] = {}
        self._known: dict[str, _Worker] = {}  # the live ones, and dead ones until they are released
        self._none_live = asyncio.Event()
        self._asking: set[asyncio.Task[None]] = set()  # for stacks
        self._hold: asyncio.TimerHandle | None = None
        self._reception = Reception(launch.socket_path, self)
        adopted, others = adopt_all(table.unforgotten(), launch.private_dir)
        self._pages = HostPages(adopted)
        for process in adopted:
            self._watch(process)
        for record, why in others:
            self._kill_unadoptable(record, why)
        shared_barrier = find_shared_barrier(self.live(), launch.settings.world_size)
        self._starter = Starter(launch, self._pages, shared_barrier, say)

    async def preload(self) -> None:
        """Import the modules of --preload once, before the first process is started."""
        await self._starter.preload()

    # --- what other parts of the agent ask ----------------------------------------------------------------------
    def live(self) -> list[Process]:
        """Return the live processes, sorted by name."""
        return [worker.process for _, worker in sorted(self._live.items())]

    def names(self) -> tuple[str, ...]:
        """Return the names of the live processes, sorted."""
        return self._host.live

    def obey(self, order: host.Order | msg.ToWorkers) -> None:
        """Carry out an order of the controller, or pass a message on."""
        self._feed(_event_of(order))

    async def end(self) -> None:
        """Kill every process and wait until all are gone."""
        self._feed(host.Ending("the agent is to end"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                while self._live:
                    self._none_live.clear()
                    await self._none_live.wait()
        for process in self.live():
            self._say(f"{process.name} (process {process.pid}) is still alive {END_SECONDS:g} s after SIGKILL")
        for worker in self._known.values():
            worker.output.finish()
        self._starter.close()

    def close(self) -> None:
        """Close the connections of workers, and remove the files."""
        self._launch.socket_path.unlink(missing_ok=True)
        self._table.close(remove=not self._live)
        self._reception.close()

    # --- events in, actions out ---------------------------------------------------------------------------------
    def _feed(self, event: host.Event) -> None:
        for action in self._host.handle(event):
            self._carry_out(action)

    def _carry_out(self, action: host.Action) -> None:
        match action:
            case host.Start():
                self._start(action.order)
            case host.Terminate():
                self._live[action.process].process.kill(action.why)
            case host.AskToLeave():
                self._live[action.process].process.page.ask_to_leave()
            case host.Deliver():
                frame = encode_frame(action.message)
                for name in action.processes:
                    self._live[name].mailbox.put(frame)
            case host.TakeRank():
                worker = self._live[action.process]
                worker.process.rank = action.rank
                worker.output.assign(action.rank)
                with self._table_kept():
                    self._table.assign(action.process, action.rank)
            case host.Release():
                self._release(action.process)
            case host.Access():
                self._access(action.order)
            case host.Report() | host.ReportTogether():
                self._session.report(_message_of(action))
            case host.Hold():
                self._hold = asyncio.get_running_loop().call_later(HOLD_SECONDS, self._feed, host.HoldExpired())
            case host.EndHold():
                if self._hold is not None:
                    self._hold.cancel()
            case host.Warn():
                self._say(action.text)

    def _access(self, order: msg.CopyPrivate | msg.TakePrivate | msg.PrivateState | msg.TakeStack) -> None:
        match order:
            case msg.CopyPrivate():
                self._pages.copy_private(order)
            case msg.TakePrivate():
                state = self._pages.read_private(order)
                if state is not None:
                    self._feed(host.Read(state))
            case msg.PrivateState():
                target = self._live.get(order.target)
                if target is not None:
                    target.process.page.inherit(order.version, order.payload, order.batch)
            case msg.TakeStack():
                task = asyncio.create_task(self._take_stack(order.process))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)

    def _start(self, order: Spawn) -> None:
        try:
            process = self._starter.start(order)
        except (OSError, ValueError) as error:
            self._feed(host.NotStarted(order.process, str(error), time.monotonic_ns()))
            return
        with self._table_kept():
            self._table.add(_record(process, self._pages.pages.token))
        self._watch(process)

    def _watch(self, process: Process, *, lost: bool = False) -> _Worker:
        worker = self._live[process.name] = self._known[process.name] = _Worker(process, self._printer)
        self._pages.add(process)
        asyncio.get_running_loop().add_reader(process.pidfd, self._on_exit, worker)
        self._feed(host.Started(process.name, process.pid, process.rank, lost=lost))
        return worker

    def _release(self, name: str) -> None:
        with self._table_kept():
            self._table.forget(name)
        worker = self._known.pop(name, None)
        if worker is not None:
            worker.output.finish()
        self._pages.release(name)

    async def _take_stack(self, name: str) -> None:
        worker = self._live.get(name)
        if worker is None:
            return
        self._session.mention(await capture_stack(worker.process, self._launch.private_dir))

    # --- the ends of processes ----------------------------------------------------------------------------------
    def _watch_life(self, worker: _Worker) -> None:
        """Wait for a death in a thread: the lock in a page is released at once, a pidfd once all memory is freed."""
        loop = asyncio.get_running_loop()

        def wait() -> None:
            if worker.process.page.await_death():
                noticed_ns = time.monotonic_ns()
                with contextlib.suppress(RuntimeError):  # the loop is closed: the agent ends
                    loop.call_soon_threadsafe(self._on_dying, worker, noticed_ns)

        threading.Thread(target=wait, name=f"life-{worker.process.name}", daemon=True).start()

    def _on_dying(self, worker: _Worker, noticed_ns: int) -> None:
        process = worker.process
        if process.name in self._live:
            self._reception.drain(process.pid)
            self._feed(host.Dying(process.name, process.page.position(), noticed_ns))

    def _on_exit(self, worker: _Worker) -> None:
        noticed_ns = time.monotonic_ns()
        process = worker.process
        asyncio.get_running_loop().remove_reader(process.pidfd)
        end = process.reap(self._memory_kills)
        self._reception.drain(process.pid)  # its last messages come before its end
        worker.mailbox.close()
        self._traces.report(process)
        del self._live[process.name]
        self._feed(
            host.Exited(
                ProcessExited(
                    process=process.name,
                    exit_status=end.status,
                    evidence=end.evidence,
                    position=process.page.position(),
                    noticed_ns=noticed_ns,
                )
            )
        )
        if not self._live:
            self._none_live.set()

    # --- what a predecessor left --------------------------------------------------------------------------------
    def _kill_unadoptable(self, record: Record, why: str) -> None:
        process = kill_unadoptable(record, self._pages.pages, why)
        if process is not None:
            self._watch(process)
            return
        self._feed(
            host.Exited(
                ProcessExited(
                    process=record.process,
                    exit_status=None,
                    evidence=STATUS_UNKNOWN,
                    position=self._pages.recover(record),
                    noticed_ns=time.monotonic_ns(),
                )
            )
        )

    @contextlib.contextmanager
    def _table_kept(self) -> Iterator[None]:
        """Bear a table that cannot be written: it costs a successor its knowledge, not this agent its work."""
        try:
            yield
        except OSError as error:
            self._say(f"the process table cannot be written ({error.strerror}); a successor will kill the processes")

    # --- workers' connections (see link.Host) -------------------------------------------------------------------
    def admit(self, hello: msg.WorkerHello, peer_pid: int) -> Mailbox:
        """Return the mailbox of the worker that says hello. Raises ProtocolError or OSError if it is another one."""
        if hello.pid != peer_pid:
            raise ProtocolError(f"it calls itself process {hello.pid}")
        worker = self._live.get(hello.process)
        if worker is None:
            process = adopt(hello.process, peer_pid, self._launch.private_dir, self._table.get(hello.process))
            worker = self._watch(process, lost=True)
        if worker.process.pid != peer_pid:
            raise ProtocolError(f"{hello.process} is process {worker.process.pid}")
        if not worker.life_watched:
            worker.life_watched = True
            self._watch_life(worker)
        return worker.mailbox

    def relay(self, process: str, message: msgspec.Struct, payload: bytes) -> None:
        """Pass a worker's message on to the controller."""
        self._feed(host.Said(process, message, msg.FromWorker(process=process, payload=msgspec.Raw(payload))))

    def refused(self, peer_pid: int, reason: str) -> None:
        """Say that a connection was closed for what came through it."""
        self._say(f"closed a connection of process {peer_pid}: {reason}")


def _event_of(order: host.Order | msg.ToWorkers) -> host.Event:
    if isinstance(order, msg.ToWorkers):
        return host.Addressed(order.processes, order.payload, _find_assign(order.payload))
    return host.Ordered(order)


def _message_of(report: host.Report | host.ReportTogether) -> msgspec.Struct:
    if isinstance(report, host.ReportTogether):
        return msg.FromWorkers(messages=report.messages)  # type: ignore[arg-type]
    return report.message


def _find_assign(payload: msgspec.Raw) -> Assign | None:
    """Find the one message to workers that also concerns the agent."""
    try:
        assign: Assign = decode(_assign_decoder, payload)
    except ProtocolError:
        return None
    return assign


def _record(process: Process, pages: str) -> Record:
    return Record(
        process=process.name,
        pid=process.pid,
        start_time=start_time(process.pid),
        rank=process.rank,
        pages=pages,
        page=process.page.offset,
    )
