"""The job's clock: seconds since the job's start, continued by each successor of a controller."""

import time


class JobClock:
    """Counts from the moment at which the first agent joined."""

    def __init__(self, now: float = 0.0, started_wall: float | None = None) -> None:
        """`now`: what the clock shows at this moment. `started_wall`: the time of day at which it showed 0."""
        self._started = time.monotonic() - now
        self.started_wall = time.time() - now if started_wall is None else started_wall

    def now(self) -> float:
        """Return the seconds since the job's start."""
        return time.monotonic() - self._started

    def restart(self) -> None:
        """Start the job at this moment."""
        self._started, self.started_wall = time.monotonic(), time.time()
