"""The process behind `relight run`: starts the controller and the agent, and leaves nothing behind.

It takes no part in recoveries, so it may be slow or stuck without harm. It starts the controller and the agent again
when they die. Its own death ends the job: the kernel tells both of them (PR_SET_PDEATHSIG).
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from relight.agent.agent import CONTROLLER_LOST
from relight.children import Child, describe_exit, end_children, is_stopped, kill_listed, start_module
from relight.launch.deaths import Deaths
from relight.launch.observer import Observer
from relight.terminal import Screen
from relight.wire.address import Address, find_address, read_address
from relight.wire.messages import JobEnded
from relight.wire.settings import SUPERSEDED, JobSettings
from relight.wire.tls import Tls

CONTROLLER_START_SECONDS = 30.0
END_SECONDS = 15.0  # for controller and agent, once the job has ended
INTERRUPT_SECONDS = 5.0  # from Ctrl-C to SIGTERM
WIND_DOWN_SECONDS = 600.0  # then, for a last step and a checkpoint; whoever sent the signal has a limit of his own
GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL
OUTPUT_SECONDS = 2.0  # for the last output, and for the screen to show it
FROZEN_LOOK_SECONDS = 1.0
SILENT_LOOK_SECONDS = 1.0
SILENT_LOOKS = 30  # without a word of the controller, before it is held to hang
LAST_WORDS_SECONDS = 0.1


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
        self._dashboard_address = dashboard
        self._dashboard: Child | None = None
        self.screen = screen
        self._controller: Child | None = None
        self._agent: Child | None = None
        self._observer = Observer(
            screen,
            self._read_token,
            lambda host: settings.controller_address if controller is None else host,
            tls,
        )
        self._ending = asyncio.Event()  # the job is over, or is being ended
        self._at_once = asyncio.Event()  # no more patience
        self._signal = 0
        self._started = False
        self._start_patience_seconds = CONTROLLER_START_SECONDS
        self._tasks: set[asyncio.Task[None]] = set()
        self._pumps: set[asyncio.Task[None]] = set()

    def _read_token(self) -> bytes:
        return (self.private_dir / "token").read_bytes()

    @property
    def has_started(self) -> bool:
        """Whether there has been a controller."""
        return self._started

    @property
    def ended(self) -> JobEnded | None:
        """The controller's message about the job's end."""
        return self._observer.ended

    # --- signals ------------------------------------------------------------------------------------------------
    def interrupt(self, number: int) -> None:
        """The first signal asks the controller to end the job; a second one ends everything at once."""
        if self._signal or self._observer.ended is not None:
            self._at_once.set()
            return
        self._signal = number
        name = signal.Signals(number).name
        self.screen.say(f"{name}: ending the job (again: at once)", "warning")
        if self._controller is None or not self._started:
            self._at_once.set()
        else:
            self._observer.ask_to_end(name)
            asyncio.get_running_loop().call_later(INTERRUPT_SECONDS, self._lose_patience)

    def _lose_patience(self) -> None:
        """Unless a last step is being taken, and a checkpoint written."""
        if self._observer.winding_down:
            asyncio.get_running_loop().call_later(WIND_DOWN_SECONDS, self._at_once.set)
        else:
            self._at_once.set()

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
        self.screen.say(text, "warning" if self._started else "error")
        if self._started:  # training goes on, and another one has twice the time
            self._start_patience_seconds *= 2
            controller.signal(signal.SIGKILL)
            await controller.wait()
        return None

    async def _keep_controller(self) -> None:
        """Until the job has ended. A controller that dies is followed by another, which learns from its journal."""
        deaths = Deaths(self.settings.controller_timeout_seconds / 10)
        resume = self._resume
        while True:
            began = time.monotonic()
            address = await self._start_controller(*resume)
            controller = self._controller
            assert controller is not None
            if address is not None:
                self._note_started(address)
                await self._attend(controller, address)
            if self._observer.ended is not None:
                await self._await_children()
                return
            if controller.status == SUPERSEDED:
                self.screen.say("the job has another controller; this host continues with that one", "warning")
                await self._observer.follow(self._find_remote)
                await self._await_children()
                return
            if controller.status is None or (controller.status > 0 and not self._started):
                return  # there is no controller to be had, as was said; or the user wants an end
            what = f"the controller {describe_exit(controller.status)}"
            deaths.note(controller.status, time.monotonic(), time.monotonic() - began)
            if deaths.why_given_up:
                self.screen.say(f"{what}, {deaths.why_given_up}; ending the job", "error")
                return
            then = "training goes on, and another takes over" if self._started else "starting another"
            self.screen.say(f"{what}; {then}{deaths.when}", "warning")
            if await self._is_over_within(deaths.pause_seconds):
                return
            resume = ("--resume",)

    async def _follow(self, controller: Address) -> None:
        """The controller is on another host: until it says that the job has ended, or is gone for good."""
        self._started = True
        observing = asyncio.create_task(self._observer.follow(self._find_remote))
        try:
            await self._first(observing, self._keep_agent(controller))
            if self._observer.ended is None:  # the agent was told first
                await self._first(observing, asyncio.sleep(GRACE_SECONDS))
        finally:
            observing.cancel()
        if self._observer.ended is not None:
            await self._await_children()

    def _note_started(self, address: Address) -> None:
        if not self._started:
            self._started = True
            self.screen.say(f"{self._describe_job()}; logs in {self.settings.run_dir}")
            if not self._resume:
                self._spawn(self._keep_agent(address))
            if self._dashboard_address is not None:
                self._spawn(self._show_dashboard(self._dashboard_address))

    async def _attend(self, controller: Child, address: Address) -> None:
        """Until this controller says that the job has ended, or dies."""
        observing = asyncio.create_task(self._observer.follow(lambda: (address.host, address.port)))
        watching = asyncio.create_task(self._kill_if_frozen(controller, "controller"))
        listening = asyncio.create_task(self._kill_if_silent(controller))
        try:
            await self._first(observing, controller.wait())
            if self._observer.ended is None:  # its last words may still be on their way
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
        if self._observer.ended is not None and not self._observer.ended.error:
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
        self._observer.abort()

    def _describe_job(self) -> str:
        settings = self.settings
        ranks = f"{settings.world_size} rank{'s' if settings.world_size > 1 else ''}"
        standbys = f", {settings.standbys} standby" if settings.standbys else ", no standby"
        planned = len(settings.plan.faults)
        faults = f", {planned} planned fault{'s' if planned > 1 else ''}" if planned else ""
        return f"{settings.script} on {ranks}{standbys}{faults}"

    def _find_remote(self) -> tuple[str, int]:
        """Where a controller listens that is not a child of this process."""
        known = self._remote or Address(host=self.settings.controller_address, port=0, pid=0)
        return read_address(Path(self.settings.run_dir)) or (known.host, known.port)

    # --- the agent ----------------------------------------------------------------------------------------------
    async def _keep_agent(self, address: Address) -> None:
        """Keep one agent running: its workers outlive it, and a successor adopts them."""
        deaths = Deaths(self.settings.agent_timeout_seconds / 3)
        adopt: tuple[str, ...] = ()
        controller = f"{address.host}:{address.port}"
        while True:
            began = time.monotonic()
            self._agent = await start_module(
                *("relight.agent", "--controller", controller, "--name", self._name),
                *("--private-dir", str(self.private_dir), "--parent", str(os.getpid()), *adopt),
                pipe=True,
            )
            self._pump(self._agent)
            await self._first(self._agent.wait(), self._kill_if_frozen(self._agent, "agent"))
            status = await self._agent.wait()
            lived_seconds = time.monotonic() - began
            if status >= 0:  # it ended in order, most likely because the job did: that news may be a moment behind
                await self._first(self._ending.wait(), asyncio.sleep(GRACE_SECONDS))
            if self._ending.is_set() or self._observer.ended is not None or self._signal:
                return
            if status in (0, CONTROLLER_LOST) and self._remote is not None:
                return  # told to end, or left alone, as it has said
            what = f"the agent {describe_exit(status)}"
            deaths.note(status, time.monotonic(), lived_seconds)
            if deaths.why_given_up:
                self.screen.say(f"{what}, {deaths.why_given_up}; ending the job", "error")
                self._observer.ask_to_end(f"{what}, {deaths.why_given_up}")
                return
            then = "its workers train on, and a new agent adopts them" if status < 0 else "starting another"
            self.screen.say(f"{what}; {then}{deaths.when}", "warning")
            if await self._is_over_within(deaths.pause_seconds):
                return
            adopt = ("--adopt",)

    async def _is_over_within(self, seconds: float) -> bool:
        """Wait so long, unless the job ends, or is to end at once, before; whether it did."""
        await self._first(self._ending.wait(), self._at_once.wait(), asyncio.sleep(seconds))
        return self._ending.is_set() or self._at_once.is_set()

    async def _kill_if_frozen(self, child: Child, what: str) -> None:
        """Kill a child that a signal has stopped: it does no work, and a successor can."""
        while True:
            await asyncio.sleep(FROZEN_LOOK_SECONDS)
            if is_stopped(child.pid):
                await asyncio.sleep(self.settings.frozen_timeout_seconds)
                if is_stopped(child.pid):
                    self.screen.say(f"the {what} is stopped (process state T); killing it", "warning")
                    child.signal(signal.SIGKILL)
                    return

    async def _kill_if_silent(self, controller: Child) -> None:
        """It tells how the job is doing twice a second. One that has long not done so hangs, whatever it hangs in.

        Looks are counted, not seconds: while this process had no processor, most likely the other one had none either.
        """
        self._observer.silent_looks = 0
        while True:
            await asyncio.sleep(SILENT_LOOK_SECONDS)
            self._observer.silent_looks += 1
            if self._observer.silent_looks >= SILENT_LOOKS:
                seconds = SILENT_LOOKS * SILENT_LOOK_SECONDS
                self.screen.say(f"the controller has not said a word for {seconds:g} s; killing it", "warning")
                controller.signal(signal.SIGKILL)
                return

    def _pump(self, agent: Child) -> None:
        """Show what the agent relays from its workers, also what is left in the pipe after its death."""
        pump = asyncio.create_task(self._pump_output(agent.output))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    async def _pump_output(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(65536):
            await self.screen.output(chunk)

    # --- the dashboard ------------------------------------------------------------------------------------------
    async def _show_dashboard(self, address: str) -> None:
        """Serve the live page. Its end is shown and nothing else: `relight dashboard` starts another."""
        dashboard = self._dashboard = await start_module(
            *("relight.dashboard", "--run-dir", self.settings.run_dir),
            *("--address", address, "--parent", str(os.getpid())),
            pipe=True,
        )
        async for line in dashboard.output:
            self.screen.say(line.decode(errors="replace").strip().removeprefix("relight: "), "warning")
        status = await dashboard.wait()
        if not self._ending.is_set() and not self._signal:
            self.screen.say(
                f"the dashboard {describe_exit(status)}; training goes on. "
                f"`relight dashboard {self.settings.run_dir}` starts another",
                "warning",
            )

    # --- tasks --------------------------------------------------------------------------------------------------
    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._check)

    def _check(self, task: asyncio.Task[None]) -> None:
        """A defect of ours: without this task nothing looks after the job."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.screen.say(f"ending the job: {error!r}", "error")
            self._at_once.set()

    async def _first(self, *works: Coroutine[Any, Any, Any] | asyncio.Task[None]) -> None:
        """Wait until one of them is done; the others are cancelled, except tasks that the caller owns."""
        tasks = [work if isinstance(work, asyncio.Task) else asyncio.create_task(work) for work in works]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task, work in zip(tasks, works, strict=True):
                if task is not work and not task.done():
                    task.cancel()
