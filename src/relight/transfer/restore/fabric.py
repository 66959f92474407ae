"""Connections for the bytes of a restore: what every kind between a source and a target can do.

There are two. On one host the source writes into buffers that the target shares with it (`shared_fabric`); between
hosts the bytes go through a TCP connection, from the source's tensors into the target's (`tcp_fabric`). What is said
beside them is the same (`offer`).
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from relight.transfer.plan.plan import Bucket
from relight.transfer.tensors.weights import TensorReader, TensorWriter

MAX_SOURCES = 4  # that one replacement is restored from at the same time
STRIPE_BYTES = 256 * 2**20  # in shared memory, less is not worth another source
NETWORK_STRIPE_BYTES = 16 * 2**20  # the same between hosts

# What a target says of a source that does not keep to the protocol.
ENDED = "the source ended in the middle of the transfer"
MISMATCH = "the source sends something else than it was asked for"


def other_digest(bucket: Bucket) -> str:
    return f"bucket {bucket.index} arrived with another digest than it was sent"


class Address(msgspec.Struct, frozen=True):
    """The address at which a source serves its state."""

    path: str  # a Unix socket, for targets on the same host
    endpoint: str = ""  # host:port, for targets on other hosts; empty: there is none


def choose_sources(
    addresses: Sequence[Address], rank: int, total_bytes: int, is_here: Callable[[Address], bool]
) -> list[Address]:
    """Those that the replacement of `rank` is restored from; another one begins with another source.

    Memory is faster than any network: sources on the replacement's own host if there are any, several if the state
    is worth it. Otherwise one on each of several other hosts: two on one host share its link.
    """
    first = rank % len(addresses)
    turned = [*addresses[first:], *addresses[:first]]
    here = [address for address in turned if is_here(address)]
    by_host: dict[str, Address] = {}
    for address in turned:
        by_host.setdefault(address.endpoint.rpartition(":")[0], address)
    chosen, stripe_bytes = (here, STRIPE_BYTES) if here else (list(by_host.values()), NETWORK_STRIPE_BYTES)
    return chosen[: min(MAX_SOURCES, max(1, total_bytes // stripe_bytes))]


class Link(Protocol):
    """A connection that carries messages. Any thread may break it off; all else belongs to one thread."""

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError if the other side is gone, or does not take anything for long."""

    def receive(self) -> Any:
        """The next message, or None at the end of the stream. Raises ProtocolError on nonsense, OSError."""

    def set_timeout(self, seconds: float | None) -> None:
        """Limit each wait for the other side; then TimeoutError (an OSError) is raised."""

    def break_off(self) -> None:
        """Make whatever waits in another thread return."""

    def close(self) -> None: ...


class SourceEnd(Link, Protocol):
    """A source's end: `prepare`, then each bucket in order, then `finish`. All raise OSError or ProtocolError."""

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Get ready to send these. Raises TransferError as well."""

    def send_bucket(self, reader: TensorReader, bucket: Bucket, known: int | None) -> int:
        """Send the next one; returns its digest. `known`: the digest, if it has been computed already."""

    def finish(self) -> None:
        """Wait until the target has everything: only then may the connection end."""


class TargetEnd(Link, Protocol):
    """A target's end: `establish` and the words before the buckets, then as in SourceEnd."""

    def establish(self, timeout_seconds: float) -> None:
        """Wait until the source is reached, and is known to be of this job. Raises OSError or ProtocolError."""

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Get ready to receive these. Raises OSError, or TransferError if there is no memory."""

    def receive_bucket(self, writer: TensorWriter, bucket: Bucket) -> int:
        """Receive the next one into its place; returns its digest.

        Raises RestoreError if the digest is another one than the source's, or the source does not go on.
        """

    def finish(self) -> None:
        """Tell the source that everything is here. Raises OSError."""
