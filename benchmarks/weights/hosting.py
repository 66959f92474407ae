"""Healthy replicas and one replacement, each on a host of its own, and every way of giving it their state.

    python -m benchmarks.hosts

makes the hosts (`benchmarks.namespaces`) and starts this, which prints one JSON object. As in
`benchmarks.weights.restoring` all ways use the same processes and tensors, in turns; the time begins when the target
asks and ends when the state is in its own tensors.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
from pathlib import Path

import torch.distributed as dist

from benchmarks.namespaces import INTERFACE, enter
from benchmarks.weights.restoring import DEADLINE_S, SOURCES, Replica, _bytes, _connect, _nothing, measure
from benchmarks.weights.shapes import MIB
from relight.transfer.io.codec import Flat
from relight.transfer.restore.client import RestoreClient
from relight.transfer.restore.fabric import Address
from relight.transfer.restore.offer import BUCKET_BYTES, Offer
from relight.transfer.restore.server import RestoreServer
from relight.transfer.tensors.weights import TensorReader

WAYS = (
    *("relight", "relight-two-sources", "torchft-http", "torchft-pg", "gloo-same-buckets", "gloo"),
    *("tcp", "raw", "digest-source", "digest-target"),
)
TOKEN = b"a token for a measurement......."
PORT = 7000  # of the plain ways; each host has ports of its own


class Host(Replica):
    """A replica in a network namespace of its own."""

    def __init__(self, rank: int, directory: Path, mib: int, *, namespaces: list[str], addresses: list[str]) -> None:
        enter(namespaces[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        self.first_address = addresses[0]
        self._own_address = addresses[rank]
        self._tcp_listener: socket.socket | None = None
        super().__init__(rank, directory, mib)

    # --- relight
    def _make_server(self, path: Path) -> RestoreServer:
        server = RestoreServer(path, _nothing, host_address=self._own_address, token=TOKEN)
        path.with_suffix(".endpoint").write_text(server.address.endpoint)
        return server

    def _make_client(self) -> RestoreClient:
        return RestoreClient(_nothing, DEADLINE_S, TOKEN)

    def _address_of(self, source: int) -> Address:
        endpoint = (self.directory / f"replica-{source}.endpoint").read_text()
        return Address("/on/another/host", endpoint)

    # --- plain
    def gloo_same_buckets(self) -> None:
        """Buckets as large as relight's, sent and received."""
        self._send_and_receive(BUCKET_BYTES)

    def tcp(self) -> None:
        """Straight from tensors into tensors, nothing verified."""
        self._pass([_bytes(tensor) for tensor in self.state.values()])

    def raw(self) -> None:
        """As many bytes from one small buffer into another: the line alone."""
        buffer = memoryview(bytearray(MIB))
        total = sum(tensor.nbytes for tensor in self.state.values())
        self._pass([buffer] * (total // MIB))

    def _pass(self, views: list[memoryview]) -> None:
        if self.rank == 0:
            if self._tcp_listener is None:
                self._tcp_listener = socket.create_server((self._own_address, PORT))
            connection, _ = self._tcp_listener.accept()
            with connection:
                for view in views:
                    connection.sendall(view)
        elif self.rank == SOURCES:
            with socket.socket() as connection:
                _connect(connection, (self.first_address, PORT))
                for view in views:
                    done = 0
                    while done < len(view):
                        done += connection.recv_into(view[done:], min(MIB, len(view) - done))

    # --- what a transfer does besides
    def digest_source(self) -> None:
        """Digest everything, at the source."""
        self._digest(0)

    def digest_target(self) -> None:
        """Digest everything, at the target."""
        self._digest(SOURCES)

    def _digest(self, rank: int) -> None:
        if self.rank == rank:
            offer = Offer(1, 1, {}, Flat(self.state))
            reader = TensorReader(list(self.state.values()))
            for bucket in offer.buckets:
                reader.digest(bucket)
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description="Every way of restoring a replacement on another host")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--namespaces", nargs=SOURCES + 1, required=True)
    parser.add_argument("--addresses", nargs=SOURCES + 1, required=True)
    options = vars(parser.parse_args())
    place = {name: options.pop(name) for name in ("namespaces", "addresses")}
    print(json.dumps(measure(options, functools.partial(Host, **place))))


if __name__ == "__main__":
    main()
