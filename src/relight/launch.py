"""`relight run`: starts the controller and the agent, shows what happens, and leaves nothing behind.

It takes no part in recoveries, so it may be slow or stuck without harm. It starts the controller and the agent again
when they die. Its own death ends the job: the kernel tells both of them (PR_SET_PDEATHSIG).
"""

import asyncio
import contextlib
import io
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from relight.agent.agent import CONTROLLER_LOST
from relight.agent.controller_connection import ControllerConnection
from relight.agent.join import address_towards, fetch_settings, resolve
from relight.children import Child, describe_exit, end_children, is_stopped, kill_listed, start_module
from relight.core import verdict
from relight.core.backoff import pause_seconds
from relight.core.report import JobReport, decode_report
from relight.errors import ProtocolError
from relight.parent import remove_private_dir
from relight.server.claim import remove_unused
from relight.server.journal import read_header
from relight.terminal import Screen
from relight.transfer.io.channel import SOCKET_NAME
from relight.wire.address import Address, find_address, read_address
from relight.wire.framing import encode_frame, make_decoder
from relight.wire.loopback import is_default
from relight.wire.messages import (
    PROTOCOL_VERSION,
    Hello,
    JobEnded,
    NoticeUpdate,
    ObserverDown,
    StatusUpdate,
    StopAgent,
)
from relight.wire.settings import HOST_ADDRESS, SUPERSEDED, JobSettings, encode_settings
from relight.wire.tls import Tls, leave_to_children

JOIN_SECONDS = 300.0  # for a controller on another host to be there
CONTROLLER_START_SECONDS = 30.0
END_SECONDS = 15.0  # for controller and agent, once the job has ended
INTERRUPT_SECONDS = 5.0  # from Ctrl-C to SIGTERM
WIND_DOWN_SECONDS = 600.0  # then, for a last step and a checkpoint; whoever sent the signal has a limit of his own
GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL
OUTPUT_SECONDS = 2.0  # for the last output, once nobody is left to write any
MAX_TEMPORARY_BYTES = 60  # the agent's socket lies below it, and a socket's path has 107 bytes at most
MAX_OWN_ENDS = 10  # of the controller, or the agent, within a minute: by itself, which is a defect of ours
MINUTE_SECONDS = 60.0
REOBSERVE_SECONDS = 0.2
FROZEN_LOOK_SECONDS = 1.0
SILENT_LOOK_SECONDS = 1.0
SILENT_LOOKS = 30  # without a word of the controller, before it is held to hang
LAST_WORDS_SECONDS = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(
    settings: JobSettings,
    token: bytes | None = None,
    *,
    quiet: bool,
    dashboard: str | None = None,
    tls: Tls | None = None,
) -> int:
    """Run one job to its end, with its controller here; returns the exit status of `relight run`.

    `token` is the one that the job's hosts share; a job that keeps to this host makes its own.
    `dashboard`: where to serve the live page, as "HOST:PORT"; None: nowhere. `tls`: None for none.
    """
    screen = Screen(quiet=quiet)
    if not is_default(settings.controller_address):
        os.environ.setdefault(HOST_ADDRESS, resolve(settings.controller_address))
    try:
        if tls is not None:
            leave_to_children(tls.files)
        launcher = Launcher(settings, screen, "node-0", dashboard=dashboard, tls=tls)
        return asyncio.run(_launch(launcher, token or secrets.token_bytes(32), quiet=quiet))
    except OSError as error:
        screen.say(f"the job could not be started: {error}", "error")
        return 1
    finally:
        screen.close(OUTPUT_SECONDS)


def join(controller: tuple[str, int], token: bytes, name: str, *, quiet: bool, tls: Tls | None = None) -> int:
    """Run what a job's controller on another host orders, until the job ends; returns the exit status."""
    screen = Screen(quiet=quiet)
    where = f"{controller[0]}:{controller[1]}"
    screen.say(f"{name}: looking for the job's controller at {where}")
    try:
        if tls is not None:
            leave_to_children(tls.files)
        settings = asyncio.run(fetch_settings(controller, token, JOIN_SECONDS, tls))
        os.environ.setdefault(HOST_ADDRESS, address_towards(*controller))
        launcher = Launcher(settings, screen, name, Address(host=controller[0], port=controller[1], pid=0), tls=tls)
        return asyncio.run(_launch(launcher, token, quiet=True))
    except (OSError, ProtocolError) as error:
        screen.say(f"cannot join the job at {where}: {error}", "error")
        return 1
    finally:
        screen.close(OUTPUT_SECONDS)


def go_on(
    run_dir: Path, listen: tuple[str, int], token: bytes, *, take_over: bool, quiet: bool, tls: Tls | None = None
) -> int:
    """Run another controller of a job whose controller's host is gone, until the job ends; returns the exit status."""
    screen = Screen(quiet=quiet)
    try:
        if tls is not None:
            leave_to_children(tls.files)
        settings = read_header(run_dir / "journal.jsonl").settings
        settings = msgspec.structs.replace(
            settings, run_dir=str(run_dir.absolute()), controller_address=listen[0], controller_port=listen[1]
        )
        resume = ("--resume", "--take-over") if take_over else ("--resume",)
        launcher = Launcher(settings, screen, "controller", tls=tls, resume=resume)
        return asyncio.run(_launch(launcher, token, quiet=quiet))
    except (OSError, msgspec.MsgspecError) as error:
        screen.say(f"the job in {run_dir} cannot be gone on with: {error}", "error")
        return 1
    finally:
        screen.close(OUTPUT_SECONDS)


async def _launch(launcher: "Launcher", token: bytes, *, quiet: bool) -> int:
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, launcher.interrupt, number)
    settings = launcher.settings
    private_dir = launcher.private_dir = make_private_dir(settings, token)
    try:
        status = await launcher.run()
    finally:
        await launcher.end()
        remove_private_dir(private_dir)
        with contextlib.suppress(OSError):  # a publisher that was killed could not
            Path(settings.run_dir, SOCKET_NAME).unlink()
    launcher.sum_up(show_report=not quiet)
    return status


def make_private_dir(settings: JobSettings, token: bytes) -> Path:
    """A directory that only this user can look into, with the job's token and settings."""
    place = tempfile.gettempdir()
    if len(os.fsencode(place)) > MAX_TEMPORARY_BYTES:
        place = "/tmp"
    private_dir = Path(tempfile.mkdtemp(prefix="relight-", dir=place))  # mode 0700
    try:
        for name, content in (("token", token), ("settings.json", encode_settings(settings))):
            descriptor = os.open(private_dir / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
    except OSError:
        shutil.rmtree(private_dir, ignore_errors=True)
        raise
    return private_dir


class _Deaths:
    """Of the controller, or of the agent. Killed ones are followed by another however many they are: later and later,
    but before those who wait for it give it up."""

    def __init__(self, longest_pause_seconds: float) -> None:
        self._longest_pause_seconds = longest_pause_seconds
        self._all: deque[float] = deque()  # within the last minute
        self._own: deque[float] = deque(maxlen=MAX_OWN_ENDS)

    def note(self, status: int) -> None:
        now = time.monotonic()
        self._all.append(now)
        if status >= 0:
            self._own.append(now)
        while now - self._all[0] > MINUTE_SECONDS:
            self._all.popleft()

    @property
    def too_many(self) -> bool:
        """Whether it keeps ending by itself: nothing from outside makes it do that."""
        return len(self._own) == MAX_OWN_ENDS and self._own[-1] - self._own[0] < MINUTE_SECONDS

    @property
    def pause_seconds(self) -> float:
        return min(pause_seconds(len(self._all)), self._longest_pause_seconds)

    @property
    def when(self) -> str:
        """In words; nothing if it is now."""
        seconds = self.pause_seconds
        return f" in {seconds:g} s: this was number {len(self._all)} within a minute" if seconds else ""


class Launcher:
    """One job as its user sees it, or one host's part in it."""

    def __init__(
        self,
        settings: JobSettings,
        screen: Screen,
        name: str,
        controller: Address | None = None,
        dashboard: str | None = None,
        tls: Tls | None = None,
        resume: tuple[str, ...] = (),
    ) -> None:
        """`name` is that of the agent. `controller`: one on another host; None: it is to be started here.

        `resume`: flags of a controller that goes on with a job whose controller's host is gone; then there is no agent.
        """
        self._resume = resume
        self.private_dir: Path  # set before `run`
        self.settings = settings
        self._name = name
        self._remote = controller
        self._tls = tls
        self._dashboard_address = dashboard
        self._dashboard: Child | None = None
        self._screen = screen
        self._controller: Child | None = None
        self._agent: Child | None = None
        self._observer: ControllerConnection | None = None
        self._lost = ""  # why there was no observer's connection the last time
        self._ended: JobEnded | None = None
        self._ending = asyncio.Event()  # the job is over, or is being ended
        self._at_once = asyncio.Event()  # no more patience
        self._signal = 0
        self._started = False
        self._winding_down = False
        self._silent_looks = 0
        self._start_patience_seconds = CONTROLLER_START_SECONDS
        self._tasks: set[asyncio.Task[None]] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._decode = make_decoder(ObserverDown)

    # --- signals ------------------------------------------------------------------------------------------------
    def interrupt(self, number: int) -> None:
        """The first signal asks the controller to end the job; a second one ends everything at once."""
        if self._signal or self._ended is not None:
            self._at_once.set()
            return
        self._signal = number
        name = signal.Signals(number).name
        self._screen.say(f"{name}: ending the job (again: at once)", "warning")
        if self._controller is None or not self._started:
            self._at_once.set()
        else:
            self._ask_to_end(name)
            asyncio.get_running_loop().call_later(INTERRUPT_SECONDS, self._lose_patience)

    def _lose_patience(self) -> None:
        """Unless a last step is being taken, and a checkpoint written."""
        if self._winding_down:
            asyncio.get_running_loop().call_later(WIND_DOWN_SECONDS, self._at_once.set)
        else:
            self._at_once.set()

    def _ask_to_end(self, why: str) -> None:
        if self._observer is not None:
            self._observer.send(encode_frame(StopAgent(why=why)))

    # --- the job ------------------------------------------------------------------------------------------------
    async def run(self) -> int:
        """Start everything and stay until the job has ended."""
        keeping = asyncio.create_task(self._keep_controller() if self._remote is None else self._follow(self._remote))
        await self._first(keeping, self._at_once.wait())
        keeping.cancel()
        self._ending.set()
        return self._status()

    async def _start_controller(self, *resume: str) -> Address | None:
        """Start one and wait until it listens. None if it ended, or a signal came, before."""
        controller = self._controller = await start_module(
            *("relight.server", "--private-dir", str(self.private_dir), "--parent", str(os.getpid()), *resume)
        )
        deadline = time.monotonic() + self._start_patience_seconds
        while time.monotonic() < deadline:
            address = find_address(self.private_dir)
            if address is not None and address.pid == controller.pid:
                return address
            if controller.status is not None or self._at_once.is_set():
                return None
            await asyncio.sleep(0.01)
        text = f"the controller did not start within {self._start_patience_seconds:g} s"
        self._screen.say(text, "warning" if self._started else "error")
        if self._started:  # training goes on, and another one has twice the time
            self._start_patience_seconds *= 2
            controller.signal(signal.SIGKILL)
            await controller.wait()
        return None

    async def _keep_controller(self) -> None:
        """Until the job has ended. A controller that dies is followed by another, which learns from its journal."""
        deaths = _Deaths(self.settings.controller_timeout_seconds / 10)
        resume = self._resume
        while True:
            address = await self._start_controller(*resume)
            controller = self._controller
            assert controller is not None
            if address is not None:
                self._note_started(address)
                await self._attend(controller, address)
            if self._ended is not None:
                await self._await_children()
                return
            if controller.status == SUPERSEDED:
                self._screen.say("the job has another controller; this host goes on with that one", "warning")
                await self._observe(self._find_remote)
                await self._await_children()
                return
            if controller.status is None or (controller.status > 0 and not self._started):
                return  # there is no controller to be had, as was said; or the user wants an end
            what = f"the controller {describe_exit(controller.status)}"
            deaths.note(controller.status)
            if deaths.too_many:
                self._screen.say(f"{what}, {MAX_OWN_ENDS} times within a minute; ending the job", "error")
                return
            then = "training goes on, and another takes over" if self._started else "starting another"
            self._screen.say(f"{what}; {then}{deaths.when}", "warning")
            if await self._is_over_within(deaths.pause_seconds):
                return
            resume = ("--resume",)

    async def _follow(self, controller: Address) -> None:
        """The controller is on another host: until it says that the job has ended, or is gone for good."""
        self._started = True
        observing = asyncio.create_task(self._observe(self._find_remote))
        try:
            await self._first(observing, self._keep_agent(controller))
            if self._ended is None:  # the agent was told first
                await self._first(observing, asyncio.sleep(GRACE_SECONDS))
        finally:
            observing.cancel()
        if self._ended is not None:
            await self._await_children()

    def _note_started(self, address: Address) -> None:
        if not self._started:
            self._started = True
            self._screen.say(f"{self._describe_job()}; logs in {self.settings.run_dir}")
            if not self._resume:
                self._spawn(self._keep_agent(address))
            if self._dashboard_address is not None:
                self._spawn(self._show_dashboard(self._dashboard_address))

    async def _attend(self, controller: Child, address: Address) -> None:
        """Until this controller says that the job has ended, or dies."""
        observing = asyncio.create_task(self._observe(lambda: (address.host, address.port)))
        watching = asyncio.create_task(self._kill_if_frozen(controller, "controller"))
        listening = asyncio.create_task(self._kill_if_silent(controller))
        try:
            await self._first(observing, controller.wait())
            if self._ended is None:  # its last words may still be on their way
                await self._first(observing, asyncio.sleep(LAST_WORDS_SECONDS))
        finally:
            for task in (observing, watching, listening):
                task.cancel()

    async def _await_children(self) -> None:
        """The job has ended, and controller and agent do so by themselves."""
        self._ending.set()
        waits = [process.wait() for process in (self._controller, self._agent) if process is not None]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waits), END_SECONDS)

    def _status(self) -> int:
        if self._ended is not None and not self._ended.error:
            return 0
        if self._signal:
            return 128 + self._signal
        refused = self._controller.status if self._controller is not None and not self._started else None
        return refused or 1

    async def end(self) -> None:
        """End whatever is still there, by pid and start time, and show the last output."""
        self._ending.set()
        for task in self._tasks:
            task.cancel()
        children = [process for process in (self._controller, self._agent, self._dashboard) if process is not None]
        await end_children(children, 0.0 if self._at_once.is_set() and self._signal else GRACE_SECONDS)
        kill_listed(self.private_dir)
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=OUTPUT_SECONDS)
        if self._observer is not None:
            self._observer.abort()

    def sum_up(self, *, show_report: bool) -> None:
        """The last lines: what the run went through, and why it failed if it did."""
        self._screen.end_progress()
        if not self._started:
            remove_unused(Path(self.settings.run_dir))
            return
        report = self._read_report()
        if show_report and report is not None and (report.failures or not report.error):
            self._show_report()  # of a job that never came to training, the error says it all
        if report is not None and report.bits_as_undisturbed and (show_report or report.doubts):
            level = "info" if report.bits_as_undisturbed == verdict.YES else "warning"
            self._screen.say(f"{verdict.TITLE}: {verdict.describe_bits(report)}", level)
        if self._ended is not None and self._ended.error:
            if self._ended.details:
                self._screen.say_block(self._ended.details)
            self._screen.say(self._ended.error, "error")
        if self._ended is None or self._ended.error:
            self._screen.say(f"logs: {self.settings.run_dir}", "error")

    def _read_report(self) -> JobReport | None:
        try:
            return decode_report((Path(self.settings.run_dir) / "report.json").read_bytes())
        except (OSError, msgspec.DecodeError):
            return None  # the controller has said why there is none

    def _show_report(self) -> None:
        run_dir = Path(self.settings.run_dir)
        from rich.console import Console

        from relight.timeline.show import print_report, print_timeline

        text = io.StringIO()
        console = Console(file=text, force_terminal=sys.stderr.isatty(), width=None if sys.stderr.isatty() else 120)
        try:
            print_report(run_dir, console)
            print_timeline(run_dir, console)
        except Exception as error:  # a report that cannot be drawn must not hide how the job ended
            self._screen.say(f"the report cannot be shown ({error!r}); it lies in {run_dir}", "warning")
        self._screen.show_text(text.getvalue())

    def _describe_job(self) -> str:
        settings = self.settings
        ranks = f"{settings.world_size} rank{'s' if settings.world_size > 1 else ''}"
        standbys = f", {settings.standbys} standby" if settings.standbys else ", no standby"
        planned = len(settings.plan.faults)
        faults = f", {planned} planned fault{'s' if planned > 1 else ''}" if planned else ""
        return f"{settings.script} on {ranks}{standbys}{faults}"

    # --- the observer connection --------------------------------------------------------------------------------
    def _find_remote(self) -> tuple[str, int]:
        """Where a controller listens that is not a child of this process."""
        known = self._remote or Address(host=self.settings.controller_address, port=0, pid=0)
        return read_address(Path(self.settings.run_dir)) or (known.host, known.port)

    async def _observe(self, find: Callable[[], tuple[str, int]]) -> None:
        """Show what the controller says, until it says that the job has ended."""
        while True:
            try:
                controller_connection = await self._connect(*await asyncio.to_thread(find))
                try:
                    while (update := await controller_connection.receive()) is not None:
                        self._on_update(update)
                        if self._ended is not None:
                            return
                finally:
                    self._observer = None
                    controller_connection.abort()
            except OSError:
                pass
            except ProtocolError as error:
                if str(error) != self._lost:  # once: it is tried again and again
                    self._lost = str(error)
                    self._screen.say(f"lost the controller's updates: {error}", "warning")
            await asyncio.sleep(REOBSERVE_SECONDS)

    async def _connect(self, host: str, port: int) -> ControllerConnection:
        token = (self.private_dir / "token").read_bytes()
        hello = Hello(protocol_version=PROTOCOL_VERSION, role="observer", name=f"launcher-{os.getpid()}", mac=b"")
        controller_connection, _ = await ControllerConnection.connect(
            (host, port),
            token,
            hello,
            tls=self._tls,
            server_name=self.settings.controller_address if self._remote is None else host,
            decoder=self._decode,
        )
        self._observer, self._lost = controller_connection, ""
        if self._signal:  # asked for while nobody could hear it
            self._ask_to_end(signal.Signals(self._signal).name)
        return controller_connection

    def _on_update(self, update: ObserverDown) -> None:
        self._silent_looks = 0
        match update:
            case StatusUpdate():
                self._winding_down = update.winding_down
                self._screen.progress(update)
            case NoticeUpdate():
                self._screen.say(update.text, update.level)
            case JobEnded():
                self._ended = update

    # --- the agent ----------------------------------------------------------------------------------------------
    async def _keep_agent(self, address: Address) -> None:
        """Keep one agent running: its workers outlive it, and a successor adopts them."""
        deaths = _Deaths(self.settings.agent_timeout_seconds / 3)
        adopt: tuple[str, ...] = ()
        controller = f"{address.host}:{address.port}"
        while True:
            self._agent = await start_module(
                *("relight.agent", "--controller", controller, "--name", self._name),
                *("--private-dir", str(self.private_dir), "--parent", str(os.getpid()), *adopt),
                pipe=True,
            )
            self._pump(self._agent)
            await self._first(self._agent.wait(), self._kill_if_frozen(self._agent, "agent"))
            status = await self._agent.wait()
            if status >= 0:  # it ended in order, most likely because the job did: that news may be a moment behind
                await self._first(self._ending.wait(), asyncio.sleep(GRACE_SECONDS))
            if self._ending.is_set() or self._ended is not None or self._signal:
                return
            if status in (0, CONTROLLER_LOST) and self._remote is not None:
                return  # told to end, or left alone, as it has said
            what = f"the agent {describe_exit(status)}"
            deaths.note(status)
            if deaths.too_many:
                self._screen.say(f"{what}, {MAX_OWN_ENDS} times within a minute; ending the job", "error")
                self._ask_to_end("the agent keeps ending")
                return
            then = "its workers train on, and a new agent adopts them" if status < 0 else "starting another"
            self._screen.say(f"{what}; {then}{deaths.when}", "warning")
            if await self._is_over_within(deaths.pause_seconds):
                return
            adopt = ("--adopt",)

    async def _is_over_within(self, seconds: float) -> bool:
        """Wait so long, unless the job ends, or is to end at once, before; whether it did."""
        await self._first(self._ending.wait(), self._at_once.wait(), asyncio.sleep(seconds))
        return self._ending.is_set() or self._at_once.is_set()

    async def _kill_if_frozen(self, child: Child, what: str) -> None:
        """One that is stopped watches nobody: better none, and a successor, than this one."""
        while True:
            await asyncio.sleep(FROZEN_LOOK_SECONDS)
            if is_stopped(child.pid):
                await asyncio.sleep(self.settings.frozen_timeout_seconds)
                if is_stopped(child.pid):
                    self._screen.say(f"the {what} is stopped (process state T); killing it", "warning")
                    child.signal(signal.SIGKILL)
                    return

    async def _kill_if_silent(self, controller: Child) -> None:
        """It tells how the job is doing twice a second. One that has long not done so hangs, whatever it hangs in.

        Looks are counted, not seconds: while this process had no processor, most likely the other one had none either.
        """
        self._silent_looks = 0
        while True:
            await asyncio.sleep(SILENT_LOOK_SECONDS)
            self._silent_looks += 1
            if self._silent_looks >= SILENT_LOOKS:
                seconds = SILENT_LOOKS * SILENT_LOOK_SECONDS
                self._screen.say(f"the controller has not said a word for {seconds:g} s; killing it", "warning")
                controller.signal(signal.SIGKILL)
                return

    def _pump(self, agent: Child) -> None:
        """Show what the agent relays from its workers, also what is left in the pipe after its death."""
        pump = asyncio.create_task(self._pump_output(agent.output))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    async def _pump_output(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(65536):
            await self._screen.output(chunk)

    # --- the dashboard ------------------------------------------------------------------------------------------
    async def _show_dashboard(self, address: str) -> None:
        """Its end is told, and nothing more: whoever wants it back starts `relight dashboard`."""
        dashboard = self._dashboard = await start_module(
            *("relight.dashboard", "--run-dir", self.settings.run_dir),
            *("--address", address, "--parent", str(os.getpid())),
            pipe=True,
        )
        async for line in dashboard.output:
            self._screen.say(line.decode(errors="replace").strip().removeprefix("relight: "), "warning")
        status = await dashboard.wait()
        if not self._ending.is_set() and not self._signal:
            self._screen.say(
                f"the dashboard {describe_exit(status)}; training goes on. "
                f"`relight dashboard {self.settings.run_dir}` starts another",
                "warning",
            )

    # --- tasks --------------------------------------------------------------------------------------------------
    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)

    async def _first(self, *works: Coroutine[Any, Any, Any] | asyncio.Task[None]) -> None:
        """Wait until one of them is done; the others are cancelled, except tasks that the caller owns."""
        tasks = [work if isinstance(work, asyncio.Task) else asyncio.create_task(work) for work in works]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task, work in zip(tasks, works, strict=True):
                if task is not work and not task.done():
                    task.cancel()
