"""When a controller or an agent that has ended is followed by another, and when it is given up."""

from collections import deque

from relight.core.backoff import pause_seconds

MAX_OWN_ENDS = 10  # within a minute: by itself, which is a defect of ours
MAX_SHORT_LIVES = 5  # in a row, from the first one on: it cannot be started here
SHORT_LIFE_SECONDS = 5.0
MINUTE_SECONDS = 60.0


class Deaths:
    """Counts the ends of the controller, or of the agent.

    One that was killed is always followed by another, after longer and longer pauses, but before its peers time out.
    """

    def __init__(self, longest_pause_seconds: float) -> None:
        self._longest_pause_seconds = longest_pause_seconds
        self._recent: deque[float] = deque()  # within the last minute
        self._own: deque[float] = deque(maxlen=MAX_OWN_ENDS)
        self._short_lives = 0
        self._has_lived = False

    def note(self, status: int, now: float, lived_seconds: float) -> None:
        """One more, with its exit status; `now` in seconds of a monotonic clock."""
        self._recent.append(now)
        self._has_lived |= lived_seconds >= SHORT_LIFE_SECONDS
        if status >= 0:
            self._own.append(now)
            self._short_lives += 1
        while now - self._recent[0] > MINUTE_SECONDS:
            self._recent.popleft()

    @property
    def why_given_up(self) -> str:
        """Empty while another one is to be started. One that was killed says nothing about the next."""
        if self._short_lives >= MAX_SHORT_LIVES and not self._has_lived:
            return f"{MAX_SHORT_LIVES} times at its start"
        if len(self._own) == MAX_OWN_ENDS and self._own[-1] - self._own[0] < MINUTE_SECONDS:
            return f"{MAX_OWN_ENDS} times within a minute"
        return ""

    @property
    def pause_seconds(self) -> float:
        """Before the next one is started."""
        return min(pause_seconds(len(self._recent)), self._longest_pause_seconds)

    @property
    def when(self) -> str:
        """In words; nothing if it is now."""
        seconds = self.pause_seconds
        return f" in {seconds:g} s: this was number {len(self._recent)} within a minute" if seconds else ""
