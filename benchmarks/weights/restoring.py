"""Healthy replicas, one replacement on the same host, and every way of giving it their state.

    python -m benchmarks.weights.restoring --mib 1024 --rounds 3

prints one JSON object. All ways use the same processes and the same tensors, in turns. A way's time begins when the
target asks and ends when the state is in the target's own tensors, which were written before (a standby's are).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import gc
import json
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.weights.packing import flat_for, packed, unpack
from benchmarks.weights.shapes import MIB, dense
from relight.transfer.io.codec import Flat
from relight.transfer.restore.client import RestoreClient
from relight.transfer.restore.fabric import Address
from relight.transfer.restore.offer import Offer
from relight.transfer.restore.server import RestoreServer

NOT_MOVED = frozenset({"limit", "raw", "digest-source", "digest-target"})  # the state, by these
WAYS = ("relight", "relight-two-sources", "torchft-http", "torchft-pg", "gloo", "unix-socket", "limit")
SOURCES = 2
DEADLINE_S = 300.0
GLOO_BYTES = 64 * MIB
TIMEOUT = datetime.timedelta(seconds=120)


class Replica:
    """Rank 0 and 1 are sources, rank 2 is the target."""

    first_address = "127.0.0.1"  # of rank 0

    def __init__(self, rank: int, directory: Path, mib: int) -> None:
        self.rank, self.directory = rank, directory
        self.state = dense(mib)
        if rank == SOURCES:
            for tensor in self.state.values():
                tensor.zero_()
        self.generation = 0
        self.ended_ns = 0  # 0: when the way returns
        self.server = self._make_server(directory / f"replica-{rank}.sock") if rank < SOURCES else None
        store = dist.FileStore(str(directory / "store"), SOURCES + 1)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=SOURCES + 1)
        self._http: Any = None
        self._pg: Any = None

    # --- relight
    def _make_server(self, path: Path) -> RestoreServer:
        return RestoreServer(path, _nothing)

    def _make_client(self) -> RestoreClient:
        return RestoreClient(_nothing, DEADLINE_S)

    def _address_of(self, source: int) -> Address:
        return Address(str(self.directory / f"replica-{source}.sock"))

    def relight(self) -> None:
        self._restore(1)

    def relight_two_sources(self) -> None:
        self._restore(SOURCES)

    def _restore(self, sources: int) -> None:
        self.generation += 1
        if self.server is not None:
            self.server.offer(Offer(self.generation, 1, {}, Flat(self.state)))
            return
        addresses = [self._address_of(source) for source in range(sources)]
        self._make_client().fetch(self.generation, 1, addresses, self.state.get)

    # --- torchft
    def torchft_http(self) -> None:
        from torchft.checkpointing.http_transport import HTTPTransport

        if self._http is None:
            self._http = HTTPTransport(TIMEOUT, 4)
            addresses: list[Any] = [None] * (SOURCES + 1)
            dist.all_gather_object(addresses, self._http.metadata().replace(socket.gethostname(), self.first_address))
            self._address = addresses[0]
        if self.rank == 0:
            self._http.send_checkpoint([SOURCES], 1, self.state, TIMEOUT)
            dist.barrier()
            self._http.disallow_checkpoint()
        elif self.rank == SOURCES:
            received = self._http.recv_checkpoint(0, self._address, 1, TIMEOUT)
            for name, tensor in received.items():
                self.state[name].copy_(tensor)
            self.ended_ns = time.monotonic_ns()
            dist.barrier()
        else:
            dist.barrier()

    def torchft_pg(self) -> None:
        from torchft.checkpointing.pg_transport import PGTransport
        from torchft.process_group import ProcessGroupGloo

        if self._pg is None and self.rank != 1:
            group = ProcessGroupGloo(timeout=TIMEOUT)
            group.configure(self._store_address(), "bench", 0 if self.rank == 0 else 1, 2)
            self._pg = PGTransport(group, TIMEOUT, torch.device("cpu"), state_dict=lambda: self.state)
        if self.rank == 0:
            self._pg.send_checkpoint([1], 1, self.state, TIMEOUT)
        elif self.rank == SOURCES:
            self._pg.recv_checkpoint(0, "", 1, TIMEOUT)

    def _store_address(self) -> str:
        where = self.directory / "tcp-store"
        if self.rank == 0:
            self._tcp = dist.TCPStore(self.first_address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            where.with_suffix(".tmp").write_text(f"{self.first_address}:{self._tcp.port}/bench")
            where.with_suffix(".tmp").rename(where)
        end = time.monotonic() + DEADLINE_S
        while not where.exists():
            if time.monotonic() > end:
                raise RuntimeError("no store")
            time.sleep(0.01)
        return where.read_text()

    # --- plain
    def gloo(self) -> None:
        """Buckets of 64 MiB, sent and received."""
        self._send_and_receive(GLOO_BYTES)

    def _send_and_receive(self, bucket_bytes: int) -> None:
        for bucket in packed(self.state.values(), bucket_bytes):
            flat = flat_for(bucket, fill=self.rank == 0)
            if self.rank == 0:
                dist.send(flat, SOURCES)
            elif self.rank == SOURCES:
                dist.recv(flat, 0)
                unpack(flat, bucket)

    def unix_socket(self) -> None:
        """Straight from tensors into tensors, nothing verified."""
        path = str(self.directory / "raw.sock")
        if self.rank == 0:
            if not hasattr(self, "_listener"):
                self._listener = socket.socket(socket.AF_UNIX)
                self._listener.bind(path)
                self._listener.listen()
            connection, _ = self._listener.accept()
            with connection:
                for tensor in self.state.values():
                    connection.sendall(_bytes(tensor))
        elif self.rank == SOURCES:
            with socket.socket(socket.AF_UNIX) as connection:
                _connect(connection, path)
                for tensor in self.state.values():
                    view = _bytes(tensor)
                    done = 0
                    while done < len(view):
                        done += connection.recv_into(view[done:], min(MIB, len(view) - done))

    def limit(self) -> None:
        """One copy in one process."""
        if self.rank != SOURCES:
            return
        if not hasattr(self, "_copy"):
            self._copy = [tensor.clone() for tensor in self.state.values()]
        for source, tensor in zip(self._copy, self.state.values(), strict=True):
            ctypes.memmove(tensor.data_ptr(), source.data_ptr(), tensor.nbytes)


def _nothing() -> None:
    pass


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _connect(connection: socket.socket, path: str | tuple[str, int]) -> None:
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            connection.connect(path)
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.001)


def serve(make: Callable[[int, Path, int], Replica], rank: int, directory: str, mib: int, link: Connection) -> None:
    """A replica's process."""
    torch.set_num_threads(1)
    replica = make(rank, Path(directory), mib)
    link.send("ready")
    while (way := link.recv()) is not None:
        gc.collect()
        if rank == SOURCES:
            for tensor in replica.state.values():
                tensor.zero_()
        dist.barrier()
        replica.ended_ns = 0
        started_ns = time.monotonic_ns()
        getattr(replica, way.replace("-", "_"))()
        ended_ns = replica.ended_ns or time.monotonic_ns()
        sums = [int(tensor.view(torch.int16).view(-1)[::997].long().sum()) for tensor in replica.state.values()]
        link.send(((ended_ns - started_ns) / 1e9, sum(sums)))


def measure(options: dict[str, Any], make: Callable[[int, Path, int], Replica] = Replica) -> dict[str, Any]:
    """Every way, `rounds` times in turns after one that does not count."""
    spawn = multiprocessing.get_context("spawn")
    seconds: dict[str, list[float]] = {way: [] for way in options["ways"]}
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as directory, contextlib.ExitStack() as stack:
        links = []
        for rank in range(SOURCES + 1):
            near, far = spawn.Pipe()
            process = spawn.Process(target=serve, args=(make, rank, directory, options["mib"], far), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            links.append(near)
        for link in links:
            _expect(link)
        for round_ in range(options["rounds"] + 1):
            for way in options["ways"]:
                for link in links:
                    link.send(way)
                answers = [_expect(link) for link in links]
                if way not in NOT_MOVED and answers[-1][1] != answers[0][1]:
                    raise RuntimeError(f"{way}: the state did not arrive")
                if round_:
                    seconds[way].append(answers[-1][0])
    total = sum(tensor.nbytes for tensor in dense(options["mib"]).values())
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    return {"options": options, "total_bytes": total, "seconds": seconds, "median_s": medians}


def _expect(link: Connection) -> Any:
    if not link.poll(DEADLINE_S):
        raise RuntimeError(f"no answer within {DEADLINE_S:g} s")
    return link.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description="Every way of restoring a replacement on one host")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    print(json.dumps(measure(vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
