"""The source's side of a restore: serves the state of this process, and snapshots that it keeps.

See `client` for the messages.
"""

import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from relight.errors import ProtocolError, TransferError
from relight.transfer.io.channel import listen
from relight.transfer.io.tcp import Strangers, accept_forever, listen_on
from relight.transfer.plan.plan import Bucket
from relight.transfer.restore.fabric import Address, SourceEnd
from relight.transfer.restore.offer import Halfway, Header, Offer, Request, part_of
from relight.transfer.restore.shared_fabric import SharedSource
from relight.transfer.restore.tcp_fabric import SOURCE, TARGET, TcpSource
from relight.wire.connection.tls import Tls

HELLO_SECONDS = 30.0  # for a target to say which version it wants
_OFFER_SECONDS = 600.0


class RestoreServer:
    """Serves offers to targets. One thread per connection; `withdraw` breaks them all."""

    def __init__(
        self,
        path: Path,
        halfway: Callable[[], None],
        *,
        host_address: str = "",
        token: bytes = b"",
        tls: Tls | None = None,
    ) -> None:
        """Serve at the Unix socket `path`; other hosts too, at `host_address`, if it is given.

        `halfway` is called when half of a transfer is sent (by the first of several sources). `token` is what proves
        that a target on another host is of this job; `tls`, if there is any, is spoken with it. Raises TransferError if
        an address cannot be used.
        """
        self._halfway = halfway
        self._token = token
        self._tls = tls
        self._condition = threading.Condition()
        self._offer: Offer | None = None
        self._kept: dict[tuple[int, int], Offer] = {}  # snapshots, by rank and version
        self._serving: dict[SourceEnd, Offer] = {}
        self._newest = 0
        self._links: set[SourceEnd] = set()
        self._strangers = Strangers()
        listener = listen(path)
        listener.setblocking(True)
        accept_forever(listener, self._serve_here, "relight-source")
        endpoint = ""
        if host_address:
            tcp_listener, endpoint = listen_on(host_address)
            accept_forever(tcp_listener, self._serve_elsewhere, "relight-source-tcp")
        self.address = Address(str(path), endpoint)

    def offer(self, offer: Offer) -> None:
        """Serve this state from now on."""
        with self._condition:
            self._offer = offer
            self._condition.notify_all()

    def keep_snapshot(self, rank: int, offer: Offer) -> None:
        """Serve this snapshot of a rank's state as well, in any generation, until it is to be forgotten."""
        with self._condition:
            self._kept[rank, offer.header.version] = offer
            self._condition.notify_all()

    def drop_snapshot(self, rank: int, offer: Offer) -> None:
        """Stop serving that snapshot; it is not read any more when this returns."""
        key = (rank, offer.header.version)
        with self._condition:
            if self._kept.get(key) is offer:
                del self._kept[key]
            for link, served in self._serving.items():
                if served is offer:
                    link.break_off()
            self._condition.wait_for(lambda: all(served is not offer for served in self._serving.values()))

    def withdraw(self, generation: int) -> None:
        """Serve nothing older than `generation`; transfers under way are broken off."""
        with self._condition:
            self._newest = max(self._newest, generation)
            if self._offer is not None and self._offer.header.generation < self._newest:
                self._offer = None
            for link in self._links:
                link.break_off()
            self._condition.notify_all()

    def _serve_here(self, connection: socket.socket) -> None:
        try:
            link = SharedSource(connection)
        except (OSError, ProtocolError):
            connection.close()
            return
        self._serve(link)

    def _serve_elsewhere(self, connection: socket.socket) -> None:
        try:
            link = TcpSource(connection, self._token, self._tls)
        except ProtocolError:
            connection.close()
            return
        try:
            self._strangers.admit(link, SOURCE, TARGET)
        except (OSError, ProtocolError):
            link.close()
            return
        self._serve(link)

    def _serve(self, link: SourceEnd) -> None:
        with self._condition:
            self._links.add(link)
        try:
            link.set_timeout(HELLO_SECONDS)
            request = link.receive()
            if not isinstance(request, Request) or not 0 <= request.part < request.parts:
                return
            link.set_timeout(None)
            offer = self._await_offer(request, link)
            if offer is None:
                closed = Header(request.generation, request.version, {}, None, [], [], error="generation is closed")
                link.send(closed)
                return
            link.send(msgspec.structs.replace(offer.header, generation=request.generation))
            mine = [] if request.only_meta else part_of(offer.buckets, request.part, request.parts)
            planned = self._halfway if request.part == 0 and request.of < 0 else None
            if mine:
                _send_part(link, offer, mine, Halfway(mine, planned))
        except (OSError, ProtocolError, TransferError):
            pass  # the target sees the end of the connection, and knows why
        finally:
            with self._condition:
                self._links.discard(link)
                self._serving.pop(link, None)
                self._condition.notify_all()
            link.close()

    def _await_offer(self, request: Request, link: SourceEnd) -> Offer | None:
        def settled() -> bool:
            return self._newest > request.generation or self._matching(request) is not None

        with self._condition:
            self._condition.wait_for(settled, _OFFER_SECONDS)
            offer = self._matching(request)
            if offer is not None:
                self._serving[link] = offer
            return offer

    def _matching(self, request: Request) -> Offer | None:
        if request.of >= 0:
            return self._kept.get((request.of, request.version)) if request.generation >= self._newest else None
        offer = self._offer
        if offer is None:
            return None
        return (
            offer if (offer.header.generation, offer.header.version) == (request.generation, request.version) else None
        )


def _send_part(link: SourceEnd, offer: Offer, mine: Sequence[Bucket], halfway: Halfway) -> None:
    link.prepare(mine)
    for bucket in mine:
        halfway.pass_over(bucket)
        known = offer.digests.get(bucket.index)  # the source digests its state meanwhile, from the other end
        offer.digests[bucket.index] = link.send_bucket(offer.reader, bucket, known)
    link.finish()
