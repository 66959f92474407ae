"""The worker's connection to its agent, against real sockets."""

import contextlib
import queue
import select
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relight.core.protocol.commands import Stop
from relight.core.protocol.events import WorkerNotice
from relight.training.connection.link import AgentLink
from relight.wire.connection.framing import decode, encode_frame, make_decoder
from relight.wire.connection.streams import receive_payload
from relight.wire.messages import WorkerHello

DEADLINE_SECONDS = 20.0
LONG = WorkerNotice(process="w0", rank=0, text="x" * 2**21)  # more than a socket holds that is not read


class Listener:
    """Ignores what arrives."""

    def receive(self, message: object) -> None:
        pass

    def reconnected(self) -> None:
        pass


def test_an_agent_that_dies_after_it_accepted_is_given_up_for_the_next(tmp_path: Path) -> None:
    """The report is said again to the agent after that one, so the worker is never left without a connection."""
    path = tmp_path / "agent.sock"
    decoder = make_decoder(WorkerHello | WorkerNotice)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(DEADLINE_SECONDS)
        listener.bind(str(path))
        listener.listen()

        def accept() -> socket.socket:
            connection, _ = listener.accept()
            connection.settimeout(DEADLINE_SECONDS)
            payload = receive_payload(connection)
            assert payload is not None
            assert decode(decoder, payload).process == "w0"
            return connection

        def told(connection: socket.socket) -> WorkerNotice:
            payload = receive_payload(connection)
            assert payload is not None
            notice = decode(decoder, payload)
            assert isinstance(notice, WorkerNotice)
            return notice

        link = AgentLink(str(path), "w0", DEADLINE_SECONDS, Listener())
        link.start()
        with ThreadPoolExecutor() as pool, contextlib.closing(link):
            with accept() as first:
                sending = pool.submit(link.send, LONG, report=True)
                assert told(first) == LONG
                sending.result(DEADLINE_SECONDS)
            with accept() as second:
                assert second.recv(1) != b""  # said again, and broken off in the middle
            with accept() as third:
                assert told(third) == LONG
                link.close()


def test_a_scripts_default_timeout_of_sockets_is_none_of_a_link(tmp_path: Path) -> None:
    """It is set for downloads; a link may be silent for as long as all goes well."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent.sock"))
        listener.listen()
        default = socket.getdefaulttimeout()
        socket.setdefaulttimeout(0.01)
        try:
            link = AgentLink(str(tmp_path / "agent.sock"), "w0", DEADLINE_SECONDS, Listener())
        finally:
            socket.setdefaulttimeout(default)
        link.start()
        connection, _ = listener.accept()
        with connection, contextlib.closing(link):
            again, _, _ = select.select([listener], [], [], 0.3)
            assert not again, "it has given the agent up"


def test_what_goes_wrong_with_one_order_does_not_keep_it_from_the_next(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    heard: queue.SimpleQueue[object] = queue.SimpleQueue()

    class Broken(Listener):
        def receive(self, message: object) -> None:
            heard.put(message)
            raise RuntimeError("cannot register a hook")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent.sock"))
        listener.listen()
        link = AgentLink(str(tmp_path / "agent.sock"), "w0", DEADLINE_SECONDS, Broken())
        link.start()
        connection, _ = listener.accept()
        orders = [Stop(why="", generation=number) for number in (2, 3)]
        with connection, contextlib.closing(link):
            for order in orders:
                connection.sendall(encode_frame(order))
            assert [heard.get(timeout=DEADLINE_SECONDS) for _ in orders] == orders
            link.close()
    assert "cannot register a hook" in capfd.readouterr().err
