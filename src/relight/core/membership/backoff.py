"""Time to wait before the next attempt to bring in a replacement, once several in a row have failed. Pure.

Causes outside the job (signals, a machine short of memory, a network that is down) end by themselves sooner or later.
So a job with an intact replica does not count to three and end: it tries again, less and less often.
"""

IMMEDIATE_ATTEMPTS = 2  # failed ones in a row after which the next begins at once
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
SAID_AGAIN_AFTER = 60  # attempts, some hour


def pause_seconds(failed: int) -> float:
    """The pause before the next attempt after so many failures in a row: 0, 0, 1, 2, 4, ... 60 seconds."""
    if failed <= IMMEDIATE_ATTEMPTS:
        return 0.0
    doublings = min(failed - IMMEDIATE_ATTEMPTS - 1, 6)
    return min(FIRST_PAUSE_SECONDS * 2.0**doublings, LONGEST_PAUSE_SECONDS)


class Backoff:
    """Counts attempts that failed without a success between them."""

    def __init__(self) -> None:
        self.failed = 0
        self.until = 0.0  # no attempt begins before
        self._failed_at = 0.0
        # For people:
        self.since = 0.0  # the first of them failed
        self.last = ""  # why the last one did

    def fail(self, begun_at: float, now: float, why: str = "") -> bool:
        """An attempt that began at `begun_at` has failed. Returns whether it counts.

        It does not if another one has failed since it began: processes that are lost together are one failure.
        """
        if self.failed and begun_at < self._failed_at:
            return False
        self.since = self.since if self.failed else now
        self.failed += 1
        self.last = why
        self._failed_at = now
        self.until = now + pause_seconds(self.failed)
        return True

    def relative_to(self, now: float) -> tuple[int, float, float] | None:
        """The state that later answers depend on; times from `now` on."""
        return (self.failed, max(0.0, self.until - now), self._failed_at - now) if self.failed else None

    def succeed(self) -> None:
        """A replacement trains, or a standby has waited long: what failed before does not count any more."""
        self.failed, self.until, self._failed_at = 0, 0.0, 0.0
