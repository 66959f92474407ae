"""The socket between publisher and engines: places, strangers, garbage. Whatever comes, no other is disturbed."""

import contextlib
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch

from relight.errors import PlaceTakenError, ProtocolError, TransferError, UsageError
from relight.transfer.engine.receiver import Receiver
from relight.transfer.io.channel import MAX_MESSAGE_BYTES, Channel, connect, listen, socket_path
from relight.transfer.io.messages import (
    PROTOCOL_VERSION,
    Begin,
    BucketLoaded,
    BucketWritten,
    Committed,
    Dismissed,
    EngineHello,
    FromPublisher,
    LoadBucket,
    Ready,
    Refuse,
    SourceHello,
    ToPublisher,
    Welcome,
)
from relight.transfer.publish import members
from relight.transfer.publish.publisher import Publisher
from relight.transfer.tensors.weights import TensorSource
from relight.wire.connection.framing import encode_frame

PATIENCE_SECONDS = 20.0


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_SECONDS)
    theirs.settimeout(PATIENCE_SECONDS)
    channel = Channel(ours, ToPublisher)
    yield channel, theirs
    channel.close()
    theirs.close()


def hello(name: str = "e", protocol_version: int = PROTOCOL_VERSION) -> EngineHello:
    return EngineHello(protocol_version=protocol_version, name=name, pid=1, version=-1, generation=0)


# --- messages -----------------------------------------------------------------------------------------------------
def test_messages_in_any_portions(pair: tuple[Channel, socket.socket]) -> None:
    channel, theirs = pair
    said = [hello(), Ready(update=1), Refuse(update=1, why="x" * 70_000), Committed(update=1, version=3)]
    data = b"".join(encode_frame(message) for message in said)
    chance = random.Random(0)

    def send() -> None:
        done = 0
        while done < len(data):
            count = chance.choice((1, 3, 1000))
            theirs.sendall(data[done : done + count])
            done += count

    sender = threading.Thread(target=send)
    sender.start()
    assert [channel.receive() for _ in said] == said
    sender.join()
    theirs.shutdown(socket.SHUT_WR)
    assert channel.receive() is None


def test_half_a_message_and_the_end(pair: tuple[Channel, socket.socket]) -> None:
    channel, theirs = pair
    theirs.sendall(encode_frame(hello())[:-1])
    theirs.shutdown(socket.SHUT_WR)
    assert channel.receive() is None


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", MAX_MESSAGE_BYTES + 1),
        b"\xff" * 64,
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        struct.pack(">I", 0),
        encode_frame(Welcome(buffer_bytes=4)),  # what only the other side says
        struct.pack(">I", 5) + msgspec.msgpack.encode({"type": 5})[:5].ljust(5, b"\0"),
    ],
)
def test_nonsense_is_a_protocol_error(pair: tuple[Channel, socket.socket], data: bytes) -> None:
    channel, theirs = pair
    theirs.sendall(data)
    with pytest.raises(ProtocolError):
        channel.receive()


def test_random_bytes_never_do_anything_else(pair: tuple[Channel, socket.socket]) -> None:
    for seed in range(300):
        ours, theirs = socket.socketpair()
        channel = Channel(ours, ToPublisher)
        chance = random.Random(seed)
        payload = chance.randbytes(chance.randint(0, 60))
        theirs.sendall(struct.pack(">I", len(payload)) + payload if seed % 2 else payload)
        theirs.close()
        with contextlib.suppress(ProtocolError):
            assert channel.receive() is None
        channel.close()


def test_descriptors_come_with_their_message_and_do_not_leak(pair: tuple[Channel, socket.socket]) -> None:
    channel, theirs = pair
    before = len(os.listdir("/proc/self/fd"))
    out = Channel(theirs.dup(), FromPublisher)
    read_end, write_end = os.pipe()
    out.send(hello(), [write_end])
    os.close(write_end)
    assert channel.receive() == hello()
    (arrived,) = channel.descriptors
    assert not os.get_inheritable(arrived)
    os.write(arrived, b"through")
    assert os.read(read_end, 10) == b"through"
    out.close()
    os.close(read_end)
    channel.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1, "the channel's own socket"


def test_too_many_descriptors(pair: tuple[Channel, socket.socket]) -> None:
    channel, theirs = pair
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(theirs, [encode_frame(hello())], [0] * 30)
    with pytest.raises(ProtocolError, match="more descriptors"):
        channel.receive()
    channel.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_a_waiting_receive_can_be_broken_off(pair: tuple[Channel, socket.socket]) -> None:
    channel, _ = pair
    found: list[object] = []
    waiter = threading.Thread(target=lambda: found.append(channel.receive()))
    waiter.start()
    channel.break_off()
    waiter.join(PATIENCE_SECONDS)
    assert found == [None]


# --- places -------------------------------------------------------------------------------------------------------
def test_a_place_is_a_directory_or_the_socket_itself(tmp_path: Path) -> None:
    assert socket_path(tmp_path) == tmp_path / "weights.sock"
    assert socket_path(tmp_path / "other.sock") == tmp_path / "other.sock"
    with Publisher(tmp_path / "other.sock", bucket_bytes=64), Publisher(tmp_path, bucket_bytes=64):
        assert sorted(os.listdir(tmp_path)) == ["other.sock", "weights.sock"]
        assert (tmp_path / "weights.sock").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == []


def test_a_long_path(tmp_path: Path) -> None:
    place = tmp_path / ("a" * 100) / ("b" * 100)
    place.mkdir(parents=True)
    with Publisher(place, bucket_bytes=64) as publisher, connected(place) as engine:
        assert engine.receive() == Welcome(buffer_bytes=64)
        assert publisher.wait_for_engines(1, PATIENCE_SECONDS)
    assert os.listdir(place) == []


def test_a_name_that_is_too_long_by_itself(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="cannot listen at"):
        Publisher(tmp_path / ("a" * 120), bucket_bytes=64)
    assert os.listdir(tmp_path) == []


def test_no_such_place(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransferError, match=f"there is no directory {tmp_path}/none: No such file"):
        Publisher(tmp_path / "none" / "sock", bucket_bytes=64)
    with pytest.raises(TransferError, match="there is no directory"):
        connect(tmp_path / "none" / "sock")
    with pytest.raises(FileNotFoundError):
        connect(tmp_path / "sock")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TransferError, match="Address already in use"):
        Publisher(tmp_path / "file", bucket_bytes=64)
    assert (tmp_path / "file").read_text() == "mine"
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_place_that_nobody_may_write(tmp_path: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(TransferError, match="Permission denied"):
        Publisher(tmp_path, bucket_bytes=64)


def test_a_socket_that_a_dead_publisher_left(tmp_path: Path) -> None:
    listen(tmp_path / "weights.sock").close()  # as a killed process leaves it
    assert os.listdir(tmp_path) == ["weights.sock"]
    with Publisher(tmp_path, bucket_bytes=64), connected(tmp_path) as engine:
        assert engine.receive() == Welcome(buffer_bytes=64)


def test_of_many_that_begin_at_once_where_one_died_one_gets_the_place(tmp_path: Path) -> None:
    path = tmp_path / "weights.sock"
    for _ in range(50):
        listen(path).close()
        barrier = threading.Barrier(4)

        def begin(barrier: threading.Barrier = barrier) -> socket.socket | None:
            barrier.wait(PATIENCE_SECONDS)
            try:
                return listen(path)
            except TransferError:
                return None

        with ThreadPoolExecutor(4) as pool:
            got = [found for found in [future.result() for future in [pool.submit(begin) for _ in range(4)]] if found]
        assert len(got) == 1
        connect(path).close()  # to the one that is there
        got[0].close()


def test_a_second_publisher_at_the_same_place(tmp_path: Path) -> None:
    with Publisher(tmp_path, bucket_bytes=64), connected(tmp_path) as engine:
        with pytest.raises(PlaceTakenError, match=r"another publisher is alive at .*; stop it, or choose another"):
            Publisher(tmp_path, bucket_bytes=64)
        assert engine.receive() == Welcome(buffer_bytes=64)
        assert os.listdir(tmp_path) == ["weights.sock"]


def test_a_live_publisher_with_too_many_waiting_counts_as_alive(tmp_path: Path) -> None:
    listener = listen(tmp_path / "weights.sock")
    waiting: list[socket.socket] = []
    with contextlib.suppress(BlockingIOError):
        while len(waiting) < 1000:
            one = socket.socket(socket.AF_UNIX)
            one.setblocking(False)
            waiting.append(one)
            one.connect(str(tmp_path / "weights.sock"))
    with pytest.raises(TransferError, match="another publisher is alive"):
        Publisher(tmp_path, bucket_bytes=64)
    for one in (*waiting, listener):
        one.close()


def test_a_publisher_leaves_the_socket_of_another_alone(tmp_path: Path) -> None:
    first = Publisher(tmp_path, bucket_bytes=64)
    (tmp_path / "weights.sock").unlink()  # a cleaner tidies up
    with Publisher(tmp_path, bucket_bytes=64):
        first.close()
        assert os.listdir(tmp_path) == ["weights.sock"]


@pytest.mark.parametrize("bucket_bytes", [0, -64, 100])
def test_a_size_of_buckets_that_cannot_be_used(tmp_path: Path, bucket_bytes: int) -> None:
    with pytest.raises(UsageError, match="positive multiple of 64"):
        Publisher(tmp_path, bucket_bytes=bucket_bytes)
    assert os.listdir(tmp_path) == []


# --- strangers at a publisher that works ---------------------------------------------------------------------------
@contextlib.contextmanager
def connected(place: Path, *messages: msgspec.Struct) -> Iterator[Channel]:
    """An engine as far as the wire goes; says hello unless told otherwise."""
    connection = connect(socket_path(place))
    connection.settimeout(PATIENCE_SECONDS)
    channel = Channel(connection, FromPublisher)
    for message in messages or (hello(),):
        channel.send(message)
    try:
        yield channel
    finally:
        channel.close()


def farewell(channel: Channel) -> str:
    """The reason that the publisher gives when it closes the connection."""
    why = ""
    with contextlib.suppress(ConnectionError):
        while (message := channel.receive()) is not None:
            why = message.why if isinstance(message, Dismissed) else why
    return why


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Publisher]:
    """A publisher with one good engine, which must have the next version in the end, whatever the test does."""
    live = torch.zeros(1000)
    with (
        Publisher(tmp_path, bucket_bytes=1024, stall_timeout_seconds=PATIENCE_SECONDS) as publisher,
        Receiver(tmp_path, model={"w": live}, name="good") as receiver,
    ):
        assert publisher.wait_for_engines(1, PATIENCE_SECONDS)
        yield publisher
        result = publisher.publish(TensorSource({"w": torch.ones(1000)}), version=1)
        assert "good" in result.engines
        assert receiver.wait_for(1, PATIENCE_SECONDS)
        assert bool((live == 1).all())


def test_garbage_closes_one_connection(served: Publisher) -> None:
    for seed in range(20):
        connection = connect(served.path)
        connection.settimeout(PATIENCE_SECONDS)
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"\xff" + random.Random(seed).randbytes(500))
            while connection.recv(4096):
                pass
        connection.close()
    assert [engine.name for engine in served.engines()] == ["good"]


def test_words_before_the_hello(served: Publisher) -> None:
    for message in (Ready(update=1), BucketWritten(update=1, bucket=0, digest=0, seconds=0.0)):
        with connected(served.path, message) as stranger:
            assert farewell(stranger) == "it spoke before it said who it is"


def test_two_hellos(served: Publisher) -> None:
    second = SourceHello(protocol_version=PROTOCOL_VERSION, name="s", pid=1)
    with connected(served.path, hello(), second) as stranger:
        assert farewell(stranger) == "it said twice who it is"
    assert served.sources() == ()


def test_another_version_of_the_protocol(served: Publisher) -> None:
    with connected(served.path, hello(protocol_version=99)) as stranger:
        assert farewell(stranger) == f"it speaks version 99 of the protocol, not {PROTOCOL_VERSION}"


def test_one_who_connects_and_says_nothing(served: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "HELLO_SECONDS", 0.05)
    for words in (b"", encode_frame(hello())[:-1]):
        connection = connect(served.path)
        connection.settimeout(PATIENCE_SECONDS)
        connection.sendall(words)
        stranger = Channel(connection, FromPublisher)
        assert farewell(stranger) == "it did not say who it is"
        stranger.close()


def test_one_who_leaves_in_the_middle_of_a_word(served: Publisher) -> None:
    for count in (1, 4, 20):
        connection = connect(served.path)
        connection.sendall(encode_frame(hello())[:count])
        connection.close()


def test_namesakes_are_told_apart(served: Publisher) -> None:
    with connected(served.path, hello("good")), connected(served.path, hello("good")):
        assert served.wait_for_engines(3, PATIENCE_SECONDS)
        names = [engine.name for engine in served.engines()]
        assert len(set(names)) == 3, names
        with connected(served.path, hello("publisher")):
            assert served.wait_for_engines(4, PATIENCE_SECONDS)
            assert "publisher" not in {engine.name for engine in served.engines()}


def test_answers_that_nobody_asked_for(served: Publisher) -> None:
    """All from an engine in good standing, during an update: wrong numbers, wrong order, wrong role, no numbers."""
    with connected(served.path, hello("odd")) as odd:
        assert isinstance(odd.receive(), Welcome)
        handle = served.begin(TensorSource({"w": torch.full((1000,), 0.5)}), version=0)
        update = odd.receive().update
        for seconds in (float("nan"), float("inf"), -1.0, 1e300):
            odd.send(BucketLoaded(update=update, bucket=0, intact=True, seconds=seconds))
        odd.send(Committed(update=update, version=0))
        odd.send(Ready(update=update + 1))
        odd.send(Ready(update=update))
        odd.send(Ready(update=update))
        while not isinstance(odd.receive(), LoadBucket):  # so the update has begun
            pass
        for seconds in (float("nan"), float("inf"), -1.0, 1e300):
            odd.send(BucketWritten(update=update, bucket=0, digest=1, seconds=seconds))
            odd.send(BucketLoaded(update=update, bucket=-1, intact=False, seconds=seconds))
            odd.send(BucketLoaded(update=update, bucket=2**40, intact=True, seconds=seconds))
        odd.send(Refuse(update=update, why="enough"))
        result = handle.wait(PATIENCE_SECONDS)
        assert result is not None
        assert result.engines == ("good",)
        assert result.dropped == {"odd": "enough"}


def test_a_notice_that_cannot_be_printed(tmp_path: Path) -> None:
    def broken(_: str) -> None:
        raise BrokenPipeError

    with (
        Publisher(tmp_path, bucket_bytes=1024, on_notice=broken) as publisher,
        Receiver(tmp_path, model={"w": torch.zeros(3)}, on_notice=broken) as receiver,
    ):
        assert publisher.wait_for_engines(1, PATIENCE_SECONDS)
        with pytest.raises(TransferError, match="was not published"):
            publisher.publish(TensorSource({"other": torch.ones(3)}), version=1)
        publisher.publish(TensorSource({"w": torch.ones(3)}), version=1)
        assert receiver.wait_for(1, PATIENCE_SECONDS)


# --- a publisher that is not one -----------------------------------------------------------------------------------
def test_an_engine_survives_nonsense_and_finds_the_next_publisher(tmp_path: Path) -> None:
    notices: list[str] = []
    listener = listen(tmp_path / "weights.sock")
    listener.setblocking(True)
    listener.settimeout(PATIENCE_SECONDS)
    read_end, write_end = os.pipe()
    with Receiver(tmp_path, model={"w": torch.zeros(3)}, on_notice=notices.append) as receiver:
        for words, descriptors in (
            (b"\xff" * 50, []),
            (encode_frame(Welcome(buffer_bytes=64)), []),
            (encode_frame(Welcome(buffer_bytes=64)), [read_end, write_end]),
            (encode_frame(Ready(update=1)), []),
            (b"", []),
        ):
            connection, _ = listener.accept()
            assert connection.recv(4096)
            if words:
                socket.send_fds(connection, [words], descriptors)
                connection.settimeout(PATIENCE_SECONDS)
                with contextlib.suppress(ConnectionError):
                    assert connection.recv(4096) == b"", "it hangs up"
            connection.close()
        listener.close()
        with Publisher(tmp_path, bucket_bytes=64) as publisher:
            assert publisher.wait_for_engines(1, PATIENCE_SECONDS)
            publisher.publish(TensorSource({"w": torch.ones(3)}), version=5)
            assert receiver.wait_for(5, PATIENCE_SECONDS)
    os.close(read_end)
    os.close(write_end)
    assert sum("failed" in notice for notice in notices) == 4
    assert not any("defect" in notice for notice in notices)


def test_one_who_does_not_read_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    """A description larger than a socket's buffers and an engine that stands still: the others are served."""
    weights = {f"layer.{index}.a_long_name_for_a_tensor": torch.ones(1) for index in range(20_000)}
    with (
        Publisher(tmp_path, stall_timeout_seconds=1000.0) as publisher,
        connected(tmp_path, hello(name="mute")) as mute,
    ):
        assert publisher.wait_for_engines(1, PATIENCE_SECONDS)
        handle = publisher.begin(TensorSource(weights), version=1)
        with connected(tmp_path, hello(name="next")) as newcomer:
            assert isinstance(newcomer.receive(), Welcome)
        assert not handle.over
        received = [mute.receive(), mute.receive()]  # it reads after all, and misses nothing
        assert [type(message) for message in received] == [Welcome, Begin]
        assert len(received[1].manifest.entries) == len(weights)
