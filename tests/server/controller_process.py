"""A real controller process for tests, and peers that speak to it over real sockets, with a deadline on every wait."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from relight.server.records.journal import JournalLine, read_journal
from relight.wire.connection.framing import encode_frame, encode_payload
from relight.wire.connection.handshake import ConnectingSide
from relight.wire.connection.outbox import COUNTED
from relight.wire.connection.streams import receive_payload
from relight.wire.connection.tls import VARIABLES, TlsFiles
from relight.wire.messages import (
    PROTOCOL_VERSION,
    AgentDown,
    Challenge,
    FromWorker,
    Hello,
    ObserverDown,
    Received,
    ToWorkers,
    Welcome,
    WorkerDown,
)
from relight.wire.settings import JobSettings

DEADLINE_SECONDS = 20.0
_decoder = msgspec.msgpack.Decoder(AgentDown | ObserverDown)
_worker_decoder = msgspec.msgpack.Decoder(WorkerDown)
Message = TypeVar("Message", bound=msgspec.Struct)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Look again and again, up to a hard deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS:g} s: {what}"
        time.sleep(0.005)


class ControllerProcess:
    """`python -m relight.server` with a private directory of its own."""

    def __init__(self, tmp_path: Path, *, tls: TlsFiles | None = None, **settings: Any) -> None:
        self._environment = {} if tls is None else dict(zip(VARIABLES, msgspec.structs.astuple(tls), strict=True))
        self.run_dir = Path(settings.pop("run_dir", tmp_path / "run"))
        self.run_dir.mkdir(exist_ok=True)
        self.private_dir = Path(tempfile.mkdtemp(prefix="private-", dir=tmp_path))
        self.token = secrets.token_bytes(32)
        (self.private_dir / "token").write_bytes(self.token)
        self.settings = JobSettings(job="test", script="train.py", run_dir=str(self.run_dir), **settings)
        (self.private_dir / "settings.json").write_bytes(msgspec.json.encode(self.settings))
        self._start()

    def _start(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "relight.server", "--private-dir", str(self.private_dir), *arguments],
            env={**os.environ, **self._environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        announced = self.private_dir / "controller.json"

        def address() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(announced.read_bytes()) if announced.exists() else {}
            return found if found.get("pid") == self.process.pid else {}

        wait_until(lambda: bool(address()) or self.process.poll() is not None, "the controller listens")
        assert address(), self.process.communicate()[1]
        self.address: tuple[str, int] = (address()["host"], address()["port"])

    def restart(self) -> None:
        """Kill it, and start its successor as `relight run` does."""
        self.close()
        self._start("--resume")

    def connect(self) -> "Peer":
        """A connection that has not said anything yet."""
        return Peer(self, socket.create_connection(self.address, timeout=DEADLINE_SECONDS))

    def observer(self, name: str = "someone") -> "Peer":
        peer = self.connect()
        peer.say_hello("observer", name)
        peer.expect(Welcome)
        return peer

    def agent(self, name: str = "node-0", processes: tuple[str, ...] = (), life: str = "") -> "Peer":
        peer = self.connect()
        peer.say_hello("agent", name, slots=self.settings.world_size, processes=processes, life=life)
        peer.expect(Welcome)
        return peer

    def journal(self) -> tuple[JournalLine, ...]:
        return read_journal(self.run_dir / "journal.jsonl")[1]

    def wait(self) -> int:
        return self.process.wait(DEADLINE_SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        if self.process.stderr is not None and not self.process.stderr.closed:
            self.process.communicate()


class Peer:
    """One blocking connection to the controller."""

    def __init__(self, controller: ControllerProcess, connection: socket.socket) -> None:
        self.controller = controller
        self.socket = connection
        self.received = 0  # counted messages
        self._stashed: list[Any] = []

    def say_hello(
        self,
        role: str,
        name: str,
        *,
        token: bytes | None = None,
        version: int = PROTOCOL_VERSION,
        slots: int = 0,
        processes: tuple[str, ...] = (),
        life: str = "",
        **more: Any,
    ) -> Hello:
        challenge = self.expect(Challenge)
        hello = ConnectingSide(token or self.controller.token).answer(
            challenge,
            Hello(protocol_version=version, role=role, name=name, slots=slots, processes=processes, life=life, **more),
        )
        self.send(hello)
        return hello

    def send(self, message: msgspec.Struct) -> None:
        self.socket.sendall(encode_frame(message))

    def receive(self) -> Any:
        """The next message, or None at the end. Those that must arrive are confirmed."""
        payload = receive_payload(self.socket)
        message = None if payload is None else _decoder.decode(payload)
        if isinstance(message, COUNTED):
            self.received += 1
            self.send(Received(count=self.received))
        return message

    def expect(self, kind: type[Message], where: Callable[[Message], bool] = lambda _: True) -> Message:
        """The next message of this kind; others before it are kept for later calls."""
        for index, message in enumerate(self._stashed):
            if isinstance(message, kind) and where(message):
                del self._stashed[index]
                return message
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            message = self.receive()
            assert message is not None, f"the controller hung up before it sent {kind.__name__}"
            if isinstance(message, kind) and where(message):
                return message
            self._stashed.append(message)
        raise AssertionError(f"no {kind.__name__} within {DEADLINE_SECONDS:g} s")

    def expect_end(self) -> list[Any]:
        """Everything up to the end of the connection."""
        messages, self._stashed = self._stashed, []
        with contextlib.suppress(ConnectionError):
            while (message := self.receive()) is not None:
                messages.append(message)
        return messages

    def relay(self, process: str, message: msgspec.Struct) -> None:
        """Say something as one of this agent's workers."""
        self.send(FromWorker(process=process, payload=encode_payload(message)))

    def expect_for(self, process: str, kind: type[Message]) -> Message:
        """The next message of this kind that goes to one of this agent's workers."""

        def is_it(relayed: ToWorkers) -> bool:
            return process in relayed.processes and isinstance(_worker_decoder.decode(relayed.payload), kind)

        message: Message = _worker_decoder.decode(self.expect(ToWorkers, is_it).payload)
        return message

    def close(self) -> None:
        self.socket.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
