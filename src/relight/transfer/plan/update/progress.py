"""The progress of an update, in words: bytes, rate, time left. Pure."""

from collections.abc import Iterable

from relight.transfer.plan.manifest import describe_bytes
from relight.wire.status import PublishStatus, RestoreStatus


def describe_restores(statuses: Iterable[RestoreStatus]) -> str:
    """ "restoring rank 2: 512.0 MiB of 2.0 GiB (800.0 MiB/s, 2 s left)"; empty if no copy is under way."""
    under_way = sorted((s for s in statuses if s.copied_bytes < s.total_bytes), key=lambda s: s.rank)
    return "; ".join(
        f"restoring rank {one.rank}: {_moved(one.copied_bytes, one.total_bytes, one.seconds)}" for one in under_way
    )


def describe_publishing(status: PublishStatus | None) -> str:
    """ "publishing version 50: 512.0 MiB of 2.0 GiB (800.0 MiB/s, 2 s left)"; empty if no update is under way."""
    if status is None or not status.total_bytes:
        return ""
    return f"publishing version {status.version}: " + _moved(
        status.moved_bytes, status.total_bytes, status.update_seconds
    )


def _moved(done_bytes: int, total_bytes: int, seconds: float) -> str:
    words = f"{describe_bytes(done_bytes)} of {describe_bytes(total_bytes)}"
    if seconds <= 0 or done_bytes <= 0:
        return words
    rate = done_bytes / seconds
    return f"{words} ({describe_bytes(rate)}/s, {(total_bytes - done_bytes) / rate:.0f} s left)"
