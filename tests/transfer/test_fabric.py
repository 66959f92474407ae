"""Sources that a replacement takes, and how: rules without a socket."""

import pytest
import torch

from relight.errors import TransferError
from relight.transfer.io.codec import Flat
from relight.transfer.io.tcp import listen_on, parse_endpoint
from relight.transfer.restore.fabric import MAX_SOURCES, NETWORK_STRIPE_BYTES, STRIPE_BYTES, Address, choose_sources
from relight.transfer.restore.offer import BUCKET_BYTES, plan_state
from relight.transfer.restore.tcp_fabric import chunks
from relight.transfer.tensors.weights import CHUNK_BYTES, TensorReader

GIB = 2**30
A1, A2 = Address("/a1", "10.0.0.1:7001"), Address("/a2", "10.0.0.1:7002")
B1, C1 = Address("/b1", "10.0.0.2:7001"), Address("/c1", "[fd00::3]:7001")
ALL = [A1, A2, B1, C1]


def nowhere(_: Address) -> bool:
    return False


def test_sources_on_the_same_host_are_preferred() -> None:
    assert choose_sources(ALL, 0, GIB, lambda address: address in (A2, C1)) == [A2, C1]


def test_a_small_state_comes_from_one_source() -> None:
    assert choose_sources(ALL, 0, STRIPE_BYTES, lambda _: True) == [A1]
    assert choose_sources(ALL, 0, NETWORK_STRIPE_BYTES, nowhere) == [A1]
    assert choose_sources(ALL, 0, 0, nowhere) == [A1]


def test_other_hosts_serve_through_one_source_each() -> None:
    assert choose_sources(ALL, 0, GIB, nowhere) == [A1, B1, C1]


def test_another_replacement_begins_with_another_source() -> None:
    assert [choose_sources(ALL, rank, 0, nowhere)[0] for rank in range(5)] == [A1, A2, B1, C1, A1]
    assert choose_sources(ALL, 3, GIB, nowhere) == [C1, A1, B1]


def test_there_are_not_too_many() -> None:
    many = [Address(f"/{host}", f"10.0.0.{host}:7001") for host in range(9)]
    assert choose_sources(many, 0, 64 * GIB, nowhere) == many[:MAX_SOURCES]
    assert choose_sources(many, 0, 64 * GIB, lambda _: True) == many[:MAX_SOURCES]


@pytest.mark.parametrize(
    ("endpoint", "parsed"), [("10.0.0.7:7001", ("10.0.0.7", 7001)), ("[fd00::7]:65535", ("fd00::7", 65535))]
)
def test_an_endpoint(endpoint: str, parsed: tuple[str, int]) -> None:
    assert parse_endpoint(endpoint) == parsed


@pytest.mark.parametrize("endpoint", ["", "10.0.0.7", ":7001", "host:7001", "10.0.0.7:0", "10.0.0.7:65536", "1:²"])
def test_no_endpoint(endpoint: str) -> None:
    with pytest.raises(TransferError, match="no endpoint"):
        parse_endpoint(endpoint)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("example.org", "no IP address"),
        ("", "no IP address"),
        ("0.0.0.0", "not an address that other hosts can reach"),
        ("::", "not an address that other hosts can reach"),
        ("192.0.2.1", "cannot listen at 192.0.2.1"),  # reserved for documentation
    ],
)
def test_an_address_that_cannot_be_listened_at(host: str, message: str) -> None:
    with pytest.raises(TransferError, match=message):
        listen_on(host)


def test_what_is_listened_at_can_be_parsed() -> None:
    for host in ("127.0.0.1", "::1"):
        listener, endpoint = listen_on(host)
        with listener:
            assert parse_endpoint(endpoint) == listener.getsockname()[:2]


def test_chunks_are_the_same_bytes_in_pieces_that_a_system_call_takes() -> None:
    sizes = [0, 1, 3, CHUNK_BYTES, *[5] * 2000, CHUNK_BYTES * 3 + 7, 1]
    data = bytes(range(256)) * (sum(sizes) // 256 + 1)
    views, start = [], 0
    for size in sizes:
        views.append(memoryview(data)[start : start + size])
        start += size
    found = [[bytes(view) for view in chunk] for chunk in chunks(views)]
    assert b"".join(view for chunk in found for view in chunk) == data[: sum(sizes)]
    assert all(0 < sum(map(len, chunk)) <= CHUNK_BYTES and len(chunk) <= 256 for chunk in found)


def test_views_keep_the_memory_of_copies_they_were_taken_from() -> None:
    strided = torch.arange(BUCKET_BYTES // 4, dtype=torch.float32).view(1024, -1).T
    flat = Flat({"strided": strided, "conjugate": torch.full((64,), 1 + 2j).conj()})
    (bucket, rest) = plan_state(flat.specs)
    reader = TensorReader(flat.tensors)
    views = [*reader.views(bucket), *reader.views(rest)]
    torch.zeros(BUCKET_BYTES)  # takes memory that was given back, if it was
    copies = [strided.contiguous().view(-1), torch.full((64,), 1 - 2j)]
    wanted = b"".join(bytes(copy.view(torch.uint8).tolist()) for copy in copies)
    assert b"".join(views) == wanted
