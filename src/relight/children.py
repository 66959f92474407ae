"""Processes that `relight run` starts, and the certainty that none of them is left when it ends."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from relight.agent.processes.readings.probes import start_time, state


class _Listed(msgspec.Struct):
    """The part of a line of an agent's process table that identifies a process."""

    pid: int
    start_time: int | None = None


class Child:
    """One process of ours. Signals go through a pidfd: asyncio's own would now and then lose the exit status."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._started = self._ended = time.monotonic()
        self._pidfd = _pidfd_of_child(process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it lives."""
        return self._process.returncode

    @property
    def output(self) -> asyncio.StreamReader:
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def lived_seconds(self) -> float:
        """Seconds that it had lived when `wait` returned."""
        return self._ended - self._started

    async def wait(self) -> int:
        """Wait for its end; return its exit status."""
        waited = self.status is None
        status = await self._process.wait()
        if waited:
            self._ended = time.monotonic()
        return status

    def signal(self, number: signal.Signals) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


def _pidfd_of_child(pid: int) -> int | None:
    """None if it has ended, and asyncio has taken its exit status already: the number may be another process's."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        os.close(pidfd)
        return None
    return pidfd


async def start_module(*arguments: str, pipe: bool = False) -> Child:
    """`python -m ...` in a session of its own: Ctrl-C reaches the launcher alone, which ends the job in order."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # a `queue.py` beside the user's script is none of ours
        "-m",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE if pipe else None,
        start_new_session=True,
    )
    return Child(process)


async def end_children(children: Iterable[Child], grace_seconds: float) -> None:
    """SIGTERM, and SIGKILL to those that are still there after `grace_seconds`."""
    living = [child for child in children if child.status is None]
    if grace_seconds > 0 and living:
        for child in living:
            child.signal(signal.SIGTERM)
        waits = [asyncio.ensure_future(child.wait()) for child in living]
        await asyncio.wait(waits, timeout=grace_seconds)
        for wait in waits:
            wait.cancel()
    for child in living:
        if child.status is None:
            child.signal(signal.SIGKILL)
            await child.wait()


def kill_listed(private_dir: Path) -> int:
    """SIGKILL every process that an agent has listed and that is still the same one. Returns how many there were."""
    killed = 0
    for table in sorted(private_dir.glob("agent-*.pids")):
        for line in _read_lines(table):
            try:
                listed = msgspec.json.decode(line, type=_Listed)
            except msgspec.DecodeError:  # blank, or cut short by the agent's death
                continue
            if listed.start_time is not None and start_time(listed.pid) == listed.start_time:
                killed += _kill_with_group(listed.pid)
    return killed


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process (SIGSTOP)."""
    return state(pid) == "T"


def describe_exit(status: int) -> str:
    """ "died of SIGKILL" or "ended with status 1"."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"died of {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _kill_with_group(pid: int) -> int:
    """A worker leads a group of its own, in which its data loading processes are too."""
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return 1


def _read_lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError:
        return []
