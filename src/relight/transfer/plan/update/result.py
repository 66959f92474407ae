"""The progress and the result of an update, as values. No torch."""

import msgspec

from relight.transfer.plan.update.way import Way

SELF = "publisher"  # the name of the source that it is itself


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """One operation as it happened: kind, bucket, buffer, member, start and end.

    A "broadcast" is a source's, a "reload" an engine's, and so is its "commit" (bucket and buffer -1): from the word
    that it holds everything until it answers with the new version. Times are of CLOCK_MONOTONIC.
    """

    kind: str
    bucket: int
    buffer: int
    member: str
    start_ns: int
    end_ns: int


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one update. `error` is empty if at least one engine has the new version."""

    version: int
    generation: int
    engines: tuple[str, ...] = ()  # that have it
    dropped: dict[str, str] = {}  # members that have not, and why
    error: str = ""
    total_bytes: int = 0
    buckets: int = 0
    bucket_bytes: int = 0  # of a full one
    started_ns: int = 0  # of CLOCK_MONOTONIC
    seconds: float = 0.0
    stages: tuple[Stage, ...] = ()
    way: Way = Way.COPIED
    why: str = ""  # this way


class UpdateProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of an update: what every remaining engine holds, and the total. It never decreases."""

    held_buckets: int = 0
    total_buckets: int = 0
    held_bytes: int = 0  # of the tensors
    total_bytes: int = 0
