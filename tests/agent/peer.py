"""Peers of the agent under test: a job's private directory, a controller that speaks the wire, and its output."""

import contextlib
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from relight.agent.processes.adoption import open_pages
from relight.agent.processes.readings.page import Page
from relight.agent.processes.readings.probes import environment
from relight.core.protocol.commands import Kill, Spawn
from relight.core.protocol.events import ProcessExited, ProcessStarted
from relight.wire.connection.framing import decode, encode_frame, encode_payload, make_decoder
from relight.wire.connection.handshake import CONTROLLER, ListeningSide
from relight.wire.connection.streams import receive_payload
from relight.wire.messages import AgentUp, Hello, Samples, StopAgent, ToWorkers, Welcome
from relight.wire.settings import JobSettings

DEADLINE_SECONDS = 30.0
CONTROLLER_TIMEOUT_SECONDS = 2.0
NAME = "node-0"
M = TypeVar("M", bound=msgspec.Struct)


class Connection:
    """One agent's connection, welcomed."""

    def __init__(self, connection: socket.socket, token: bytes, *, life: str = "first", received: int = 0) -> None:
        """`life` and `received` as in `Welcome`: a controller that is new here, or one that has heard something."""
        self._socket = connection
        self._socket.settimeout(DEADLINE_SECONDS)
        self._decoder = make_decoder(AgentUp)
        self.seen: list[msgspec.Struct] = []
        handshake = ListeningSide(token)
        self.send(handshake.challenge())
        self.hello = self.expect(Hello)
        handshake.check(self.hello, ["agent"])
        assert self.hello.name == NAME
        mac = handshake.proof(self.hello, CONTROLLER, "job")
        self.send(Welcome(job="job", mac=mac, life=life, received=received))

    def send(self, message: msgspec.Struct) -> None:
        self.send_bytes(encode_frame(message))

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def tell(self, message: msgspec.Struct, *processes: str) -> None:
        self.send(ToWorkers(processes=processes, payload=encode_payload(message)))

    def spawn(self, process: str, rank: int | None = 0) -> int:
        """Order a process and return its pid."""
        self.send(Spawn(agent=NAME, process=process, rank=rank, slot=rank or 0, why="test"))
        return self.expect(ProcessStarted, lambda started: started.process == process).pid

    def kill(self, process: str) -> None:
        self.send(Kill(process=process, why="test"))

    def exit_of(self, process: str) -> ProcessExited:
        for exited in self.of_kind(ProcessExited):
            if exited.process == process:
                return exited
        return self.expect(ProcessExited, lambda exited: exited.process == process)

    def expect(self, kind: type[M], matches: Callable[[M], bool] = lambda _: True) -> M:
        """The next message of this kind that matches; all that come before it are kept in `seen`."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            payload = receive_payload(self._socket)
            assert payload is not None, f"the agent hung up; before that: {self._told()}"
            message = decode(self._decoder, payload)
            self.seen.append(message)
            if isinstance(message, kind) and matches(message):
                return message
        raise AssertionError(f"no such {kind.__name__}; seen: {self._told()}")

    def _told(self) -> list[msgspec.Struct]:
        return [message for message in self.seen if not isinstance(message, Samples)]

    def of_kind(self, kind: type[M]) -> list[M]:
        return [message for message in self.seen if isinstance(message, kind)]

    def close(self) -> None:
        self._socket.close()


def agent_command(job: "Job", program: str = sys.executable) -> list[str]:
    command = [sys.executable, "-m", "tests.agent.start_agent", program, "--name", NAME]
    return [*command, "--controller", f"127.0.0.1:{job.port}", "--private-dir", str(job.private_dir)]


class RunningAgent:
    """An agent process and what it has printed."""

    def __init__(self, job: "Job", *, adopt: bool, program: str = sys.executable) -> None:
        command = [*agent_command(job, program), "--parent", str(os.getpid())]
        self.process = subprocess.Popen(
            [*command, *(["--adopt"] if adopt else [])], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.printed = b""
        self._ended = False

    def expect_printed(self, text: str) -> None:
        """Read on until `text` has been printed."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while text.encode() not in self.printed:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(descriptor, 65536) if ready else b""
            assert data, f"{text!r} was not printed, but:\n{self.printed.decode(errors='replace')}"
            self.printed += data

    def end(self) -> int:
        """Wait for its own end; the exit status. A second time the same."""
        if not self._ended:
            output, _ = self.process.communicate(timeout=DEADLINE_SECONDS)
            self.printed += output
            self._ended = True
        return self.process.returncode

    def sigkill(self) -> None:
        self.process.kill()
        self.end()


class Job:
    """A private directory, a port that the controller listens on, and every process that came of them."""

    def __init__(self, world_size: int = 2) -> None:
        self.private_dir = Path(tempfile.mkdtemp(prefix="relight-agents-", dir="/tmp")).resolve()
        self.run_dir = self.private_dir / "run"
        self.token = secrets.token_bytes(32)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(DEADLINE_SECONDS)
        self.port = self._listener.getsockname()[1]
        self._agents: list[RunningAgent] = []
        settings = JobSettings(
            job="job",
            script="train.py",
            world_size=world_size,
            run_dir=str(self.run_dir),
            controller_timeout_seconds=CONTROLLER_TIMEOUT_SECONDS,
        )
        (self.private_dir / "settings.json").write_bytes(msgspec.json.encode(settings))
        (self.private_dir / "token").write_bytes(self.token)

    def start_unconnected_agent(self) -> RunningAgent:
        agent = RunningAgent(self, adopt=False)
        self._agents.append(agent)
        return agent

    def start_launched_agent(self) -> Connection:
        """An agent whose parent is a process of its own, for `kill_launcher`."""
        command = [*agent_command(self), "--parent"]
        code = f"import os, subprocess; subprocess.run([*{command!r}, str(os.getpid())])"
        self._launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
        connection, _ = self._listener.accept()
        (agent,) = psutil.Process(self._launcher.pid).children()
        self._launched = os.pidfd_open(agent.pid)
        return Connection(connection, self.token)

    def kill_launcher(self) -> None:
        """SIGKILL it, and wait for the end of the agent that it started."""
        self._launcher.kill()
        self._launcher.wait(DEADLINE_SECONDS)
        assert select.select([self._launched], [], [], DEADLINE_SECONDS)[0], "the agent lives on"
        os.close(self._launched)

    def close_listener(self) -> None:
        """From now on no process listens on the controller's port."""
        self._listener.close()

    def page_of(self, pid: int) -> Page:
        """A worker's own view of its shared mapping."""
        wait_until(lambda: "RELIGHT_PAGE_FD" in environment(pid))  # the kernel shows it a moment after it has begun
        with contextlib.closing(open_pages(pid)) as pages:
            return pages.at(int(environment(pid)["RELIGHT_PAGE_OFFSET"]))

    def start_agent(self, *, adopt: bool = False, program: str = sys.executable) -> tuple[RunningAgent, Connection]:
        agent = RunningAgent(self, adopt=adopt, program=program)
        self._agents.append(agent)
        connection, _ = self._listener.accept()
        return agent, Connection(connection, self.token)

    def accept_raw(self) -> socket.socket:
        """The agent's next connection, before anybody has said anything."""
        connection, _ = self._listener.accept()
        connection.settimeout(DEADLINE_SECONDS)
        return connection

    def accept(self, *, life: str = "first", received: int = 0) -> Connection:
        """The agent comes (back) to the controller, or to its successor."""
        connection, _ = self._listener.accept()
        return Connection(connection, self.token, life=life, received=received)

    def log(self, name: str) -> str:
        return (self.run_dir / "logs" / f"{name}.log").read_text()

    def processes(self) -> list[int]:
        """All live processes of this job, also those that another process has adopted."""
        mark = f"RELIGHT_PRIVATE_DIR={self.private_dir}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def close(self) -> None:
        """Nothing may be left running. What is left is ended, then complained about."""
        for agent in self._agents:
            if agent.process.poll() is None:
                agent.process.terminate()
            status = agent.end()
            print(f"an agent ended with {status}:\n{agent.printed.decode(errors='replace')}")  # seen if the test failed
        left = self.processes()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self._listener.close()
        shutil.rmtree(self.private_dir, ignore_errors=True)
        assert left == []


def stop_agent(agent: RunningAgent, connection: Connection) -> None:
    """End the agent as the controller does."""
    connection.send(StopAgent(why="test over"))
    assert agent.end() == 0, agent.printed


def wait_until(condition: Callable[[], bool]) -> None:
    """Look until it holds, for what has no event to wait for (shared memory)."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it does not come to hold"
        time.sleep(0.001)
