"""Processes that `relight run` starts, and the certainty that none of them is left when it ends."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

_STATE, _START_TIME = 0, 19  # fields of /proc/PID/stat, counted after the command's name


class _Listed(msgspec.Struct):
    """The part of an agent's roster line that identifies a process."""

    pid: int
    start_time: int | None = None


async def start_module(*arguments: str, pipe: bool = False) -> asyncio.subprocess.Process:
    """`python -m ...` in a session of its own: Ctrl-C reaches the launcher alone, which ends the job in order."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE if pipe else None,
        start_new_session=True,
    )


async def end_children(processes: Iterable[asyncio.subprocess.Process], grace_seconds: float) -> None:
    """SIGTERM, and SIGKILL to those that are still there after `grace_seconds`."""
    living = [process for process in processes if process.returncode is None]
    if grace_seconds > 0 and living:
        for process in living:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        waits = [asyncio.ensure_future(process.wait()) for process in living]
        await asyncio.wait(waits, timeout=grace_seconds)
        for wait in waits:
            wait.cancel()
    for process in living:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def kill_listed(private_dir: Path) -> int:
    """SIGKILL every process that an agent has listed and that is still the same one. Returns how many there were."""
    killed = 0
    for roster in sorted(private_dir.glob("agent-*.pids")):
        for line in _read_lines(roster):
            try:
                listed = msgspec.json.decode(line, type=_Listed)
            except msgspec.DecodeError:  # blank, or cut short by the agent's death
                continue
            if listed.start_time is not None and start_time(listed.pid) == listed.start_time:
                killed += _kill_with_group(listed.pid)
    return killed


def start_time(pid: int) -> int | None:
    """With the pid, a process's identity; None if it is gone or a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[_STATE] in "ZX" else int(fields[_START_TIME])


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process (SIGSTOP)."""
    fields = _stat(pid)
    return fields is not None and fields[_STATE] == "T"


def describe_exit(status: int | None) -> str:
    """ "died of SIGKILL" or "ended with status 1"."""
    if status is not None and status < 0:
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


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the command's name, which may contain anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
