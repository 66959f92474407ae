"""Decides when a supervised process is started again after its end, and when it is given up. Pure."""

from collections import deque

from relight.core.membership.backoff import pause_seconds

MAX_OWN_ENDS = 10  # within a minute, without a kill: a defect in relight
MAX_SHORT_LIVES = 5  # in a row, from the first start on: it cannot run here
SHORT_LIFE_SECONDS = 5.0
MINUTE_SECONDS = 60.0


class RestartPolicy:
    """Counts the ends of a supervised process, and decides whether and when it is started again.

    A process that was killed is always started again, after longer and longer pauses, but before its peers time out.
    """

    def __init__(self, longest_pause_seconds: float) -> None:
        self._longest_pause_seconds = longest_pause_seconds
        self._recent: deque[float] = deque()  # within the last minute
        self._own: deque[float] = deque(maxlen=MAX_OWN_ENDS)
        self._short_lives = 0
        self._has_lived = False

    def note(self, status: int, now: float, lived_seconds: float) -> None:
        """Count one end with its exit status; `now` in seconds of a monotonic clock."""
        self._recent.append(now)
        self._has_lived |= lived_seconds >= SHORT_LIFE_SECONDS
        if status >= 0:
            self._own.append(now)
            self._short_lives += 1
        while now - self._recent[0] > MINUTE_SECONDS:
            self._recent.popleft()

    @property
    def why_given_up(self) -> str:
        """The reason to give up, empty while the process is to be started again. A kill is no reason."""
        if self._short_lives >= MAX_SHORT_LIVES and not self._has_lived:
            return f"{MAX_SHORT_LIVES} times at its start"
        if len(self._own) == MAX_OWN_ENDS and self._own[-1] - self._own[0] < MINUTE_SECONDS:
            return f"{MAX_OWN_ENDS} times within a minute"
        return ""

    @property
    def pause_seconds(self) -> float:
        """The time to wait before the next start."""
        return min(pause_seconds(len(self._recent)), self._longest_pause_seconds)

    @property
    def when(self) -> str:
        """The time of the next start in words, empty if it is now."""
        seconds = self.pause_seconds
        return f" in {seconds:g} s: this was number {len(self._recent)} within a minute" if seconds else ""
