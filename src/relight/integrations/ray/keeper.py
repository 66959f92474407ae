"""The process between an actor of Ray and the `relight` that it starts: whatever ends the actor leaves nothing here.

Its standard input is a pipe of the actor: one line with the job's token, and then nothing. At the end of the pipe the
actor is gone, and all that was started for it is killed at once, as if the machine had failed: what a lost host does
last must not look like an order to end the job. A worker of Ray kills its children when it ends, but not theirs: so the
child of the actor does nothing but wait for the process that does this, and does it itself if that one is killed.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from relight.parent import remove_private_dir

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def main(command: Sequence[str]) -> int:
    """Run a command until it or the actor ends; return its exit status, as a shell does."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a worker of Ray ignores it, and its children would as well
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # should the keeper be killed, its children become this process's
    directory = Path(tempfile.mkdtemp(prefix="rlray-", dir="/tmp"))  # mode 0700; short, since sockets lie below it
    outer_lives, outer = os.pipe()  # the outer process holds one end, and never writes
    keeper = os.fork()
    if not keeper:
        os.close(outer)
        return _keep(command, directory, outer_lives)
    os.close(outer_lives)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: os.kill(keeper, received))
    status = os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1])
    _leave_nothing(directory)
    return _as_shell(status)


def _keep(command: Sequence[str], directory: Path, outer_lives: int) -> int:
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what loses its parent becomes a child of this process
    try:
        token = directory / "token"
        token.touch(mode=0o600)
        token.write_bytes(sys.stdin.buffer.readline())
        environment = {**os.environ, "TMPDIR": str(directory), "RELIGHT_TOKEN_FILE": str(token)}
        return _watch(command, environment, outer_lives)
    finally:
        _leave_nothing(directory)


def _leave_nothing(directory: Path) -> None:
    """Kill all descendants, and remove the private files."""
    _kill_descendants()
    for private_dir in directory.glob("relight-*"):
        remove_private_dir(private_dir)
    shutil.rmtree(directory, ignore_errors=True)


def _watch(command: Sequence[str], environment: dict[str, str], outer_lives: int) -> int:
    def end_with_keeper() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
        preexec_fn=end_with_keeper,  # noqa: PLW1509 (there is one thread)
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: process.send_signal(received))
    ended = os.pidfd_open(process.pid)
    readable, _, _ = select.select([sys.stdin, outer_lives, ended], [], [])
    if ended not in readable:
        return 128 + signal.SIGKILL
    return _as_shell(process.wait())


def _as_shell(status: int) -> int:
    return status if status >= 0 else 128 - status


def _kill_descendants() -> None:
    """Kill until none is left: one that loses its parent meanwhile is found in the next round.

    All are stopped first, so that none sees another one's end and tells the other hosts of it.
    """
    stopped = set[int]()
    while new := set(_descendants()) - stopped:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    while found := _descendants():
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.wait()


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, new = list[int](), [os.getpid()]
    while new:
        new = [child for pid in new for child in children.get(pid, [])]
        found += new
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
