"""The agent's side of the template process, of which it has workers forked (training.template)."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

import msgspec

from relight.agent.processes.readings.probes import exit_status
from relight.wire.template import (
    GO,
    MOST_BYTES,
    ROOM_BYTES,
    ROOM_VARIABLE,
    SHARED_VARIABLE,
    Answer,
    Fork,
    Forked,
    Order,
    Ready,
    Reap,
)

COMMAND = (sys.executable, "-P", "-m", "relight.training.template")
_ANSWER_SECONDS = 5.0  # a fork takes some milliseconds
_DECODER = msgspec.json.Decoder(Answer)


class Template:
    """A process that imports `modules` once. Its environment is that of workers, apart from each one's own part."""

    def __init__(self, modules: str, environment: Mapping[str, str]) -> None:
        """Start the process, or connect to the one that the environment names. Raises OSError."""
        self._process: subprocess.Popen[bytes] | None = None
        if shared := os.environ.get(SHARED_VARIABLE):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.connect(shared)
            return
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                (*COMMAND, str(theirs.fileno()), modules),
                env={**environment, ROOM_VARIABLE: "0" * ROOM_BYTES},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The number of the process; 0: another has started it."""
        return self._process.pid if self._process is not None else 0

    async def ready(self) -> str:
        """Wait until the modules are imported; return why workers cannot be forked, or "" if they can."""
        self._socket.setblocking(False)
        try:
            message = await asyncio.get_running_loop().sock_recv(self._socket, MOST_BYTES)
        except OSError as error:
            return str(error)
        self._socket.settimeout(_ANSWER_SECONDS)
        answer = _DECODER.decode(message) if message else None
        return answer.refusal if isinstance(answer, Ready) else "the template process has ended"

    def fork(self, environment: Mapping[str, str], output: tuple[int, int], passed: tuple[int, ...]) -> "ForkedProcess":
        """Fork a worker with the ends of its output pipes and other descriptors.

        Raises OSError, also if there is no answer in time; then no worker comes of it later either.
        """
        go, started = os.pipe2(os.O_CLOEXEC)
        try:
            answer = self._ask(Fork(os.getcwd(), dict(environment), passed), (go, *output, *passed))
            if not isinstance(answer, Forked):
                raise ConnectionError("the template process has ended")
            os.write(started, GO)
        finally:
            os.close(go)
            os.close(started)
        return ForkedProcess(self, answer.pid)

    def reap(self, pid: int) -> None:
        """Let a worker that has ended be collected. Without a template process, the system has done so."""
        with contextlib.suppress(OSError):
            self._order(Reap(pid))

    def close(self) -> None:
        """End the process. Workers that were forked of it live on."""
        self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ask(self, order: Order, descriptors: tuple[int, ...]) -> Answer | None:
        """Return the answer; None if the template process has ended."""
        try:
            self._order(order, descriptors)
            message = self._socket.recv(MOST_BYTES)
        except (BrokenPipeError, ConnectionResetError):
            return None
        return _DECODER.decode(message) if message else None

    def _order(self, order: Order, descriptors: tuple[int, ...] = ()) -> None:
        socket.send_fds(self._socket, [msgspec.json.encode(order)], descriptors)


class ForkedProcess:
    """A worker that was forked: a child of the template process, not of the agent."""

    def __init__(self, template: Template, pid: int) -> None:
        self.pid = pid
        self._template = template

    def status(self) -> int | None:
        """The exit status, as subprocess has it, with the zombie left in place. None: not known."""
        return exit_status(self.pid)

    def release(self) -> None:
        """Let go of the zombie."""
        self._template.reap(self.pid)

    def kill(self) -> None:
        """End a process that nothing else watches yet."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
