"""An agent whose controller is gone: its processes train on, and what happens meanwhile is kept for the successor."""

import os
import signal
import socket
import time

import pytest

from relight.agent.connection.controller_connection import HANDSHAKE_SECONDS
from relight.core.protocol.events import ProcessExited, ProcessStarted
from relight.wire.connection.address import announce
from relight.wire.connection.framing import encode_frame
from relight.wire.connection.streams import receive_payload
from relight.wire.messages import PROTOCOL_VERSION, Challenge, FromWorker, Received, Welcome
from tests.agent.peer import DEADLINE_SECONDS, Connection, Job, stop_agent, wait_until
from tests.agent.test_agent import ask


def confirm(connection: Connection, count: int) -> None:
    connection.send(Received(count=count))


def counted(connection: Connection) -> int:
    return sum(isinstance(message, ProcessStarted | ProcessExited | FromWorker) for message in connection.seen)


def test_a_broken_connection_loses_nothing_and_repeats_nothing(job: Job) -> None:
    agent, first = job.start_agent()
    pid = first.spawn("talk-0", 0)
    ask(first, "talk-0", 1)
    heard = counted(first)
    first.close()
    second = job.accept(received=heard)
    assert second.hello.controller == "first"
    assert second.hello.received == 2  # Spawn, and what the worker was asked
    assert second.hello.processes == ("talk-0",)
    ask(second, "talk-0", 2)
    assert not second.of_kind(ProcessStarted)
    assert os.getpgid(pid) == pid  # as alive as before
    stop_agent(agent, second)


def test_what_nobody_confirmed_is_told_to_the_successor(job: Job) -> None:
    agent, first = job.start_agent()
    first.spawn("talk-0", 0)
    first.spawn("last-1", 1)
    first.exit_of("last-1")
    first.close()
    second = job.accept(life="second")
    assert second.hello.processes == ("last-1", "talk-0")
    assert second.exit_of("last-1").exit_status == -signal.SIGKILL
    assert {started.process for started in second.of_kind(ProcessStarted)} == {"talk-0", "last-1"}
    stop_agent(agent, second)


def test_what_was_confirmed_is_history(job: Job) -> None:
    agent, first = job.start_agent()
    first.spawn("last-1", 1)
    first.exit_of("last-1")
    confirm(first, counted(first))
    first.close()
    second = job.accept(life="second")
    assert second.hello.processes == ()
    second.spawn("talk-0", 0)
    assert not second.of_kind(ProcessExited)
    stop_agent(agent, second)


def test_a_process_that_dies_without_a_controller_is_reported_to_the_next(job: Job) -> None:
    agent, first = job.start_agent()
    pid = first.spawn("talk-0", 0)
    confirm(first, counted(first))
    first.close()
    agent.expect_printed("lost the controller")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in job.processes())
    second = job.accept(life="second")
    assert second.exit_of("talk-0").exit_status == -signal.SIGKILL
    stop_agent(agent, second)


def test_an_order_that_is_given_again_is_obeyed_once(job: Job) -> None:
    agent, first = job.start_agent()
    pid = first.spawn("talk-0", 0)
    first.close()
    second = job.accept(life="second")
    assert second.spawn("talk-0", 0) == pid  # reported again since no controller had confirmed it
    ask(second, "talk-0", 1)
    assert len(second.of_kind(ProcessStarted)) == 1
    assert len(job.processes()) == 1
    stop_agent(agent, second)


def test_an_impostor_is_left(job: Job) -> None:
    """A stranger who does not know the token listens on the dead controller's port."""
    agent, first = job.start_agent()
    first.spawn("talk-0", 0)
    first.close()
    with job.accept_raw() as impostor:
        impostor.sendall(encode_frame(Challenge(protocol_version=PROTOCOL_VERSION, nonce=bytes(32))))
        assert receive_payload(impostor) is not None  # its Hello, worth nothing elsewhere
        impostor.sendall(encode_frame(Welcome(job="job", mac=bytes(32), life="impostor")))
        assert receive_payload(impostor) is None
    second = job.accept(life="second")
    ask(second, "talk-0", 1)
    stop_agent(agent, second)


@pytest.mark.parametrize("times", [20])
def test_again_and_again(job: Job, times: int) -> None:
    agent, connection = job.start_agent()
    connection.spawn("talk-0", 0)
    for number in range(times):
        ask(connection, "talk-0", number + 1)
        connection.close()
        connection = job.accept(life=f"life {number}")
    ask(connection, "talk-0", 99)
    assert len(job.processes()) == 1
    stop_agent(agent, connection)


def test_a_host_that_does_not_answer_is_left_for_the_successor(job: Job) -> None:
    """As when the controller's host is gone: an attempt to reach it would fail only after ten seconds."""
    agent, first = job.start_agent()
    pid = first.spawn("talk-0", 0)
    first.close()
    with job.accept_raw(), socket.create_server(("127.0.0.1", 0)) as successor:  # the first accepts, and is silent
        silent_since = time.monotonic()
        job.run_dir.mkdir(exist_ok=True)
        announce(job.run_dir, *successor.getsockname())
        successor.settimeout(DEADLINE_SECONDS)
        second = Connection(successor.accept()[0], job.token, life="second")
        assert time.monotonic() - silent_since < HANDSHAKE_SECONDS / 2
    ask(second, "talk-0", 1)
    assert os.getpgid(pid) == pid
    stop_agent(agent, second)
