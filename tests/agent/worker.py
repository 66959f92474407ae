"""A small worker. What it does is the first part of its process name: `talk-1` talks, `exit3` exits with 3."""

import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import time

from relight.agent.processes.readings.page import Page
from relight.core.protocol.events import WorkerNotice
from relight.core.protocol.position import (
    MAPPING_BYTES,
    TRACE_INDEX_OFFSET,
    TRACE_OFFSET,
    TRACE_RECORD,
    Phase,
    Position,
)
from relight.wire.connection.framing import decode, encode_frame, make_decoder
from relight.wire.connection.streams import receive_payload
from relight.wire.messages import StoreAdd, StoreReply, WorkerDown, WorkerHello
from tests.agent.encode_page import encode_page

RECONNECT_SECONDS = 20.0


def stamp(step: int) -> None:
    """One stamp and one trace record, as a worker in BACKWARD of `step` leaves them."""
    mapping = mmap.mmap(
        int(os.environ["RELIGHT_PAGE_FD"]), MAPPING_BYTES, offset=int(os.environ["RELIGHT_PAGE_OFFSET"])
    )
    now_ns = time.monotonic_ns()
    position = Position(
        generation=1,
        rank=int(os.environ["RANK"]),
        step=step,
        phase=Phase.BACKWARD,
        version=step,
        progress=step + 1,
        stamp_ns=now_ns,
    )
    page = encode_page(position)
    mapping[: len(page)] = page
    TRACE_RECORD.pack_into(mapping, TRACE_OFFSET, now_ns, 1, step, int(Phase.BACKWARD), step)
    struct.pack_into("<q", mapping, TRACE_INDEX_OFFSET, 1)
    mapping.close()


def connect(pid: int | None = None) -> socket.socket:
    """Connect to the agent and say hello; try again for as long as a worker would."""
    deadline = time.monotonic() + RECONNECT_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(os.environ["RELIGHT_AGENT_SOCKET"])
            hello = WorkerHello(process=os.environ["RELIGHT_PROCESS"], pid=os.getpid() if pid is None else pid)
            connection.sendall(encode_frame(hello))
            return connection
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                sys.exit("the agent did not come back")
            time.sleep(0.02)


def talk() -> None:
    """Answer every StoreReply by a StoreAdd of the same number, and print both; reconnect forever."""
    decoder = make_decoder(WorkerDown)
    while True:
        connection = connect()
        print("connected")
        while (payload := receive_payload(connection)) is not None:
            message = decode(decoder, payload)
            if isinstance(message, StoreReply):
                print(f"request {message.request}")
                connection.sendall(encode_frame(StoreAdd(request=message.request, generation=1, key="echo", amount=1)))
            else:
                print(type(message).__name__)
        connection.close()
        time.sleep(0.02)


def last_words() -> None:
    """Say something, and die before anyone can have read it."""
    connection = connect()
    for number in range(100):
        connection.sendall(encode_frame(WorkerNotice(process=os.environ["RELIGHT_PROCESS"], rank=0, text=str(number))))
    stamp(7)
    os.kill(os.getpid(), signal.SIGKILL)


def last_words_on_signal() -> None:
    """Send the last words, but not before SIGUSR1."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    stamp(6)
    signal.sigwait({signal.SIGUSR1})
    last_words()


def garbage() -> None:
    """Try what a broken or hostile program on this machine might; print how each attempt ended."""
    attempts = {
        "noise": os.urandom(64),
        "huge": struct.pack(">I", 2**31) + b"x" * 100,
        "untyped": struct.pack(">I", 5) + b"\x00abcd",
        "before hello": encode_frame(StoreAdd(request=1, generation=1, key="k", amount=1)),
        "wrong pid": encode_frame(WorkerHello(process=os.environ["RELIGHT_PROCESS"], pid=1)),
        "other name": encode_frame(WorkerHello(process="talk-0", pid=os.getpid())),
    }
    for name, data in attempts.items():
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.environ["RELIGHT_AGENT_SOCKET"])
        connection.sendall(data)
        print(f"{name}: {'closed' if receive_payload(connection) is None else 'answered'}")
    connection = connect()
    connection.sendall(encode_frame(WorkerNotice(process="talk-0", rank=0, text="forged")))
    print(f"speaking for another: {'closed' if receive_payload(connection) is None else 'answered'}")
    print("done")


def leave_child() -> None:
    """Die, and leave a child that holds everything open."""
    child = subprocess.Popen(["sleep", "1000"], close_fds=False)
    print(f"child {child.pid}")
    os.kill(os.getpid(), signal.SIGKILL)


def leave_private_state() -> None:
    page = Page(int(os.environ["RELIGHT_PAGE_FD"]), int(os.environ["RELIGHT_PAGE_OFFSET"]))
    page.write_private(3, b"private state of version 3")
    page.close()


def print_on_signal() -> None:
    """Print at every SIGUSR1, then stamp, whether or not there is an agent."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    for step in range(1000):
        stamp(step)
        signal.sigwait({signal.SIGUSR1})
        print(f"signal {step} " + "x" * 10_000)


def write_oddly() -> None:
    os.write(2, b"to stderr\n")
    os.write(1, b"bad \xff\xfe bytes\n\x1efor the file only\nno end")


def main() -> None:
    match os.environ["RELIGHT_PROCESS"].partition("-")[0]:
        case "talk":
            stamp(3)
            talk()
        case "exit3":
            sys.exit(3)
        case "exit0":
            print("fine")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "last":
            last_words()
        case "late":
            last_words_on_signal()
        case "garbage":
            garbage()
        case "child":
            leave_child()
        case "private":
            leave_private_state()
        case "signal":
            print_on_signal()
        case "odd":
            write_oddly()
        case other:
            sys.exit(f"no such behaviour: {other}")


if __name__ == "__main__":
    main()
