"""State and weights between hosts in TLS: the same bytes, and who may not have them is told why, at once."""

import contextlib
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from relight.errors import ProtocolError, RestoreError
from relight.transfer.engine.receiver import Receiver
from relight.transfer.io.tcp import HANDSHAKE_SECONDS, TcpChannel
from relight.transfer.publish.publisher import Publisher
from relight.transfer.relay.publish_bridge import PublishBridge
from relight.transfer.relay.relay import Relay
from relight.transfer.restore.client import RestoreClient
from relight.transfer.restore.offer import BucketReady
from relight.transfer.restore.server import RestoreServer
from relight.transfer.tensors.weights import TensorSource
from relight.wire.connection.tls import Tls
from tests.certificates import Authority
from tests.transfer.hosts import DEADLINE_SECONDS, TOKEN, blank, elsewhere, make_state, nothing, offer

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def tls(authority: Authority) -> Tls:
    return Tls(authority.issue("host", HOST))


def serve(tmp_path: Path, tls: Tls | None) -> RestoreServer:
    path = tmp_path / f"source-{'plain' if tls is None else 'tls'}.sock"
    server = RestoreServer(path, nothing, host_address=HOST, token=TOKEN, tls=tls)
    server.offer(offer(make_state(1)))
    return server


def refusal(server: RestoreServer, tls: Tls | None, token: bytes = TOKEN) -> str:
    begun = time.monotonic()
    with pytest.raises(RestoreError) as raised:
        RestoreClient(nothing, DEADLINE_SECONDS, token, tls=tls).fetch(2, 7, [elsewhere(server)], lambda _: None)
    assert time.monotonic() - begun < HANDSHAKE_SECONDS
    return str(raised.value)


def test_state_arrives_in_the_targets_own_tensors(tmp_path: Path, tls: Tls) -> None:
    server, state = serve(tmp_path, tls), make_state(1)
    own = blank(state)
    RestoreClient(nothing, DEADLINE_SECONDS, TOKEN, tls=tls).fetch(2, 7, [elsewhere(server)], own.get)
    assert all(torch.equal(own[name], state[name]) for name in state)


def test_the_token_is_still_asked_for(tmp_path: Path, tls: Tls) -> None:
    assert "does not know this job's token" in refusal(serve(tmp_path, tls), tls, b"another")


def test_a_target_of_another_authority(tmp_path: Path, tls: Tls, authority: Authority) -> None:
    stranger = Tls(Authority(tmp_path / "other").issue("host", HOST, authority=authority))
    assert "the other side does not accept the certificate of this one" in refusal(serve(tmp_path, tls), stranger)


def test_a_source_of_another_authority(tmp_path: Path, tls: Tls) -> None:
    server = serve(tmp_path, Tls(Authority(tmp_path / "other").issue("host", HOST)))
    assert "its certificate is not signed by the authority in --tls-ca" in refusal(server, tls)


def test_a_source_at_another_address(tmp_path: Path, tls: Tls, authority: Authority) -> None:
    server = serve(tmp_path, Tls(authority.issue("elsewhere", "10.0.0.7")))
    assert "certificate is not valid for '127.0.0.1'" in refusal(server, tls)


def test_only_one_of_the_two_speaks_tls(tmp_path: Path, tls: Tls) -> None:
    assert "it does not use TLS, and this side does" in refusal(serve(tmp_path, None), tls)
    assert "it uses TLS, and this side has no certificates" in refusal(serve(tmp_path, tls), None)


# --- both ways at once --------------------------------------------------------------------------------------------
@contextlib.contextmanager
def channels(tls: Tls) -> Iterator[tuple[TcpChannel, TcpChannel]]:
    """The two ends of a connection."""
    with socket.create_server((HOST, 0)) as listener:
        near = socket.create_connection(listener.getsockname(), timeout=DEADLINE_SECONDS)
        far, _ = listener.accept()
    here = TcpChannel(near, TOKEN, BucketReady, tls=tls, server_name=HOST)
    there = TcpChannel(far, TOKEN, BucketReady, tls=tls)
    admitting = threading.Thread(target=there.admit, args=("far", "near"))
    admitting.start()
    here.introduce("near", "far")
    admitting.join(DEADLINE_SECONDS)
    try:
        yield here, there
    finally:
        for channel in (here, there):
            channel.break_off()
            channel.close()


def test_both_ways_at_once_nothing_is_lost_or_mixed_up(tls: Tls) -> None:
    """Four threads on one connection: each end sends megabytes in pieces of every size while it receives others."""
    chance = random.Random(1)
    data = [chance.randbytes(8 * 2**20 + size) for size in (1, 777)]
    received = [bytearray(len(part)) for part in data]
    errors: list[BaseException] = []

    def send(channel: TcpChannel, part: bytes, seed: int) -> None:
        sizes, view = random.Random(seed), memoryview(part)
        while view:
            count = min(len(view), sizes.choice((1, 100, 5000, 2**14, 2**18)))
            cut = sizes.randrange(count + 1)
            channel.send_bytes([piece for piece in (view[:cut], view[cut:count]) if piece])
            view = view[count:]

    def receive(channel: TcpChannel, into: bytearray, seed: int) -> None:
        sizes, view = random.Random(seed), memoryview(into)
        while view:
            count = min(len(view), sizes.choice((1, 70, 3000, 2**15, 2**18)))
            if not channel.receive_bytes([view[:count]]):
                raise ProtocolError("the stream ended")
            view = view[count:]

    def guarded(work: object, *arguments: object) -> None:
        try:
            work(*arguments)  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)

    with channels(tls) as (here, there):
        threads = [
            threading.Thread(target=guarded, args=arguments)
            for arguments in (
                (send, here, data[0], 1),
                (send, there, data[1], 2),
                (receive, there, received[0], 3),
                (receive, here, received[1], 4),
            )
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        assert not any(thread.is_alive() for thread in threads)
    assert not errors, errors
    assert [bytes(part) for part in received] == data


def test_a_wait_ends_when_it_is_broken_off_or_late(tls: Tls) -> None:
    with channels(tls) as (here, there):
        assert not here.is_readable(0.0)  # no ticket of the session lies there, looking like a message
        here.set_timeout(0.05)
        with pytest.raises(TimeoutError):
            here.receive()
        here.set_timeout(None)
        heard: list[object] = []
        waiting = threading.Thread(target=lambda: heard.append(here.receive()))
        waiting.start()
        there.send(BucketReady(1, 2, 3))
        waiting.join(DEADLINE_SECONDS)
        assert heard == [BucketReady(1, 2, 3)]
        waiting = threading.Thread(target=lambda: heard.append(here.receive()))
        waiting.start()
        here.break_off()
        waiting.join(DEADLINE_SECONDS)
        assert not waiting.is_alive()
        assert heard[1:] == [None]


def test_what_has_arrived_together_is_all_seen(tls: Tls) -> None:
    """The library may have taken from the socket what `select` is asked about."""
    with channels(tls) as (here, there):
        for number in range(20):
            there.send(BucketReady(number, 0, 0))
        for number in range(20):
            assert here.is_readable(DEADLINE_SECONDS)
            assert here.receive() == BucketReady(number, 0, 0)


# --- weights --------------------------------------------------------------------------------------------------------
def test_weights_go_to_the_engines_of_another_host(tmp_path: Path, tls: Tls) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    near.mkdir()
    far.mkdir()
    tensors = make_state(3)
    notices: list[str] = []
    with (
        Publisher(near) as publisher,
        PublishBridge(near, HOST, token=TOKEN, tls=tls, on_notice=notices.append) as bridge,
    ):
        plain = Relay(bridge.endpoint, tmp_path / "plain", token=TOKEN, on_notice=notices.append)
        relay = Relay(bridge.endpoint, far, token=TOKEN, tls=tls, on_notice=notices.append)
        threads = [threading.Thread(target=one.run) for one in (plain, relay)]
        for thread in threads:
            thread.start()
        try:
            publisher.begin(TensorSource(tensors), version=1, hold=True)
            model = blank(tensors)
            deadline = time.monotonic() + DEADLINE_SECONDS
            while not (far / "weights.sock").exists():
                assert time.monotonic() < deadline, notices
                time.sleep(0.01)
            with Receiver(far, model=model) as engine:
                assert engine.wait_for(1, DEADLINE_SECONDS), notices
                assert all(torch.equal(model[name], tensors[name]) for name in tensors)
        finally:
            for one in (plain, relay):
                one.stop()
            for thread in threads:
                thread.join(DEADLINE_SECONDS)
    assert any(re.search("this side has no certificates", notice) for notice in notices), notices
