"""Updates as they might have been measured, made up in whole seconds."""

from collections.abc import Iterable

from relight.transfer.plan.plan import Bucket, Piece
from relight.transfer.plan.update.result import SELF, Published, Stage

BUCKET_BYTES = 64
ORIGIN_NS = 5_000_000_000  # of the update: the clock did not begin with it


def write(bucket: int, start: float, end: float, source: str = SELF) -> Stage:
    return Stage("broadcast", bucket, bucket % 2, source, at(start), at(end))


def reload(bucket: int, start: float, end: float, engine: str = "a") -> Stage:
    return Stage("reload", bucket, bucket % 2, engine, at(start), at(end))


def commit(start: float, end: float, engine: str = "a") -> Stage:
    return Stage("commit", -1, -1, engine, at(start), at(end))


def at(seconds: float) -> int:
    return ORIGIN_NS + round(seconds * 1e9)


def buckets_of(count: int, last_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    sizes = [BUCKET_BYTES] * (count - 1) + [last_bytes] * bool(count)
    return tuple(Bucket(index, nbytes, (Piece(0, 0, 0, nbytes),)) for index, nbytes in enumerate(sizes))


def published(
    stages: Iterable[Stage],
    *,
    buckets: int,
    seconds: float,
    engines: tuple[str, ...] = ("a",),
    dropped: dict[str, str] | None = None,
    error: str = "",
) -> Published:
    return Published(
        version=7,
        generation=0,
        engines=engines,
        dropped=dropped or {},
        error=error,
        total_bytes=buckets * BUCKET_BYTES,
        buckets=buckets,
        bucket_bytes=BUCKET_BYTES,
        started_ns=ORIGIN_NS,
        seconds=seconds,
        stages=tuple(stages),
    )


NOTHING = published((), buckets=3, seconds=2.0, engines=(), error="there is no engine")
ONE = published([write(0, 1, 3), reload(0, 4, 8), commit(8, 9)], buckets=1, seconds=10.0)
# Two sources, two engines, two-stage: each write but the first beside a reload. The slower engine sets the pace.
USUAL = published(
    [
        *(write(0, 1, 2), reload(0, 2, 3, "a"), reload(0, 2, 4, "b")),
        *(write(1, 2, 3, "other"), reload(1, 4, 5, "a"), reload(1, 4, 6, "b")),
        *(write(2, 4, 5), reload(2, 6, 7, "a"), reload(2, 6, 8, "b")),
        *(commit(8, 9, "a"), commit(8, 8.5, "b")),
    ],
    buckets=3,
    seconds=10.0,
    engines=("a", "b"),
)
# The second bucket arrives damaged at b, again, is written again, and then is right.
DAMAGED = published(
    [
        *(write(0, 0, 1), reload(0, 1, 2, "a"), reload(0, 1, 2, "b")),
        *(write(1, 1, 2), reload(1, 2, 3, "a"), reload(1, 2, 3, "b"), reload(1, 3, 4, "b")),
        *(write(1, 5, 6), reload(1, 6, 7, "b")),
        *(commit(7, 8, "a"), commit(7, 8, "b")),
    ],
    buckets=2,
    seconds=8.0,
    engines=("a", "b"),
)
# b takes the first bucket and is never heard of again.
STALL = 30
DROPPED = published(
    [
        *(write(0, 0, 1), reload(0, 1, 2, "a"), reload(0, 1, 2, "b")),
        *(write(1, 1, 2), reload(1, 2, 3, "a")),
        *(write(2, 2 + STALL, 3 + STALL), reload(2, 3 + STALL, 4 + STALL, "a")),
        commit(4 + STALL, 4 + STALL),
    ],
    buckets=3,
    seconds=34.0,
    dropped={"b": "no answer for 30 s"},
)
# The only source is lost while it writes the third bucket: no engine reads the second one any more.
ABANDONED = published(
    [write(0, 0, 1), reload(0, 1, 3), write(1, 1, 2)],
    buckets=3,
    seconds=4.0,
    engines=(),
    dropped={"publisher": "OSError: gone"},
    error="no source is left (publisher: OSError: gone)",
)
ALL = {
    "nothing": NOTHING,
    "one": ONE,
    "usual": USUAL,
    "damaged": DAMAGED,
    "dropped": DROPPED,
    "abandoned": ABANDONED,
}
