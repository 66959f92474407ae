"""Sources and links for the tests of restoring between hosts: processes that die, and a line that misbehaves."""

import contextlib
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.namespaces import enter
from relight.errors import RestoreError
from relight.transfer.io.codec import Flat
from relight.transfer.io.tcp import parse_endpoint
from relight.transfer.restore.client import RestoreClient
from relight.transfer.restore.fabric import Address
from relight.transfer.restore.offer import BUCKET_BYTES, Offer
from relight.transfer.restore.server import RestoreServer

PATIENCE = float(os.environ.get("RELIGHT_TEST_PATIENCE", "1"))
DEADLINE_SECONDS = 30.0 * PATIENCE
TOKEN = b"the token of this test's job...."
NOWHERE = "/nonexistent/restore.sock"  # of a source on another host: its socket is not here

State = dict[str, torch.Tensor]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.transfer.hosts"])


def nothing() -> None:
    pass


def make_state(seed: int, buckets: int = 6) -> State:
    generator = torch.Generator().manual_seed(seed)
    big = torch.randn(BUCKET_BYTES // 4 * (buckets - 1) + 5, generator=generator)
    return {"big": big, "small": torch.randn(3, generator=generator), "empty": torch.zeros(0), "scalar": torch.ones(())}


def blank(state: State) -> State:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def make_server(
    directory: Path, name: str = "source", halfway: Callable[[], None] = nothing, *, token: bytes = TOKEN
) -> RestoreServer:
    return RestoreServer(directory / f"{name}.sock", halfway, host_address="127.0.0.1", token=token)


def elsewhere(server: RestoreServer) -> Address:
    """The address as a target on another host sees it."""
    return Address(NOWHERE, server.address.endpoint)


def make_client(
    halfway: Callable[[], None] = nothing, *, timeout_seconds: float = DEADLINE_SECONDS, token: bytes = TOKEN
) -> RestoreClient:
    return RestoreClient(halfway, timeout_seconds, token)


def offer(state: State, generation: int = 2, version: int = 7) -> Offer:
    return Offer(generation, version, {"lineage": "abc"}, Flat(state))


# --- a source of its own ------------------------------------------------------------------------------------------
def _serve(
    pipe: Connection, directory: str, name: str, seed: int, buckets: int, number: int, host: str, namespace: str
) -> None:
    if namespace:
        enter(namespace)

    def halfway() -> None:
        if number:
            pipe.send("halfway")
            os.kill(os.getpid(), number)

    server = RestoreServer(Path(directory) / f"{name}.sock", halfway, host_address=host, token=TOKEN)
    server.offer(offer(make_state(seed, buckets)))
    pipe.send(server.address.endpoint)
    pipe.recv()  # until the test ends


@contextlib.contextmanager
def source_process(
    directory: Path,
    name: str,
    *,
    seed: int = 1,
    buckets: int = 6,
    strikes: int = 0,
    host: str = "127.0.0.1",
    namespace: str = "",
) -> Iterator[tuple[Address, Connection]]:
    """A source that signals itself in the middle of a transfer, if `strikes` is a signal; gone after the block.

    In the network namespace, if one is named.
    """
    near, far = _context.Pipe()
    process = _context.Process(
        target=_serve, args=(far, str(directory), name, seed, buckets, strikes, host, namespace), daemon=True
    )
    process.start()
    far.close()
    try:
        yield Address(NOWHERE, expect(near)), near
    finally:
        process.kill()
        process.join(DEADLINE_SECONDS)
        near.close()


def _fetch(pipe: Connection, endpoints: list[str], seed: int, buckets: int, namespace: str) -> None:
    enter(namespace)
    state = make_state(seed, buckets)
    own = blank(state)
    try:
        make_client().fetch(2, 7, [Address(NOWHERE, endpoint) for endpoint in endpoints], own.get)
    except RestoreError as error:
        pipe.send(str(error))
    else:
        pipe.send("the same bits" if all(torch.equal(own[name], state[name]) for name in state) else "other bits")


@contextlib.contextmanager
def target_process(namespace: str, endpoints: list[str], *, seed: int = 1, buckets: int = 6) -> Iterator[Connection]:
    """A target in a network namespace, which says what became of its restore; gone after the block."""
    near, far = _context.Pipe()
    process = _context.Process(target=_fetch, args=(far, endpoints, seed, buckets, namespace), daemon=True)
    process.start()
    far.close()
    try:
        yield near
    finally:
        process.kill()
        process.join(DEADLINE_SECONDS)
        near.close()


def expect(pipe: Connection) -> str:
    assert pipe.poll(DEADLINE_SECONDS), "no word from the process"
    return str(pipe.recv())


# --- a line between two hosts -------------------------------------------------------------------------------------
class Line:
    """A TCP connection in the middle: passes on what `carry` makes of each piece, and keeps what it saw.

    It breaks where `carry` raises OSError.
    """

    def __init__(
        self,
        endpoint: str,
        carry: Callable[[bytes, int], bytes] = lambda data, _: data,
        carry_up: Callable[[bytes, int], bytes] = lambda data, _: data,
    ) -> None:
        """`carry(data, before)` is asked for what comes from the source; `before`: bytes that came before it.

        `carry_up`: the same of what comes from each peer that connected.
        """
        self.towards_source = bytearray()
        self.towards_target = bytearray()
        self._endpoint = parse_endpoint(endpoint)
        self._carry, self._carry_up = carry, carry_up
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._run, daemon=True).start()

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._endpoint)
                self._open += [near, far]
                threading.Thread(target=self._upwards, args=(near, far), daemon=True).start()
                threading.Thread(target=self._downwards, args=(far, near), daemon=True).start()

    def _upwards(self, near: socket.socket, far: socket.socket) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while data := near.recv(2**16):
                self.towards_source += data
                far.sendall(self._carry_up(data, seen))
                seen += len(data)
        with contextlib.suppress(OSError):
            far.shutdown(socket.SHUT_RDWR)

    def _downwards(self, far: socket.socket, near: socket.socket) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while data := far.recv(2**16):
                self.towards_target += data
                near.sendall(self._carry(data, seen))
                seen += len(data)
        for end in (near, far):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
