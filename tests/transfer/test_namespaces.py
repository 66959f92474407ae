"""Restoring between hosts that share nothing but a network: namespaces on this machine, where it allows them."""

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from benchmarks.namespaces import Network, missing
from relight.transfer.restore.fabric import Address
from tests.transfer.hosts import expect, source_process, target_process


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    why = missing()
    if why:
        pytest.skip(why)
    with Network(["a", "b", "target"]) as network:
        yield network


def source(
    network: Network, directory: Path, name: str, *, buckets: int = 6, strikes: int = 0
) -> AbstractContextManager[tuple[Address, Connection]]:
    host, namespace = network.addresses[name], network.namespaces[name]
    return source_process(directory, name, host=host, namespace=namespace, buckets=buckets, strikes=strikes)


def test_state_arrives_from_another_host(network: Network, tmp_path: Path) -> None:
    with source(network, tmp_path, "a") as (address, _):
        assert address.endpoint.startswith(network.addresses["a"])
        with target_process(network.namespaces["target"], [address.endpoint]) as said:
            assert expect(said) == "the same bits"


def test_a_stripe_comes_from_each_of_two_hosts_over_slow_lines(network: Network, tmp_path: Path) -> None:
    for name in ("a", "b"):
        network.limit(name, 200)
    with (
        source(network, tmp_path, "a", buckets=9) as (first, _),
        source(network, tmp_path, "b", buckets=9) as (second, _),
        target_process(network.namespaces["target"], [first.endpoint, second.endpoint], buckets=9) as said,
    ):
        assert expect(said) == "the same bits"
    for name in ("a", "b"):
        network.limit(name, None)


def test_a_host_that_does_not_answer_is_given_up(network: Network) -> None:
    """No host has the address: no answer at all, not even that there is none."""
    with target_process(network.namespaces["target"], ["10.213.0.250:7001"]) as said:
        assert "10.213.0.250:7001 cannot be reached" in expect(said)


def test_a_source_that_is_killed_on_another_host(network: Network, tmp_path: Path) -> None:
    with (
        source(network, tmp_path, "a", strikes=signal.SIGKILL) as (address, _),
        target_process(network.namespaces["target"], [address.endpoint]) as said,
    ):
        assert "ended in the middle" in expect(said)


def test_a_worker_listens_at_its_address_alone(network: Network, tmp_path: Path) -> None:
    """One that was told its loopback address cannot be reached at the host's other one."""
    with source_process(tmp_path, "a", namespace=network.namespaces["a"]) as (address, _):
        outside = network.addresses["a"] + ":" + address.endpoint.rpartition(":")[2]
        with target_process(network.namespaces["target"], [outside]) as said:
            assert "ECONNREFUSED" in expect(said)
