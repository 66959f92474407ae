"""A peer that is refused learns the reason; the other peers print a line about it at most."""

import socket
import struct
import time
from collections.abc import Callable

import msgspec
import pytest

from relight.core.protocol.commands import Spawn
from relight.server.network.admission import HANDSHAKE_SECONDS, MAX_HELLO_BYTES, MAX_STRANGERS
from relight.wire.messages import (
    PROTOCOL_VERSION,
    Challenge,
    Hello,
    NoticeUpdate,
    Refused,
    Samples,
    StatusUpdate,
    Welcome,
)
from relight.wire.versions import describe_difference, installed_versions
from tests.server.controller_process import ControllerProcess, Peer

Start = Callable[..., ControllerProcess]


@pytest.fixture
def controller(start: Start) -> ControllerProcess:
    return start(world_size=2)


def check_refused(controller: ControllerProcess, peer: Peer, bystander: Peer, reason: str) -> None:
    """The peer hears the reason and is cut off; the bystander hears of it, and goes on undisturbed."""
    *_, refused = peer.expect_end()
    assert isinstance(refused, Refused)
    assert reason in refused.reason
    bystander.expect(NoticeUpdate, lambda notice: reason in notice.text)
    bystander.expect(StatusUpdate)
    assert controller.process.poll() is None


def test_a_peer_that_knows_the_token_is_welcome(controller: ControllerProcess) -> None:
    peer = controller.connect()
    peer.say_hello("observer", "someone")
    assert peer.expect(Welcome).job == "test"


def test_wrong_token(controller: ControllerProcess) -> None:
    bystander, peer = controller.observer(), controller.connect()
    peer.say_hello("agent", "node-0", token=bytes(32))
    check_refused(controller, peer, bystander, "does not know this job's token")


def test_a_proof_from_another_connection_is_worth_nothing(controller: ControllerProcess) -> None:
    bystander, first, second = controller.observer(), controller.connect(), controller.connect()
    hello = first.say_hello("observer", "first")
    first.expect(Welcome)
    second.expect(Challenge)
    second.send(hello)
    check_refused(controller, second, bystander, "does not know this job's token")


def test_a_proof_for_another_role_is_worth_nothing(controller: ControllerProcess) -> None:
    bystander, peer = controller.observer(), controller.connect()
    hello = peer.say_hello("observer", "someone", token=b"wrong")
    assert isinstance(hello, Hello)
    check_refused(controller, peer, bystander, "does not know this job's token")


def test_wrong_version_names_both(controller: ControllerProcess) -> None:
    bystander, peer = controller.observer(), controller.connect()
    peer.say_hello("agent", "node-0", version=99)
    check_refused(controller, peer, bystander, f"protocol version 99, this side version {PROTOCOL_VERSION}")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "is over the limit of"),
        (struct.pack(">I", MAX_HELLO_BYTES + 1), f"a frame of {MAX_HELLO_BYTES + 1} bytes is over the limit"),
        (struct.pack(">I", 2**32 - 1), "is over the limit"),
        (struct.pack(">I", 4) + b"\xc1\xff\xff\xff", "malformed message"),
        (struct.pack(">I", 5) + b"\x80\x04\x95cK", "malformed message"),  # how a pickle begins
        (struct.pack(">I", 0), "malformed message"),
    ],
)
def test_garbage(controller: ControllerProcess, data: bytes, reason: str) -> None:
    bystander, peer = controller.observer(), controller.connect()
    peer.socket.sendall(data)
    check_refused(controller, peer, bystander, reason)


def test_another_message_than_hello(controller: ControllerProcess) -> None:
    bystander, peer = controller.observer(), controller.connect()
    peer.send(Samples(samples=()))
    check_refused(controller, peer, bystander, "malformed message")


@pytest.mark.parametrize(
    ("role", "name"), [("master", "x"), ("agent", "../../etc"), ("agent", ""), ("agent", "a" * 65)]
)
def test_bad_role_or_name(controller: ControllerProcess, role: str, name: str) -> None:
    bystander, peer = controller.observer(), controller.connect()
    peer.say_hello(role, name)
    check_refused(controller, peer, bystander, "is no valid role and name")


def test_a_stranger_that_says_nothing_or_half_a_hello_is_cut_off(controller: ControllerProcess) -> None:
    begun, reason = time.monotonic(), "no valid Hello within 5 s"
    bystander, silent, other = controller.observer(), controller.connect(), controller.connect()
    other.socket.sendall(struct.pack(">I", 100) + b"half")
    check_refused(controller, silent, bystander, reason)
    check_refused(controller, other, bystander, reason)
    assert 4.0 < time.monotonic() - begun < 10.0


def test_strangers_that_hold_all_places_keep_nobody_out(controller: ControllerProcess) -> None:
    """A newcomer takes the place of the one that has waited longest."""
    bystander = controller.observer()
    strangers = [controller.connect() for _ in range(MAX_STRANGERS)]
    for stranger in strangers:
        stranger.expect(Challenge)
    begun = time.monotonic()
    peers = [controller.observer(f"peer-{number}") for number in range(3)]
    assert time.monotonic() - begun < HANDSHAKE_SECONDS, "no place was free until the deadline had passed"
    *_, refused = strangers[0].expect_end()
    assert isinstance(refused, Refused)
    assert refused.again
    assert f"more than {MAX_STRANGERS} connections wait" in refused.reason
    bystander.expect(NoticeUpdate, lambda notice: "connections wait to be authenticated" in notice.text)
    for peer in peers:
        peer.expect(StatusUpdate)


def test_those_who_come_from_elsewhere_keep_their_places(start: Start) -> None:
    """Many strangers of one address turn each other out, not the only one of another."""
    controller = start(world_size=2, controller_address="0.0.0.0")
    patient = Peer(controller, socket.create_connection(controller.address, 20.0, source_address=("127.0.0.2", 0)))
    patient.expect(Challenge)
    strangers = [controller.connect() for _ in range(2 * MAX_STRANGERS)]
    for stranger in strangers[-MAX_STRANGERS + 1 :]:
        stranger.expect(Challenge)
    patient.socket.sendall(b"\x00\x00\x00\x01\xc1")
    *_, refused = patient.expect_end()
    assert isinstance(refused, Refused)
    assert "malformed" in refused.reason  # it was heard, and not turned out


def test_a_flood_of_refusals_is_not_a_flood_of_lines(controller: ControllerProcess) -> None:
    bystander = controller.observer()
    for _ in range(100):
        peer = controller.connect()
        peer.socket.sendall(b"garbage!")
        peer.expect_end()
    lines = [line for line in controller.journal() if line.note]
    assert 1 <= len(lines) <= 40
    bystander.expect(StatusUpdate)


def test_garbage_after_the_handshake_closes_that_connection_only(controller: ControllerProcess) -> None:
    bystander, agent = controller.observer(), controller.agent()
    agent.expect(Spawn)
    observer = controller.observer("another")
    observer.socket.sendall(struct.pack(">I", 3) + b"abc")
    observer.expect_end()
    bystander.expect(NoticeUpdate, lambda notice: "malformed message" in notice.text)
    agent.send(Samples(samples=()))
    bystander.expect(StatusUpdate)
    assert controller.process.poll() is None


def test_an_oversized_frame_after_the_handshake(controller: ControllerProcess) -> None:
    bystander, observer = controller.observer(), controller.observer("another")
    observer.socket.sendall(struct.pack(">I", 2**30))
    observer.expect_end()
    bystander.expect(NoticeUpdate, lambda notice: "a frame of 1073741824 bytes is over the limit" in notice.text)


def test_the_token_is_never_sent(controller: ControllerProcess) -> None:
    peer = controller.connect()
    hello = peer.say_hello("observer", "someone")
    assert controller.token not in msgspec.msgpack.encode(hello)


def test_a_host_with_other_versions_is_refused_by_name(controller: ControllerProcess) -> None:
    """Its bits would be others. The output of the first host names it."""
    versions = installed_versions()
    peer = controller.connect()
    peer.say_hello("agent", "node-7", slots=1, versions={**versions, "torch": "1.0.0", "python": "3.9"})
    reason = peer.expect(Refused).reason
    assert f"it has torch 1.0.0, and the job's first host has torch {versions['torch']}" in reason
    assert any("refused node-7" in line.note and "torch 1.0.0" in line.note for line in controller.journal())
    controller.agent().expect(Spawn)


def test_versions_that_are_not_known_are_not_compared() -> None:
    assert describe_difference({"relight": "1"}, {"relight": "1", "torch": "2"}) == ""
    assert describe_difference({"relight": "1", "torch": "2"}, {}) == ""
    both = describe_difference({"relight": "1", "torch": "2"}, {"relight": "3", "torch": "4"})
    assert "it has relight 3 and torch 4, and the job's first host has relight 1 and torch 2" in both
