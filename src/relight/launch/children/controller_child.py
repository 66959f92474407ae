"""The controller as a child of `relight run`."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from relight.children import Child, start_module
from relight.launch.children.restart_policy import RestartPolicy
from relight.launch.children.supervisor import Supervisor
from relight.launch.observer import Observer
from relight.launch.progress import JobProgress, first_of
from relight.terminal import Screen
from relight.wire.connection.address import Address, find_address
from relight.wire.settings import HAND_OVER, SUPERSEDED, JobSettings

START_SECONDS = 30.0
SILENT_LOOK_SECONDS = 1.0
SILENT_LOOKS = 30  # without an update of the controller, before it is considered hung
LAST_WORDS_SECONDS = 0.1


class ControllerChild:
    """Keeps a controller running until the job has ended; each successor continues by the journal."""

    def __init__(
        self,
        settings: JobSettings,
        private_dir: Path,
        screen: Screen,
        progress: JobProgress,
        observer: Observer,
        *,
        flags: tuple[str, ...],
        holder: str = "",
        on_start: Callable[[Address], None],
    ) -> None:
        """`flags`: of the first controller. `holder`: see `Succession`. `on_start` is called once, when it listens."""
        self._private_dir = private_dir
        self._screen = screen
        self._progress = progress
        self._observer = observer
        self._flags = flags
        self._on_start = on_start
        self._always = ("--holder", holder) if holder else ()
        self._patience_seconds = START_SECONDS + (2 * settings.lease_seconds if holder else 0)
        self._supervisor = Supervisor(
            "controller",
            RestartPolicy(settings.controller_timeout_seconds / 10),
            *(progress, screen, settings.frozen_timeout_seconds),
            lambda _: "training goes on, and another takes over" if progress.has_started else "starting another",
        )
        self.child: Child | None = None  # the newest one
        self.superseded = False  # the job has another controller
        self._hands_over = False

    async def keep(self) -> None:
        """Run controllers until the job has ended, or there is no controller to be had."""
        await self._supervisor.keep(self._live)

    def hand_over(self) -> None:
        """Leave the job to a controller on another host."""
        self._hands_over = True
        if self.child is not None:
            self.child.signal(HAND_OVER)

    async def _live(self, again: bool) -> Child | None:
        flags = ("--resume",) if again else self._flags
        controller = self.child = await start_module(
            *(
                "relight.server",
                "--private-dir",
                str(self._private_dir),
                "--parent",
                str(os.getpid()),
                *flags,
                *self._always,
            )
        )
        address = await self._await_address(controller)
        if address is not None:
            if not self._progress.has_started:
                self._progress.has_started = True
                self._on_start(address)
            await self._attend(controller, address)
        if self._observer.ended is not None:
            return None
        if self._hands_over:
            return None
        if controller.status == SUPERSEDED and self._progress.has_started:
            said = "the job has another controller; this host continues with that one"
            self._screen.say("this host looks for the job's next controller" if self._always else said, "warning")
            self.superseded = True
            return None
        if controller.status is None or (controller.status > 0 and not self._progress.has_started):
            return None  # it cannot be started, as it has said; or the user wants an end
        return controller

    async def _await_address(self, controller: Child) -> Address | None:
        """Wait until the controller listens. None if it ended, or the job has to end at once, before."""
        deadline = time.monotonic() + self._patience_seconds
        while time.monotonic() < deadline:
            address = find_address(self._private_dir)
            if address is not None and address.pid == controller.pid:
                return address
            if controller.status is not None or self._progress.at_once.is_set():
                return None
            await asyncio.sleep(0.01)
        text = f"the controller did not start within {self._patience_seconds:g} s"
        self._screen.say(text, "warning" if self._progress.has_started else "error")
        if self._progress.has_started:  # training goes on, and the next controller has twice the time
            self._patience_seconds *= 2
            controller.signal(signal.SIGKILL)
            await controller.wait()
        return None

    async def _attend(self, controller: Child, address: Address) -> None:
        """Wait until this controller reports the end of the job, or dies."""
        observing = asyncio.create_task(self._observer.follow(lambda: (address.host, address.port)))
        watching = asyncio.create_task(self._supervisor.kill_if_frozen(controller))
        listening = asyncio.create_task(self._kill_if_silent(controller))
        try:
            await first_of(observing, controller.wait())
            if self._observer.ended is None:  # its last update may still be on its way
                await first_of(observing, asyncio.sleep(LAST_WORDS_SECONDS))
        finally:
            for task in (observing, watching, listening):
                task.cancel()

    async def _kill_if_silent(self, controller: Child) -> None:
        """Kill a controller that hangs: it has sent no update for a long time, which is due twice a second.

        Looks are counted, not seconds: while this process had no processor, most likely the other one had none either.
        """
        self._observer.silent_looks = 0
        while True:
            await asyncio.sleep(SILENT_LOOK_SECONDS)
            self._observer.silent_looks += 1
            if self._observer.silent_looks >= SILENT_LOOKS:
                seconds = SILENT_LOOKS * SILENT_LOOK_SECONDS
                self._screen.say(f"no update from the controller for {seconds:g} s; killing it", "warning")
                controller.signal(signal.SIGKILL)
                return
