"""What the publisher tells about an update: how far it is, and what became of it. Values, without torch."""

import msgspec

SELF = "publisher"  # the name of the source that it is itself


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """One operation as it happened: what, which bucket, in which buffer, by whom, from when to when.

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
    """What became of one update. `error` is empty if at least one engine has the new version."""

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


class UpdateProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far an update is: what every remaining engine holds, and of how much. It never goes back."""

    held_buckets: int = 0
    total_buckets: int = 0
    held_bytes: int = 0  # of the tensors
    total_bytes: int = 0
