"""Copying state between processes' tensors over real sockets: whole, verified, and honest about every break."""

import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from relight.errors import RestoreError
from relight.transfer.io.codec import Flat
from relight.transfer.restore.client import PROGRESS_SECONDS, RestoreClient
from relight.transfer.restore.fabric import Address
from relight.transfer.restore.offer import BUCKET_BYTES, BucketReady, Header, Offer
from relight.transfer.restore.server import RestoreServer
from relight.transfer.restore.shared_fabric import SpareBuffer

TIMEOUT_SECONDS = 20.0


def nothing() -> None:
    pass


def make_server(tmp_path: Path, name: str = "source", halfway: Callable[[], None] = nothing) -> RestoreServer:
    return RestoreServer(tmp_path / f"{name}.sock", halfway)


def make_state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    big = torch.randn(BUCKET_BYTES // 4 * 5 + 5, generator=generator)
    return {"big": big, "small": torch.randn(3, generator=generator), "empty": torch.zeros(0), "scalar": torch.ones(())}


def test_state_arrives_in_the_targets_own_tensors(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    state = make_state(1)
    own = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    server.offer(Offer(2, 7, {"lineage": "abc"}, Flat(state)))
    fetched = RestoreClient(nothing, TIMEOUT_SECONDS).fetch(2, 7, [server.address], own.get)
    assert fetched.header.meta == {"lineage": "abc"}
    assert all(torch.equal(own[name], state[name]) for name in state)
    assert [t.data_ptr() for t in fetched.tensors] == [own[p].data_ptr() for p in fetched.header.paths]


def test_two_sources_send_a_stripe_each(tmp_path: Path) -> None:
    state = make_state(2)
    servers = [make_server(tmp_path, name) for name in ("a", "b")]
    for server in servers:
        server.offer(Offer(2, 7, {}, Flat(state)))
    own = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    RestoreClient(nothing, TIMEOUT_SECONDS).fetch(2, 7, [s.address for s in servers], own.get)
    assert all(torch.equal(own[name], state[name]) for name in state)


def test_tensors_that_do_not_fit_are_received_beside(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    server.offer(Offer(1, 1, {}, Flat({"w": torch.ones(4)})))
    wrong = torch.zeros(5)
    fetched = RestoreClient(nothing, TIMEOUT_SECONDS).fetch(1, 1, [server.address], {"w": wrong}.get)
    assert torch.equal(fetched.tensors[0], torch.ones(4))
    assert torch.equal(wrong, torch.zeros(5))


def test_a_target_waits_for_the_offer(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    results: list[torch.Tensor] = []

    def fetch() -> None:
        fetched = RestoreClient(nothing, TIMEOUT_SECONDS).fetch(3, 4, [server.address], lambda _: None)
        results.append(fetched.tensors[0])

    thread = threading.Thread(target=fetch)
    thread.start()
    server.offer(Offer(3, 4, {}, Flat({"w": torch.ones(2)})))
    thread.join(TIMEOUT_SECONDS)
    assert torch.equal(results[0], torch.ones(2))


def test_an_older_generation_is_refused(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    server.offer(Offer(3, 4, {}, Flat({"w": torch.ones(2)})))
    server.withdraw(4)
    with pytest.raises(RestoreError, match="closed"):
        RestoreClient(nothing, TIMEOUT_SECONDS).fetch(3, 4, [server.address], lambda _: None)


def test_withdrawing_breaks_a_transfer_under_way(tmp_path: Path) -> None:
    server: RestoreServer

    def withdraw() -> None:
        server.withdraw(9)

    server = make_server(tmp_path, halfway=withdraw)
    server.offer(Offer(2, 7, {}, Flat(make_state(1))))
    with pytest.raises(RestoreError):
        RestoreClient(nothing, TIMEOUT_SECONDS).fetch(2, 7, [server.address], lambda _: None)


def test_cancelling_breaks_a_transfer_under_way(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    server.offer(Offer(2, 7, {}, Flat(make_state(1))))
    client: RestoreClient

    def cancel() -> None:
        client.cancel()

    client = RestoreClient(cancel, TIMEOUT_SECONDS)
    with pytest.raises(RestoreError):
        client.fetch(2, 7, [server.address], lambda _: None)


def test_a_source_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(RestoreError, match=r"missing\.sock cannot be reached"):
        RestoreClient(nothing, TIMEOUT_SECONDS).fetch(1, 1, [Address(str(tmp_path / "missing.sock"))], lambda _: None)


def serve_raw(path: Path, reply: bytes) -> threading.Thread:
    """A source that answers one request with these bytes and ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def run() -> None:
        connection, _ = listener.accept()
        with connection, listener:
            connection.recv(4096)
            connection.sendall(reply)
            if reply:  # what the target lends, or its end
                connection.recv(4096)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def framed(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def encoded(message: msgspec.Struct) -> bytes:
    return framed(msgspec.msgpack.encode(message))


def header_of(flat: Flat) -> bytes:
    return encoded(Header(1, 1, {}, flat.tree, flat.paths, flat.specs))


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"", "before it described its state"),
        (framed(b"garbage"), "before it described its state"),
        (struct.pack(">I", 2**31), "over the limit"),
        (header_of(Flat({"w": torch.ones(4)})), "ended in the middle"),
        (header_of(Flat({"w": torch.ones(4)})) + encoded(BucketReady(0, 0, 1)), "another digest"),
        (header_of(Flat({"w": torch.ones(4)})) + encoded(BucketReady(3, 0, 1)), "something else"),
        (header_of(Flat({"w": torch.ones(4)})) + encoded(BucketReady(0, 9, 1)), "something else"),
    ],
    ids=["nothing", "garbage", "oversized", "cut", "corrupt", "other bucket", "no such buffer"],
)
def test_a_bad_source_is_an_error_and_nothing_else(tmp_path: Path, reply: bytes, message: str) -> None:
    thread = serve_raw(tmp_path / "raw.sock", reply)
    with pytest.raises(RestoreError, match=message):
        RestoreClient(nothing, TIMEOUT_SECONDS).fetch(1, 1, [Address(str(tmp_path / "raw.sock"))], lambda _: None)
    thread.join(TIMEOUT_SECONDS)


def test_a_source_survives_strangers(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    server.offer(Offer(1, 1, {}, Flat({"w": torch.ones(2)})))
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", framed(b"x"), struct.pack(">I", 2**31)):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(server.address.path)
            stranger.sendall(garbage)
    fetched = RestoreClient(nothing, TIMEOUT_SECONDS).fetch(1, 1, [server.address], lambda _: None)
    assert torch.equal(fetched.tensors[0], torch.ones(2))


def test_a_long_copy_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [make_server(tmp_path, name) for name in ("a", "b")]
    state = make_state(3)
    for server in servers:
        server.offer(Offer(2, 7, {}, Flat(state)))
    said: list[tuple[int, int, float]] = []
    client = RestoreClient(nothing, TIMEOUT_SECONDS, on_progress=lambda *what: said.append(what))
    client.fetch(2, 7, [s.address for s in servers], lambda _: None)
    assert all(seconds >= PROGRESS_SECONDS for _, _, seconds in said)  # a short one says nothing
    said.clear()
    monkeypatch.setattr("relight.transfer.restore.client.PROGRESS_SECONDS", 0.0)  # every bucket is reported
    client.fetch(2, 7, [s.address for s in servers], lambda _: None)
    total = sum(bucket.nbytes for bucket in Offer(2, 7, {}, Flat(state)).buckets)
    assert [copied for copied, _, _ in said] == sorted({copied for copied, _, _ in said})
    assert (said[-1][0], {whole for _, whole, _ in said}) == (total, {total})
    assert len(said) >= 5  # buckets


def test_snapshots_are_served_beside_the_state_in_any_open_generation(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    server.offer(Offer(2, 7, {}, Flat({"w": torch.zeros(2)})))
    for rank, version in ((0, 5), (3, 5), (3, 6)):
        server.keep_snapshot(rank, Offer(0, version, {}, Flat({"w": torch.tensor([float(rank), float(version)])})))
    client = RestoreClient(nothing, TIMEOUT_SECONDS)
    for generation in (1, 4):
        for rank, version in ((0, 5), (3, 6), (3, 5)):
            fetched = client.fetch(generation, version, [server.address], lambda _: None, of=rank)
            assert fetched.tensors[0].tolist() == [rank, version]
    assert client.fetch(2, 7, [server.address], lambda _: None).tensors[0].tolist() == [0, 0]
    server.withdraw(5)
    with pytest.raises(RestoreError, match="generation is closed"):
        client.fetch(4, 5, [server.address], lambda _: None, of=3)
    assert client.fetch(5, 5, [server.address], lambda _: None, of=3).tensors[0].tolist() == [3, 5]


def test_copies_beside_training_use_one_buffer_again(tmp_path: Path) -> None:
    server, spare = make_server(tmp_path), SpareBuffer()
    states = [{"w": torch.arange(size, dtype=torch.float32)} for size in (3, 5, 2)]
    for version, state in enumerate([*states, make_state(1), make_state(2)]):
        server.keep_snapshot(1, Offer(0, version, {}, Flat(state)))
    used = []
    for version in range(5):
        client = RestoreClient(nothing, TIMEOUT_SECONDS, spare=spare)
        fetched = client.fetch(1, version, [server.address], lambda _: None, of=1)
        if version < 3:
            assert torch.equal(fetched.tensors[0], states[version]["w"])
        buffer = spare.acquire(1)
        used.append((id(buffer), buffer.nbytes))
        spare.leave(buffer)
    small, larger, again, large, large_again = used
    assert (small[1], larger[1], large[1]) == (12, 20, BUCKET_BYTES)  # as large as the largest bucket so far
    assert again == larger
    assert large_again == large


def test_a_buffer_that_a_source_may_still_write_is_not_used_again(tmp_path: Path) -> None:
    server, spare = make_server(tmp_path), SpareBuffer()
    server.keep_snapshot(1, Offer(0, 5, {}, Flat(make_state(3))))
    client: RestoreClient

    def cancel() -> None:
        client.cancel()

    client = RestoreClient(cancel, TIMEOUT_SECONDS, spare=spare)
    buffer = spare.acquire(BUCKET_BYTES)
    spare.leave(buffer)
    with pytest.raises(RestoreError):
        client.fetch(1, 5, [server.address], lambda _: None, of=1)
    assert spare.acquire(1) is not buffer
    fetched = RestoreClient(nothing, TIMEOUT_SECONDS, spare=spare).fetch(1, 5, [server.address], lambda _: None, of=1)
    assert torch.equal(fetched.tensors[0], make_state(3)["big"])


def test_nobody_reads_a_snapshot_that_is_forgotten(tmp_path: Path) -> None:
    """Its memory is about to be used again: a client in the middle of it gets an error, never a mixture."""
    server = make_server(tmp_path)
    state = make_state(3)
    offer = Offer(0, 5, {}, Flat(state))
    server.keep_snapshot(1, offer)
    inside, forgotten = threading.Event(), threading.Event()

    def halfway() -> None:
        inside.set()
        assert forgotten.wait(TIMEOUT_SECONDS)

    outcome: list[str] = []

    def fetch() -> None:
        try:
            RestoreClient(halfway, TIMEOUT_SECONDS).fetch(1, 5, [server.address], lambda _: None, of=1)
        except RestoreError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=fetch)
    thread.start()
    assert inside.wait(TIMEOUT_SECONDS)
    newer = Offer(0, 5, {}, Flat({"w": torch.ones(1)}))
    server.keep_snapshot(1, newer)  # the same version again, in other memory
    server.drop_snapshot(1, offer)
    state["big"].fill_(float("nan"))
    forgotten.set()
    thread.join(TIMEOUT_SECONDS)
    assert len(outcome) == 1
    again = RestoreClient(nothing, TIMEOUT_SECONDS).fetch(1, 5, [server.address], lambda _: None, of=1)
    assert again.tensors[0].tolist() == [1.0]
