"""`relight run` as a process: starts the controller and the agent, and ends all that it has started.

It takes no part in recoveries, so it may be slow or stuck without harm. It starts the controller and the agent again
when they die. Its own death ends the job: the kernel tells both of them (PR_SET_PDEATHSIG).
"""

import asyncio
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from relight.children import end_children, kill_listed
from relight.launch.children.agent_child import GRACE_SECONDS, AgentChild
from relight.launch.children.controller_child import ControllerChild
from relight.launch.children.dashboard_child import DashboardChild
from relight.launch.observer import Observer
from relight.launch.progress import JobProgress, first_of
from relight.launch.succession import Succession
from relight.parent import remove_private_dir
from relight.terminal import Screen
from relight.wire.connection.address import Address, read_address
from relight.wire.connection.tls import Tls
from relight.wire.messages import DrainHost, JobEnded
from relight.wire.settings import JobSettings

END_SECONDS = 15.0  # for controller and agent, once the job has ended
LAST_WORDS_SECONDS = 2.0  # for what a controller that has ended has sent
INTERRUPT_SECONDS = 5.0  # from Ctrl-C to SIGTERM
WIND_DOWN_SECONDS = 600.0  # then, for a last step and a checkpoint; the sender of the signal has a limit of its own
OUTPUT_SECONDS = 2.0  # for the last output, and for the screen to show it


class Launcher:
    """Runs one job, or one host's part in it, from its start to its end."""

    def __init__(
        self,
        settings: JobSettings,
        private_dir: Path,
        screen: Screen,
        name: str,
        controller: Address | None = None,
        dashboard: str | None = None,
        tls: Tls | None = None,
        resume: tuple[str, ...] = (),
        *,
        spare: bool = False,
    ) -> None:
        """`name` is that of the agent. `controller`: one on another host; None: start one here.

        `resume`: flags of a controller that continues a job whose controller's host is gone; then there is no agent.
        `spare`: this host offers room for standbys and replacements, and the job does not start on it.
        """
        self._settings = settings
        self._private_dir = private_dir
        self._screen = screen
        self._remote = controller
        self._name = name
        self._progress = JobProgress(has_started=controller is not None)
        self._observer = Observer(
            screen,
            (private_dir / "token").read_bytes,
            lambda host: settings.controller_address if controller is None else host,
            tls,
        )
        shared = (screen, self._progress, self._observer)
        self._succession = Succession(settings, private_dir, screen, self._observer) if settings.lease else None
        holder = self._succession.holder if self._succession is not None else ""
        self._controller = ControllerChild(
            *(settings, private_dir, *shared), flags=resume, holder=holder, on_start=self._on_controller_started
        )
        joins = controller is not None or bool(settings.lease)
        self._agent = AgentChild(settings, private_dir, name, *shared, joins=joins, spare=spare)
        self._agent_ended = asyncio.Event()
        self._has_agent = not resume
        self._dashboard = (
            DashboardChild(settings.run_dir, dashboard, screen, self._progress) if dashboard is not None else None
        )
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def has_started(self) -> bool:
        """True if there has been a controller."""
        return self._progress.has_started

    @property
    def ended(self) -> JobEnded | None:
        """The controller's last message about the job."""
        return self._observer.ended

    # --- signals ------------------------------------------------------------------------------------------------
    def interrupt(self, number: int) -> None:
        """Ask the controller to end the job at the first signal; end everything at once at the second.

        SIGTERM on a host without the controller, or with one that can move, concerns that host: its ranks move to
        others, and it leaves the job.
        """
        progress = self._progress
        if progress.signal or self._observer.ended is not None:
            progress.at_once.set()
            return
        progress.signal = number
        name = signal.Signals(number).name
        may_leave = self._remote is not None or (bool(self._settings.lease) and progress.has_started)
        if number == signal.SIGTERM and may_leave:
            self._screen.say(f"{name}: leaving the job once the ranks here have moved (again: at once)", "warning")
            self._observer.ask_to_drain(DrainHost(host=self._name, why=f"{name} on this host", leaves=True))
            asyncio.get_running_loop().call_later(WIND_DOWN_SECONDS, progress.at_once.set)
            return
        self._screen.say(f"{name}: ending the job (again: at once)", "warning")
        if self._controller.child is None or not progress.has_started:
            progress.at_once.set()
        else:
            self._observer.ask_to_end(name)
            asyncio.get_running_loop().call_later(INTERRUPT_SECONDS, self._lose_patience)

    def _lose_patience(self) -> None:
        """End at once, unless a last step is being taken, and a checkpoint written."""
        if self._observer.winding_down:
            asyncio.get_running_loop().call_later(WIND_DOWN_SECONDS, self._progress.at_once.set)
        else:
            self._progress.at_once.set()

    # --- the job ------------------------------------------------------------------------------------------------
    async def run(self) -> int:
        """Start everything and wait until the job has ended; return the exit status."""
        keeping = asyncio.create_task(self._keep_controller() if self._remote is None else self._follow(self._remote))
        await first_of(keeping, self._progress.at_once.wait())
        keeping.cancel()
        self._progress.ending.set()
        return self._status()

    async def end(self) -> None:
        """End every process that is left, and show the last output."""
        progress = self._progress
        progress.ending.set()
        for task in self._tasks:
            task.cancel()
        hosts = (self._controller, self._agent, self._dashboard)
        children = [host.child for host in hosts if host is not None and host.child is not None]
        await end_children(children, 0.0 if progress.at_once.is_set() and progress.signal else GRACE_SECONDS)
        kill_listed(self._private_dir)
        await self._agent.flush(OUTPUT_SECONDS)
        self._observer.abort()

    async def _keep_controller(self) -> None:
        await self._keep_until_left(self._controller)
        if self._controller.superseded:
            if self._has_agent:
                await self._follow_others()
            else:
                await self._observer.follow(self._find_remote)
        if self._observer.ended is not None:
            await self._await_children()

    async def _follow(self, controller: Address) -> None:
        """Run an agent until the controller on another host reports the end of the job, or is gone for good."""
        self._spawn(self._keep_agent(controller))
        await self._follow_others()
        if self._observer.ended is not None:
            await self._await_children()

    async def _keep_agent(self, controller: Address) -> None:
        await self._agent.keep(controller)
        self._agent_ended.set()

    async def _follow_others(self) -> None:
        """Follow controllers on other hosts, and carry on the job here when this host holds its Lease."""
        while self._observer.ended is None and not self._agent_ended.is_set():
            observing = asyncio.create_task(self._observer.follow(self._find_remote))
            winning = None if self._succession is None else asyncio.create_task(self._succession.win())
            try:
                await first_of(observing, self._agent_ended.wait(), *([] if winning is None else [winning]))
                if winning is None or not winning.done():
                    if self._observer.ended is None:  # the agent heard of it first
                        await first_of(observing, asyncio.sleep(GRACE_SECONDS))
                    return
            finally:
                observing.cancel()
                if winning is not None:
                    winning.cancel()
            await self._carry_on()

    async def _carry_on(self) -> None:
        """Run the job's controller here until the job is over, or another host has it."""
        assert self._succession is not None
        try:
            settings, private_dir = self._succession.prepare()
        except OSError as error:
            self._leave_to_others(f"no controller can be started here: {error}")
            return
        try:
            self._controller = ControllerChild(
                *(settings, private_dir, self._screen, self._progress, self._observer),
                flags=("--resume", "--take-over"),
                holder=self._succession.holder,
                on_start=self._on_controller_started,
            )
            await self._keep_until_left(self._controller)
            if self._observer.ended is not None:
                await self._await_children()
            elif not self._controller.superseded and not self._agent_ended.is_set():
                self._leave_to_others("no controller can be kept here")
        finally:
            remove_private_dir(private_dir)

    def _leave_to_others(self, why: str) -> None:
        """Take no further part in the Lease: other hosts may have more luck."""
        self._succession = None
        self._screen.say(f"{why}; that is left to other hosts", "warning")

    async def _keep_until_left(self, controller: ControllerChild) -> None:
        """Keep a controller here; if it can move, only until this host has left the job."""
        if not self._settings.lease:
            await controller.keep()
            return
        keeping = asyncio.create_task(controller.keep())
        try:
            await first_of(keeping, self._agent_ended.wait())
            if not keeping.done() and self._name in self._observer.released:
                controller.hand_over()
            await keeping
        finally:
            keeping.cancel()

    def _on_controller_started(self, address: Address) -> None:
        self._screen.say(f"{_describe(self._settings)}; logs in {self._settings.run_dir}")
        if self._has_agent:
            self._spawn(self._keep_agent(address))
        if self._dashboard is not None:
            self._spawn(self._dashboard.run())

    async def _await_children(self) -> None:
        """Wait for controller and agent, which end by themselves when the job has ended."""
        self._progress.ending.set()
        children = [host.child for host in (self._controller, self._agent) if host.child is not None]
        waits = [asyncio.create_task(child.wait()) for child in children]
        hearing = asyncio.create_task(self._observer.hear_last_words())
        if self._progress.signal and self._agent.child is not None:  # it may not have joined, and hear of no end
            self._agent.child.signal(signal.SIGTERM)
        try:
            # Not gather(): cancelled under a time limit, it leaves an exception that Python prints.
            living = (await asyncio.wait(waits, timeout=END_SECONDS))[1] if waits else ()
            if not living and self._controller.child is not None:  # it has closed the connection
                await asyncio.wait_for(hearing, LAST_WORDS_SECONDS)
        except TimeoutError:
            return
        finally:
            for task in (*waits, hearing):
                task.cancel()

    def _status(self) -> int:
        if self._observer.ended is not None and not self._observer.ended.error:
            return 0
        if self._name in self._observer.released and not self._progress.at_once.is_set():
            # the job goes on elsewhere
            return self._settings.fault_status if self._name in self._observer.faulty else 0
        if self._progress.signal:
            return 128 + self._progress.signal
        controller = self._controller.child
        refused = controller.status if controller is not None and not self._progress.has_started else None
        return refused or 1

    def _find_remote(self) -> tuple[str, int]:
        """Return the address of a controller that is not a child of this process."""
        known = self._remote or Address(host=self._settings.controller_address, port=0, pid=0)
        return read_address(Path(self._settings.run_dir)) or (known.host, known.port)

    # --- tasks --------------------------------------------------------------------------------------------------
    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._check)

    def _check(self, task: asyncio.Task[None]) -> None:
        """End the job after a defect in relight: without this task the job has no supervisor."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._screen.say(f"ending the job after a defect in relight: {error!r}", "error")
            self._progress.at_once.set()


def _describe(settings: JobSettings) -> str:
    ranks = f"{settings.world_size} rank{'s' if settings.world_size > 1 else ''}"
    standbys = f", {settings.standbys} standby" if settings.standbys else ", no standby"
    planned = len(settings.plan.faults)
    faults = f", {planned} planned fault{'s' if planned > 1 else ''}" if planned else ""
    return f"{settings.script} on {ranks}{standbys}{faults}"
