"""Asks a process of this host for its Python stack, and waits until it has written it."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

from relight.agent.processes.process import Process
from relight.wire.messages import StackTaken
from relight.wire.stacks import ALL_STACKS, stack_path

ANSWER_SECONDS = 2.0  # a dump takes less than a millisecond; a machine may be busy
POLL_SECONDS = 0.005
MAX_FILE_BYTES = 4 * 2**20  # then the file is begun anew
MAX_STACK_BYTES = 32 * 2**10


class NoStack(Exception):
    """There is no stack. The message says why, for people."""


async def capture_stack(process: Process, private_dir: Path) -> StackTaken:
    """Return the stacks of all threads of a process, or the reason why there are none."""
    try:
        text = await take_stack(process.pid, process.pidfd, process.name, private_dir, ALL_STACKS)
        return StackTaken(process=process.name, text=text)
    except NoStack as error:
        return StackTaken(process=process.name, problem=str(error))


async def take_stack(
    pid: int, pidfd: int, process: str, private_dir: Path, number: int, answer_seconds: float = ANSWER_SECONDS
) -> str:
    """The stack that `process` writes when it gets signal `number` (wire/stacks.py). Raises NoStack."""
    path = stack_path(private_dir, process)
    try:
        now = _status(pid)
        if now["State"].startswith("T"):
            raise NoStack("it is stopped (process state T), and says nothing until it is continued")
        if not _has(now["SigCgt"], number):  # without a handler the signal would end it
            raise NoStack("it cannot be asked: its Python is still starting, or has ended")
        begin = _begin(path)
        deaf = _blocking(pid, number)
        signal.pidfd_send_signal(pidfd, number)
        deadline = time.monotonic() + answer_seconds
        # The kernel blocks the signal in the thread that runs the handler, until that is done; but only from a moment
        # after it was taken. So that it is not blocked means something once there is the beginning of an answer.
        while True:
            has_begun = path.stat().st_size > begin
            if not _blocking(pid, number) - deaf and has_begun:
                break
            if time.monotonic() > deadline:
                raise NoStack(f"no answer within {answer_seconds:g} s (process state {_status(pid)['State']})")
            await asyncio.sleep(POLL_SECONDS)
        with path.open("rb") as file:
            file.seek(begin)
            text = file.read(MAX_STACK_BYTES).decode("utf-8", "replace").strip()
    except (OSError, KeyError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        raise NoStack(f"it is gone, or out of reach: {reason}") from error
    return text


def _begin(path: Path) -> int:
    """Return where the answer will begin. The worker appends, so the file may be emptied under it."""
    size = path.stat().st_size
    if size < MAX_FILE_BYTES:
        return size
    os.truncate(path, 0)
    return 0


def _blocking(pid: int, number: int) -> set[str]:
    """Threads that do not take this signal, now."""
    found = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, KeyError):  # this thread has ended
            if _has(_status(pid, thread)["SigBlk"], number):
                found.add(thread)
    return found


def _status(pid: int, thread: str = "") -> dict[str, str]:
    path = Path(f"/proc/{pid}/task/{thread}/status" if thread else f"/proc/{pid}/status")
    pairs = (line.partition(":") for line in path.read_text(errors="replace").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _has(mask: str, number: int) -> bool:
    return bool(int(mask, 16) >> (number - 1) & 1)
