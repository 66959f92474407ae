"""The publisher's side of publishing to other hosts: each relay over there is an ordinary engine here.

For each relay that connects, the bridge opens a connection to the publisher on this host and forwards the messages of
both. Only buckets are different: the relay shares no buffers, so their bytes follow over TCP, straight from the
publisher's buffer, which stays as it is until the relay has answered. No torch.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from relight.errors import ProtocolError, TransferError
from relight.transfer.io import messages as msg
from relight.transfer.io.buffers import Buffer, close_buffers, open_buffers
from relight.transfer.io.channel import Channel, connect, socket_path
from relight.transfer.io.tcp import Strangers, TcpChannel, accept_forever, listen_on
from relight.transfer.plan.plan import Bucket, plan_buckets
from relight.wire.connection.tls import Tls

BRIDGE, RELAY = "publish-bridge", "relay"
REPEAT_SECONDS = 60.0


class ForwardedBucket(msgspec.Struct, frozen=True, tag=True):
    """LoadBucket to an engine that shares no buffers: the bucket's bytes come right after it."""

    load: msg.LoadBucket
    nbytes: int


FromRelay = msg.EngineHello | msg.Behind | msg.Ready | msg.Refuse | msg.BucketLoaded | msg.Committed
FromBridge = msg.Welcome | msg.Begin | ForwardedBucket | msg.CommitUpdate | msg.AbandonUpdate | msg.Dismissed


class PublishBridge:
    """Lets relays on other hosts take part in the updates published at `place`, until `close`."""

    roles = BRIDGE, RELAY  # of this side, of the other
    types: Any = FromRelay  # messages that the other side may send

    def __init__(
        self,
        place: str | Path,
        host: str,
        port: int = 0,
        *,
        token: bytes,
        tls: Tls | None = None,
        on_notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Listen at `host` (an IP address of this machine). Raises TransferError if that cannot be.

        With `tls` relays must have a certificate of its authority.
        """
        if not token:
            raise TransferError("a gate needs a token that its relays know too")
        self._place = Path(place)  # which need not exist yet
        self._token = token
        self._tls = tls
        self._on_notice = on_notice
        self._strangers = Strangers()
        self._lock = threading.Lock()
        self._open: set[TcpChannel] = set()
        self._closed = False
        self._refused = "", 0.0  # the last sentence about a connection that was refused, and when it was said
        self._listener, self.endpoint = listen_on(host, port)
        accept_forever(self._listener, self._admit, "relight-bridge")

    def close(self) -> None:
        """Close the connections of all relays; they connect again when there is a bridge again."""
        with self._lock:
            self._closed = True
            for channel in self._open:
                channel.break_off()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def __enter__(self) -> "PublishBridge":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _admit(self, connection: socket.socket) -> None:
        other = TcpChannel(connection, self._token, self.types, tls=self._tls)
        try:
            self._strangers.admit(other, *self.roles)
        except (OSError, ProtocolError) as error:
            other.close()
            self._refuse(f"refused a connection: {error}")
            return
        with self._lock:
            self._open.add(other)
            if self._closed:
                other.break_off()
        try:
            publisher = Channel(connect(socket_path(self._place)), msg.FromPublisher)
        except (OSError, ProtocolError, TransferError):
            pass  # there is no publisher here now: the relay asks again
        else:
            self._pass_on(publisher, other)
        finally:
            with self._lock:
                self._open.discard(other)
            other.close()

    def _refuse(self, what: str) -> None:
        """Report a refused connection: it comes again five times a second, so the same sentence once a minute."""
        now = time.monotonic()
        with self._lock:
            last, said_at = self._refused
            if what == last and now - said_at < REPEAT_SECONDS:
                return
            self._refused = what, now
        self._on_notice(what)

    def _pass_on(self, publisher: Channel, relay: TcpChannel) -> None:
        upwards = threading.Thread(target=_carry_up, args=(relay, publisher), name="relight-bridge-up", daemon=True)
        upwards.start()
        try:
            _carry_down(publisher, relay)
        except (OSError, ProtocolError, TransferError) as error:
            self._on_notice(f"lost a relay: {error}")
        finally:
            relay.break_off()
            publisher.break_off()
            upwards.join()
            publisher.close()


def _carry_up(relay: TcpChannel, publisher: Channel) -> None:
    """Ends with either connection."""
    with contextlib.suppress(OSError, ProtocolError):
        while (message := relay.receive()) is not None:
            publisher.send(message)
    publisher.break_off()


def _carry_down(publisher: Channel, relay: TcpChannel) -> None:
    buffers: tuple[Buffer, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    try:
        while (message := publisher.receive()) is not None:
            match message:
                case msg.LoadBucket():
                    nbytes = buckets[message.bucket].nbytes
                    relay.send(ForwardedBucket(message, nbytes))
                    relay.send_bytes([buffers[message.buffer].view[:nbytes]])
                    continue
                case msg.Welcome():
                    descriptors, publisher.descriptors = publisher.descriptors, []
                    buffers = open_buffers(descriptors, message.buffer_bytes)
                case msg.Begin():
                    buckets = plan_buckets(message.manifest, message.bucket_bytes)
            relay.send(message)
    finally:
        close_buffers(buffers)
