"""One network copy of an update for a whole host, however many engines it has.

To the publisher's host (`publish_bridge`) a relay is one engine; to the engines on its own host, a publisher. Each
bucket comes over the network once, into one of the relay's two buffers, and every engine here takes it from there; no
copy of the weights is made. The engines take the version when the publisher orders it: all or nothing, as with a
publisher of their own. No torch.

When an engine comes later, or again, the relay reports that it is behind, as an engine without weights;
then that one gets the current version if the publisher holds it, and otherwise the next one.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from relight.errors import ProtocolError, TransferError, UsageError
from relight.transfer.io import messages as msg
from relight.transfer.io.tcp import TcpChannel, begin_connecting, discard, parse_endpoint
from relight.transfer.plan.manifest import Manifest
from relight.transfer.plan.plan import Bucket, bucket_bytes_for
from relight.transfer.publish.handle import Handle
from relight.transfer.publish.publisher import Publisher
from relight.transfer.relay.publish_bridge import BRIDGE, RELAY, ForwardedBucket, FromBridge
from relight.wire.connection.tls import Tls

RETRY_SECONDS = 0.2
ENGINE_STALL_SECONDS = 4.0  # less than a publisher's own patience: one engine must not cost all of them the version
COMMIT_TIMEOUT_SECONDS = 100.0
SOURCE_TIMEOUT_SECONDS = 86_400.0  # how long a bucket may be on its way is decided over there
_LOOK_SECONDS = 0.1  # between two looks at who has come
_CANCEL_SECONDS = 1.0
_CHUNK_BYTES = 2**18  # received and digested at a time


class Relay:
    """Brings the weights that are published on another host to the engines at `place`. `run` works until `stop`."""

    def __init__(
        self,
        endpoint: str,
        place: str | Path,
        *,
        token: bytes,
        tls: Tls | None = None,
        server_name: str = "",
        name: str | None = None,
        engine_stall_seconds: float = ENGINE_STALL_SECONDS,
        commit_timeout_seconds: float = COMMIT_TIMEOUT_SECONDS,
        on_notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`endpoint`: address of the gate; `token`: the secret that it shares; `name`: of this relay, for people.

        With `tls` the gate must have a certificate for `server_name` (default: the endpoint's address).
        """
        self._endpoint = endpoint
        self._place = place
        self._token = token
        self._tls = tls
        self._server_name = server_name
        self._name = name or f"relay-{socket.gethostname()}-{os.getpid()}"
        self._engine_stall = engine_stall_seconds
        self._commit_timeout = commit_timeout_seconds
        self._on_notice = on_notice
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._channel: TcpChannel | None = None
        self._publisher: Publisher | None = None  # of this host
        self._buffer_bytes = 0
        self._passing: _Passing | None = None
        self._current = (0, -1)  # generation and version that the engines here were brought to last
        self._known: set[tuple[str, int]] = set()  # engines that the publisher's answer already was for
        self._last_notice = ""

    def run(self) -> None:
        """Work until `stop`. Raises TransferError if the place is taken or cannot be used."""
        try:
            while not self._stopped.is_set():
                try:
                    self._converse()
                except _PlaceError as error:
                    raise TransferError(str(error)) from error
                except (OSError, ProtocolError, TransferError) as error:
                    self._notify(f"no connection to {self._endpoint}: {error}")
                self._stopped.wait(RETRY_SECONDS)
        finally:
            if self._publisher is not None:
                self._publisher.close()

    def stop(self) -> None:
        """Make `run` return, from another thread. Engines keep what they have."""
        self._stopped.set()
        with self._lock:
            if self._channel is not None:
                self._channel.break_off()

    def _notify(self, what: str) -> None:
        if what != self._last_notice:
            self._last_notice = what
            self._on_notice(what)

    # --- one conversation with the publisher --------------------------------------------------------------------
    def _converse(self) -> None:
        host, _ = parse_endpoint(self._endpoint)
        channel = TcpChannel(
            begin_connecting(self._endpoint),
            self._token,
            FromBridge,
            tls=self._tls,
            server_name=self._server_name or host,
        )
        with self._lock:
            self._channel = channel
        try:
            channel.introduce(RELAY, BRIDGE)
            with contextlib.suppress(ConnectionError):  # as a bridge's end looks that had not read everything
                channel.send(self._hello())
                while self._await_message(channel):
                    message = channel.receive()
                    if message is None:
                        break
                    self._hear(channel, message)
            if not self._stopped.is_set():
                self._notify(f"the publisher at {self._endpoint} is gone, or not there yet")
        finally:
            with self._lock:
                self._channel = None
            channel.break_off()  # a bucket that is being read
            self._break_off("the connection to the publisher's host ended")
            channel.close()

    def _hello(self) -> msg.EngineHello:
        engines = () if self._publisher is None else self._publisher.engines()
        self._known = {(engine.name, engine.pid) for engine in engines}
        complete = all((engine.generation, engine.version) == self._current for engine in engines)
        generation, version = self._current if engines and complete else (0, -1)
        return msg.EngineHello(
            protocol_version=msg.PROTOCOL_VERSION,
            name=self._name,
            pid=os.getpid(),
            version=version,
            generation=generation,
        )

    def _await_message(self, channel: TcpChannel) -> bool:
        """Wait for a message, and look after the engines. Returns False when it is time to stop.

        Raises TimeoutError for a publisher that is silent in the middle of an update.
        """
        passing = self._passing
        patience = passing.begin.patience_seconds if passing is not None else 0.0
        ends = time.monotonic() + patience
        while not channel.is_readable(_LOOK_SECONDS):
            if self._stopped.is_set():
                return False
            passing = self._passing
            if passing is None:
                if self._has_newcomer():
                    channel.send(msg.Behind())
            elif passing.handle.over:
                self._refuse(channel, passing)
            elif patience and time.monotonic() > ends:
                raise TimeoutError(f"the publisher says nothing for {patience:g} s in the middle of an update")
        return True

    def _has_newcomer(self) -> bool:
        engines = () if self._publisher is None else self._publisher.engines()
        behind = {(e.name, e.pid) for e in engines if e.version < 0 or (e.generation, e.version) != self._current}
        newcomers = behind - self._known
        self._known = {(e.name, e.pid) for e in engines}  # one that comes back after it was dropped is new
        return bool(newcomers)

    def _hear(self, channel: TcpChannel, message: Any) -> None:
        match message:
            case msg.Welcome():
                self._open_place(message.buffer_bytes)
            case msg.Begin():
                self._begin(channel, message)
            case ForwardedBucket():
                self._pass_on(channel, message)
            case msg.CommitUpdate():
                self._commit(channel, message)
            case msg.AbandonUpdate():
                if self._passing is not None and self._passing.begin.update == message.update:
                    self._break_off(message.why)
            case msg.Dismissed():
                self._notify(f"dismissed by the publisher: {message.why}")

    def _open_place(self, buffer_bytes: int) -> None:
        """Publish here with buffers as large as the remote publisher's; keep the present ones if they are."""
        if self._publisher is not None:
            if buffer_bytes == self._buffer_bytes:
                return
            self._publisher.close()
        try:
            self._publisher = Publisher(
                self._place,
                bucket_bytes=buffer_bytes,
                stall_timeout_seconds=self._engine_stall,
                source_timeout_seconds=SOURCE_TIMEOUT_SECONDS,
                commit_timeout_seconds=self._commit_timeout,
                on_notice=self._notify,
            )
        except (TransferError, UsageError) as error:
            raise _PlaceError(str(error)) from error
        self._buffer_bytes = buffer_bytes

    # --- an update ----------------------------------------------------------------------------------------------
    def _begin(self, channel: TcpChannel, begin: msg.Begin) -> None:
        self._break_off("another update began")
        publisher = self._publisher
        why = ""
        if publisher is None:
            raise ProtocolError("an update began before buffers were agreed on")
        new = (begin.generation, begin.version)
        engines = [engine.name for engine in publisher.engines() if (engine.generation, engine.version) != new]
        if not engines:
            why = f"no engine at {self._place} needs it" if publisher.engines() else f"no engine is at {self._place}"
        elif begin.bucket_bytes != bucket_bytes_for(begin.manifest.total_bytes, self._buffer_bytes):
            why = "its buckets are cut in another way: install the same relight on both hosts"
        else:
            stream = _Stream(channel, begin)
            try:
                handle = publisher.begin(
                    stream, version=begin.version, generation=begin.generation, confirmed=False, only=engines
                )
            except (TransferError, UsageError) as error:
                why = str(error)
            else:
                self._passing = _Passing(begin, stream, handle)
                channel.set_timeout(begin.patience_seconds or None)  # also in the middle of a bucket
                channel.send(msg.Ready(update=begin.update))
                return
        channel.send(msg.Refuse(update=begin.update, why=why))

    def _pass_on(self, channel: TcpChannel, forwarded: ForwardedBucket) -> None:
        passing = self._passing
        if passing is None or passing.begin.update != forwarded.load.update:
            discard(channel, forwarded.nbytes)  # of an update that was given up here
        elif not passing.stream.offer(forwarded, lambda: passing.handle.over or self._stopped.is_set()):
            discard(channel, forwarded.nbytes)
            self._refuse(channel, passing)

    def _commit(self, channel: TcpChannel, order: msg.CommitUpdate) -> None:
        passing = self._passing
        if passing is None or passing.begin.update != order.update:
            return
        self._passing = None
        passing.handle.confirm()
        while (result := passing.handle.wait(_LOOK_SECONDS)) is None:
            if self._stopped.is_set():
                return
        if result.error:
            channel.send(msg.Refuse(update=order.update, why=result.error))
            return
        self._current = (passing.begin.generation, passing.begin.version)
        self._known.clear()  # an engine that is still behind was dropped meanwhile, and is asked for once more
        channel.send(msg.Committed(update=order.update, version=passing.begin.version))

    def _refuse(self, channel: TcpChannel, passing: "_Passing") -> None:
        """The engines here do not take it after all."""
        self._passing = None
        passing.stream.close("the update is over")
        result = passing.handle.wait(_CANCEL_SECONDS)
        why = "it was broken off here" if result is None else result.error
        channel.send(msg.Refuse(update=passing.begin.update, why=why))

    def _break_off(self, why: str) -> None:
        """The update ends without effect: every engine here keeps the version it has."""
        passing, self._passing = self._passing, None
        if passing is None:
            return
        passing.stream.close(why)
        passing.handle.abandon(why)
        passing.handle.wait(_CANCEL_SECONDS)


@dataclass(frozen=True)
class _Passing:
    """An update on its way through this host."""

    begin: msg.Begin
    stream: "_Stream"
    handle: Handle


class _PlaceError(TransferError):
    """The place on this host cannot be used: trying again does not help."""


class _Stream:
    """A source whose buckets come over the network, each once, in their order.

    Two threads share the connection: the relay's reads the messages; when one announces a bucket, the publisher's
    writer reads its bytes into the buffer that is free, and the relay's waits meanwhile.
    """

    def __init__(self, channel: TcpChannel, begin: msg.Begin) -> None:
        self.manifest: Manifest = begin.manifest
        self._channel = channel
        self._update = begin.update
        self._condition = threading.Condition()
        self._announced: ForwardedBucket | None = None
        self._reading = False
        self._closed = ""

    def offer(self, forwarded: ForwardedBucket, is_over: Callable[[], bool]) -> bool:
        """A bucket's bytes come next. Returns True once they were read, False if they will not be read."""
        with self._condition:
            self._announced = forwarded
            self._condition.notify_all()
            while self._announced is not None:
                if is_over() and not self._reading:
                    self._announced = None
                    return False
                self._condition.wait(_LOOK_SECONDS)
            return True

    def close(self, why: str) -> None:
        """End the stream; return when nothing is read any more. The connection must have been broken off."""
        with self._condition:
            self._closed = why
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._reading)

    def settle(self) -> None:
        """A bucket comes when it is whole."""

    def fill(self, bucket: Bucket, view: memoryview) -> int:
        """Fill the bucket, on the publisher's writer thread. Raises TransferError if it does not come (again)."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._announced is not None or self._closed)
                forwarded = self._announced
                if forwarded is None:
                    raise TransferError(self._closed)
                if forwarded.load.bucket != bucket.index or forwarded.nbytes != bucket.nbytes:
                    raise TransferError(f"bucket {bucket.index} is over: a relay keeps none, to write it again")
                self._reading = True
            started_ns = time.monotonic_ns()
            try:
                digest = self._receive(view[: bucket.nbytes])
            except OSError as error:
                self._channel.break_off()  # in the middle of a bucket there is no next message
                raise TransferError(f"the connection to the publisher's host failed: {error}") from error
            finally:
                with self._condition:
                    self._announced, self._reading = None, False
                    self._condition.notify_all()
            intact = digest == forwarded.load.digest
            seconds = (time.monotonic_ns() - started_ns) / 1e9
            with contextlib.suppress(OSError):  # the relay's thread notices too
                self._channel.send(
                    msg.BucketLoaded(update=self._update, bucket=bucket.index, intact=intact, seconds=seconds)
                )
            if intact:
                return digest

    def _receive(self, view: memoryview) -> int:
        """Returns the digest, taken of each chunk while it is in the core's cache."""
        digest = xxhash.xxh3_64()
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            if not self._channel.receive_bytes([chunk]):
                raise ConnectionResetError("it ended in the middle of a bucket")
            digest.update(chunk)
        return digest.intdigest()
