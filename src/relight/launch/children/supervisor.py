"""Keeps one child process running: the controller, or the agent."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable

from relight.children import Child, describe_exit, is_stopped
from relight.launch.children.restart_policy import RestartPolicy
from relight.launch.progress import JobProgress
from relight.terminal import Screen

FROZEN_LOOK_SECONDS = 1.0


class Supervisor:
    """Starts a child again after each end, until it is given up or its job is over."""

    def __init__(
        self,
        name: str,
        policy: RestartPolicy,
        progress: JobProgress,
        screen: Screen,
        frozen_seconds: float,
        consequence: Callable[[int], str],
    ) -> None:
        """`consequence` says in words what an end with this status means for the job."""
        self._name = name
        self._policy = policy
        self._progress = progress
        self._screen = screen
        self._frozen_seconds = frozen_seconds
        self._consequence = consequence

    async def keep(self, live: Callable[[bool], Awaitable[Child | None]]) -> str:
        """Await one life after the other; return why the child was given up, or an empty string.

        `live` starts a child and returns it after its end, or None if no other is to be started. Its argument is
        False for the first life.
        """
        again = False
        while True:
            child = await live(again)
            if child is None or child.status is None:
                return ""
            what = f"the {self._name} {describe_exit(child.status)}"
            self._policy.note(child.status, time.monotonic(), child.lived_seconds)
            if self._policy.why_given_up:
                self._screen.say(f"{what}, {self._policy.why_given_up}; ending the job", "error")
                return f"{what}, {self._policy.why_given_up}"
            self._screen.say(f"{what}; {self._consequence(child.status)}{self._policy.when}", "warning")
            if await self._progress.is_over_within(self._policy.pause_seconds):
                return ""
            again = True

    async def kill_if_frozen(self, child: Child) -> None:
        """Kill a child that a signal has stopped: it does no work, and a successor can."""
        while True:
            await asyncio.sleep(FROZEN_LOOK_SECONDS)
            if is_stopped(child.pid):
                await asyncio.sleep(self._frozen_seconds)
                if is_stopped(child.pid):
                    self._screen.say(f"the {self._name} is stopped (process state T); killing it", "warning")
                    child.signal(signal.SIGKILL)
                    return
