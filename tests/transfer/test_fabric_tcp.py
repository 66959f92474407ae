"""Copying state between hosts, over real sockets: whole, verified, from no stranger, and broken off at once."""

import contextlib
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from relight.errors import ProtocolError, RestoreError
from relight.transfer.io.codec import Flat
from relight.transfer.io.tcp import HANDSHAKE_SECONDS, MAX_STRANGERS, TcpChannel, parse_endpoint
from relight.transfer.restore.client import RestoreClient
from relight.transfer.restore.fabric import Address
from relight.transfer.restore.offer import BucketReady, Header
from relight.transfer.restore.server import RestoreServer
from relight.transfer.restore.tcp_fabric import SOURCE, TARGET
from relight.wire.messages import PROTOCOL_VERSION
from tests.transfer.hosts import (
    DEADLINE_SECONDS,
    NOWHERE,
    TOKEN,
    Line,
    State,
    blank,
    elsewhere,
    expect,
    make_client,
    make_server,
    make_state,
    offer,
    source_process,
)

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)

    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


def check_same(own: State, state: State) -> None:
    assert all(same_bits(own[name], state[name]) for name in state)


# --- what arrives -------------------------------------------------------------------------------------------------
def test_state_arrives_in_the_targets_own_tensors(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    state = make_state(1)
    own = blank(state)
    server.offer(offer(state))
    fetched = make_client().fetch(2, 7, [elsewhere(server)], own.get)
    assert fetched.header.meta == {"lineage": "abc"}
    check_same(own, state)
    assert [t.data_ptr() for t in fetched.tensors] == [own[p].data_ptr() for p in fetched.header.paths]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_type_keeps_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    server = make_server(tmp_path)
    generator = torch.Generator().manual_seed(3)
    if dtype is torch.bool:
        tensor = torch.randint(0, 2, (33, 7), generator=generator).bool()
    else:  # any bits, NaN with payloads among them
        raw = torch.randint(0, 256, (33, 7 * dtype.itemsize), generator=generator)
        tensor = raw.to(torch.uint8).view(dtype)
    state = {"plain": tensor, "strided": tensor.t(), "empty": tensor[:0], "scalar": tensor[0, 0].clone()}
    own = {name: torch.zeros(t.shape, dtype=torch.uint8).to(dtype) for name, t in state.items()}
    server.offer(offer(state))
    make_client().fetch(2, 7, [elsewhere(server)], own.get)
    check_same(own, state)


def test_thousands_of_tensors_and_some_that_are_not_what_the_target_has(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    generator = torch.Generator().manual_seed(4)
    state = {f"t{i}": torch.randn(i % 50, generator=generator) for i in range(5000)}
    state["conjugate"] = torch.randn(70_000, dtype=torch.complex64, generator=generator).conj()
    state["strided"] = torch.randn(1500, 1500, generator=generator)[:, ::3]
    own = blank(state)
    own["t7"] = torch.zeros(99)  # of another shape: received beside
    del own["t8"]
    server.offer(offer(state))
    fetched = make_client().fetch(2, 7, [elsewhere(server)], own.get)
    check_same(dict(zip(fetched.header.paths, fetched.tensors, strict=True)), state)
    assert torch.equal(own["t7"], torch.zeros(99))


def test_a_state_without_a_byte(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    server.offer(offer({"empty": torch.zeros(0)}))
    assert make_client().fetch(2, 7, [elsewhere(server)], lambda _: None).received_bytes == 0


def test_two_sources_send_a_stripe_each(tmp_path: Path) -> None:
    state, own = make_state(2), blank(make_state(2))
    servers = [make_server(tmp_path, name) for name in ("a", "b")]
    for server in servers:
        server.offer(offer(state))
    with Line(servers[0].address.endpoint) as first, Line(servers[1].address.endpoint) as second:
        make_client().fetch(2, 7, [Address(NOWHERE, line.endpoint) for line in (first, second)], own.get)
        total_bytes = sum(tensor.nbytes for tensor in state.values())
        assert min(len(line.towards_target) for line in (first, second)) > total_bytes / 3
    check_same(own, state)


def test_one_source_here_and_one_elsewhere(tmp_path: Path) -> None:
    state, own = make_state(2), blank(make_state(2))
    servers = [make_server(tmp_path, name) for name in ("a", "b")]
    for server in servers:
        server.offer(offer(state))
    make_client().fetch(2, 7, [servers[0].address, elsewhere(servers[1])], own.get)
    check_same(own, state)


def test_a_target_on_the_same_host_uses_shared_buffers(tmp_path: Path) -> None:
    state, own = make_state(1), blank(make_state(1))
    server = make_server(tmp_path)
    server.offer(offer(state))
    with Line(server.address.endpoint) as line:
        make_client().fetch(2, 7, [Address(server.address.path, line.endpoint)], own.get)
        assert not line.towards_source
    check_same(own, state)


def test_a_line_that_cuts_everything_into_small_pieces(tmp_path: Path) -> None:
    state = {"w": torch.arange(50_000), "v": torch.arange(3)}
    own = blank(state)
    server = make_server(tmp_path)
    server.offer(offer(state))
    with Crumbs(server.address.endpoint) as line:
        make_client().fetch(2, 7, [Address(NOWHERE, line.endpoint)], own.get)
    check_same(own, state)


class Crumbs(Line):
    """Sends on what comes from the source in pieces of 1 to 997 bytes."""

    def _downwards(self, far: socket.socket, near: socket.socket) -> None:
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        size = 1
        while data := far.recv(size):
            near.sendall(data)
            size = size % 997 + 1


# --- who may ------------------------------------------------------------------------------------------------------
def test_a_target_without_the_token_is_refused(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    server.offer(offer(make_state(1)))
    with pytest.raises(RestoreError, match="does not know this job's token"):
        make_client(token=b"another").fetch(2, 7, [elsewhere(server)], lambda _: None)


def test_a_source_without_the_token_is_refused() -> None:
    """It lets everyone in, and cannot prove itself."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def welcome() -> None:
            connection, _ = listener.accept()
            channel = TcpChannel(connection, b"another", Header)
            with pytest.raises(ProtocolError):
                channel.admit(SOURCE, TARGET)
            channel.close()

        impostor = threading.Thread(target=welcome)
        impostor.start()
        with pytest.raises(RestoreError, match="token"):
            make_client().fetch(2, 7, [at(listener)], lambda _: None)
        impostor.join(DEADLINE_SECONDS)


def at(listener: socket.socket) -> Address:
    host, port = listener.getsockname()
    return Address(NOWHERE, f"{host}:{port}")


def test_a_source_that_accepts_everyone_must_still_prove_itself() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def welcome() -> None:
            connection, _ = listener.accept()
            with connection:
                challenge = {"type": "Challenge", "protocol_version": PROTOCOL_VERSION, "nonce": b"n" * 32}
                connection.sendall(framed(challenge))
                connection.recv(4096)
                connection.sendall(framed({"type": "Welcome", "mac": b"m" * 32}))
                connection.recv(4096)

        impostor = threading.Thread(target=welcome)
        impostor.start()
        with pytest.raises(RestoreError, match="it does not know this job's token"):
            make_client().fetch(2, 7, [at(listener)], lambda _: None)
        impostor.join(DEADLINE_SECONDS)


def test_without_a_token_nobody_connects(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    with pytest.raises(RestoreError, match="no job token"):
        make_client(token=b"").fetch(2, 7, [elsewhere(server)], lambda _: None)
    tokenless = make_server(tmp_path, "tokenless", token=b"")
    tokenless.offer(offer(make_state(1)))
    with pytest.raises(RestoreError):
        make_client().fetch(2, 7, [elsewhere(tokenless)], lambda _: None)


def test_the_token_is_never_sent_and_a_proof_is_worth_nothing_twice(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    server.offer(offer({"w": torch.ones(2)}))
    with Line(server.address.endpoint) as line:
        make_client().fetch(2, 7, [Address(NOWHERE, line.endpoint)], lambda _: None)
        seen = bytes(line.towards_source)
        assert TOKEN not in seen
        assert TOKEN not in line.towards_target
    with socket.create_connection(parse_endpoint(server.address.endpoint)) as replayer:
        replayer.settimeout(DEADLINE_SECONDS)
        replayer.sendall(seen)
        assert b"does not know" in read_all(replayer)


def read_all(connection: socket.socket) -> bytes:
    data = b""
    try:
        while more := connection.recv(4096):
            data += more
    except ConnectionResetError:  # it closed with some of ours unread
        pass
    return data


def framed(message: object) -> bytes:
    data = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    return struct.pack(">I", len(data)) + data


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\x00", b"GET / HTTP/1.1\r\n\r\n", framed(b"x"), struct.pack(">I", 2**31), framed(b"y" * 5000)],
    ids=["nothing", "a byte", "http", "no message", "oversized", "too large for a stranger"],
)
def test_strangers_are_cut_off_and_disturb_nobody(tmp_path: Path, garbage: bytes) -> None:
    server = make_server(tmp_path)
    server.offer(offer({"w": torch.ones(2)}))
    with socket.create_connection(parse_endpoint(server.address.endpoint)) as stranger:
        stranger.settimeout(DEADLINE_SECONDS)
        stranger.sendall(garbage)
        with contextlib.suppress(OSError):  # it may be cut off already
            stranger.shutdown(socket.SHUT_WR)
        assert len(read_all(stranger)) < 1000  # a greeting; not a word of the state
    fetched = make_client().fetch(2, 7, [elsewhere(server)], lambda _: None)
    assert torch.equal(fetched.tensors[0], torch.ones(2))


def test_strangers_who_say_nothing_are_counted_and_go(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    server.offer(offer({"w": torch.ones(2)}))
    where = parse_endpoint(server.address.endpoint)
    strangers = [socket.create_connection(where, DEADLINE_SECONDS) for _ in range(MAX_STRANGERS)]
    for stranger in strangers:
        assert stranger.recv(1)  # the beginning of its greeting: it has its place
    with pytest.raises(RestoreError, match="cannot be reached"):
        make_client().fetch(2, 7, [elsewhere(server)], lambda _: None)
    for stranger in strangers:
        read_all(stranger)  # it is cut off HANDSHAKE_SECONDS after it came, and its place is free
        stranger.close()
    assert make_client().fetch(2, 7, [elsewhere(server)], lambda _: None).header.version == 7


# --- what can go wrong on the way ---------------------------------------------------------------------------------
def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    state = make_state(1)
    server = make_server(tmp_path)
    server.offer(offer(state))

    def flip(data: bytes, before: int) -> bytes:
        at_byte = 3_000_000 - before
        if not 0 <= at_byte < len(data):
            return data
        return data[:at_byte] + bytes([data[at_byte] ^ 1]) + data[at_byte + 1 :]

    with (
        Line(server.address.endpoint, flip) as line,
        pytest.raises(RestoreError, match="bucket 0 arrived with another"),
    ):
        make_client().fetch(2, 7, [Address(NOWHERE, line.endpoint)], lambda _: None)


def test_a_digest_that_the_source_knows_already_is_sent_and_verified(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    known = offer(make_state(1))
    for bucket in known.buckets:
        known.digests[bucket.index] = known.reader.digest(bucket)
    server.offer(known)
    own = blank(make_state(1))
    make_client().fetch(2, 7, [elsewhere(server)], own.get)
    check_same(own, make_state(1))
    known.digests[3] ^= 1
    with pytest.raises(RestoreError, match="bucket 3 arrived with another"):
        make_client().fetch(2, 7, [elsewhere(server)], own.get)


def test_a_source_that_does_not_exist() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = at(listener)
    with pytest.raises(RestoreError, match=rf"{address.endpoint} cannot be reached: .*ECONNREFUSED"):
        make_client().fetch(2, 7, [address], lambda _: None)


def test_an_endpoint_that_is_none() -> None:
    with pytest.raises(RestoreError, match="no endpoint"):
        make_client().fetch(2, 7, [Address(NOWHERE, "example.org:1")], lambda _: None)


def test_two_sources_that_disagree(tmp_path: Path) -> None:
    servers = [make_server(tmp_path, name) for name in ("a", "b")]
    servers[0].offer(offer({"w": torch.ones(4)}))
    servers[1].offer(offer({"w": torch.ones(5)}))
    with pytest.raises(RestoreError, match="describe the same version differently"):
        make_client().fetch(2, 7, [elsewhere(server) for server in servers], lambda _: None)


@pytest.mark.parametrize(("name", "agree"), [("noticed", True), ("lineage", False), ("private_buffers", False)])
def test_two_sources_may_say_of_themselves_what_they_like(tmp_path: Path, name: str, agree: bool) -> None:
    servers = [make_server(tmp_path, source) for source in ("a", "b")]
    for server in servers:
        one = offer({"w": torch.ones(4)})
        one.header.meta[name] = "other" if server is servers[0] else "another"
        server.offer(one)
    addresses = [elsewhere(server) for server in servers]
    with contextlib.nullcontext() if agree else pytest.raises(RestoreError, match="differently"):
        make_client().fetch(2, 7, addresses, lambda _: None)


def test_an_older_generation_is_refused(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    server.offer(offer(make_state(1)))
    server.withdraw(3)
    with pytest.raises(RestoreError, match="closed"):
        make_client().fetch(2, 7, [elsewhere(server)], lambda _: None)


class RawSource:
    """Knows the token, lets one target in, and then sends these bytes instead of a state; gone after the block."""

    def __init__(self, reply: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = at(self._listener)
        self._reply = reply
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            channel = TcpChannel(connection, TOKEN, Header)
            channel.admit(SOURCE, TARGET)
            connection.settimeout(DEADLINE_SECONDS)
            connection.recv(4096)  # the request
            connection.sendall(self._reply)
            connection.shutdown(socket.SHUT_WR)
            read_all(connection)

    def __enter__(self) -> "RawSource":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(DEADLINE_SECONDS)
        self._listener.close()


def header(shape: tuple[int, ...], *, paths: int = 1) -> bytes:
    flat = Flat({"w": torch.ones(4)})
    specs = [msgspec.structs.replace(flat.specs[0], shape=shape)]
    return framed(Header(2, 7, {}, flat.tree, flat.paths * paths, specs))


ONES = struct.pack("<4f", 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"", "before it described its state"),
        (framed(b"garbage"), "before it described its state"),
        (struct.pack(">I", 2**31), "over the limit"),
        (header((2**50,)), "4096.0 TiB, more than this machine can hold"),
        (header((2**62,)), "more than this machine can hold"),
        (header((2**40, 2**40)), "more than this machine can hold"),
        (header((-1,)), "cannot be"),
        (header((4,), paths=2), "cannot be"),
        (header((4,)), "ended in the middle"),
        (header((4,)) + ONES[:7], "ended in the middle"),
        (header((4,)) + ONES, "ended in the middle"),
        (header((4,)) + ONES + framed(BucketReady(0, 0, 1)), "another digest"),
        (header((4,)) + ONES + framed(BucketReady(3, 0, 1)), "something else"),
        (header((4,)) + ONES + header((4,)), "something else"),
        (header((4,)) + ONES + framed(b"?"), "malformed"),
        (header((4,)) + ONES + struct.pack(">I", 2**31), "over the limit"),
    ],
)
def test_a_bad_source_is_an_error_and_nothing_else(reply: bytes, message: str) -> None:
    with RawSource(reply) as source, pytest.raises(RestoreError, match=message):
        make_client().fetch(2, 7, [source.address], lambda _: None)


# --- sources that die, targets that are told to stop --------------------------------------------------------------
def test_a_source_that_is_killed_ends_the_transfer(tmp_path: Path) -> None:
    with source_process(tmp_path, "a", strikes=signal.SIGKILL) as (address, pipe):
        with pytest.raises(RestoreError, match="ended in the middle"):
            make_client().fetch(2, 7, [address], lambda _: None)
        assert expect(pipe) == "halfway"


def test_one_of_two_sources_that_is_killed_ends_the_transfer(tmp_path: Path) -> None:
    with (
        source_process(tmp_path, "a", strikes=signal.SIGKILL) as (first, _),
        source_process(tmp_path, "b") as (
            second,
            _,
        ),
    ):
        with pytest.raises(RestoreError):
            make_client().fetch(2, 7, [first, second], lambda _: None)
        own = blank(make_state(1))
        make_client().fetch(2, 7, [second], own.get)  # the next generation has the other
        check_same(own, make_state(1))


def test_a_frozen_source_is_given_up(tmp_path: Path) -> None:
    with source_process(tmp_path, "a", buckets=40, strikes=signal.SIGSTOP) as (address, pipe):
        with pytest.raises(RestoreError, match="timed out"):
            make_client(timeout_seconds=0.5).fetch(2, 7, [address], lambda _: None)
        assert expect(pipe) == "halfway"


def test_a_target_that_waits_for_a_frozen_source_is_cancelled(tmp_path: Path) -> None:
    with source_process(tmp_path, "a", buckets=40, strikes=signal.SIGSTOP) as (address, pipe):
        client = make_client()
        outcome = Outcome(lambda: client.fetch(2, 7, [address], lambda _: None))
        assert expect(pipe) == "halfway"
        client.cancel()
        assert "cancelled" in outcome.error()


def test_a_target_that_waits_for_the_offer_is_cancelled(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    with Line(server.address.endpoint) as line:
        client = make_client()
        outcome = Outcome(lambda: client.fetch(2, 7, [Address(NOWHERE, line.endpoint)], lambda _: None))
        wait_until(lambda: len(line.towards_source) > 100)  # its proof and its request
        client.cancel()
        assert "cancelled" in outcome.error()


def test_a_target_that_cannot_get_through_is_cancelled() -> None:
    """No process accepts, and the queue is full: the connection hangs, as to a host that is gone."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        first = socket.create_connection(listener.getsockname())
        client = make_client()
        outcome = Outcome(lambda: client.fetch(2, 7, [at(listener)], lambda _: None))
        wait_until(lambda: bool(client._links))
        client.cancel()
        assert "cancelled" in outcome.error(within_seconds=HANDSHAKE_SECONDS / 2)
        first.close()


def test_cancelling_in_the_middle(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    server.offer(offer(make_state(1)))
    client: RestoreClient

    def cancel() -> None:
        client.cancel()

    client = make_client(cancel)
    with pytest.raises(RestoreError, match="cancelled"):
        client.fetch(2, 7, [elsewhere(server)], lambda _: None)


def test_withdrawing_in_the_middle(tmp_path: Path) -> None:
    server: RestoreServer
    server = make_server(tmp_path, halfway=lambda: server.withdraw(9))
    server.offer(offer(make_state(1)))
    with pytest.raises(RestoreError, match="ended in the middle"):
        make_client().fetch(2, 7, [elsewhere(server)], lambda _: None)


def test_withdrawing_ends_the_wait_of_a_source_whose_target_is_frozen(tmp_path: Path) -> None:
    """A line that takes nothing any more: the source waits in the middle of a bucket, until the generation closes."""
    server = make_server(tmp_path)
    server.offer(offer(make_state(1, buckets=12)))
    held = threading.Event()

    def hold(data: bytes, before: int) -> bytes:
        if before > 2**20:
            held.wait(DEADLINE_SECONDS)
        return data

    before = threading.active_count()
    with Line(server.address.endpoint, hold) as line:
        client = make_client()
        outcome = Outcome(lambda: client.fetch(2, 7, [Address(NOWHERE, line.endpoint)], lambda _: None))
        wait_until(lambda: len(line.towards_target) > 2**20)
        server.withdraw(3)
        held.set()
        assert "ended in the middle" in outcome.error()
    wait_until(lambda: threading.active_count() <= before)


class Outcome:
    """The result of a call, on a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            self._error = error

    def error(self, within_seconds: float = DEADLINE_SECONDS / 2) -> str:
        self._thread.join(within_seconds)
        assert not self._thread.is_alive(), "it goes on"
        assert isinstance(self._error, RestoreError), self._error
        return str(self._error)


def wait_until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)
