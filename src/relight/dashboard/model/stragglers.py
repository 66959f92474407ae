"""Ranks that are slower than the others, by what their rows say. Pure."""

from collections.abc import Mapping

from relight.dashboard.model.row import Row

LISTED = 8
FACTOR = 1.25  # a straggler's forward takes so many times the median
MIN_SECONDS = 0.005


def find_stragglers(rows: Mapping[int, Row]) -> list[tuple[int, float, float]]:
    """Return ranks whose forward takes longer than the others': rank, its seconds, seconds of the median rank.

    Judged by the forward: in backward every rank waits for the slowest, so that all look alike.
    """
    times = sorted((row.forward_seconds, rank) for rank, row in rows.items() if row.forward_seconds > 0)
    if len(times) < 2:
        return []
    median = times[(len(times) - 1) // 2][0]
    slow = [
        (rank, seconds, median)
        for seconds, rank in reversed(times)
        if seconds > FACTOR * median and seconds - median > MIN_SECONDS
    ]
    return slow[:LISTED]
