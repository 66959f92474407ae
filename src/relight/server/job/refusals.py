"""Notes what the controller has refused, no more often than a person can read."""

from relight.server.job.clock import JobClock
from relight.server.network.observers import Observers
from relight.server.records.journal import Journal

REFUSALS_PER_SECOND = 5  # a hostile peer must not flood the terminal


class Refusals:
    """Tells observers and the journal about refused connections and messages."""

    def __init__(self, observers: Observers, journal: Journal, clock: JobClock) -> None:
        self._observers = observers
        self._journal = journal
        self._clock = clock
        self._recent: list[float] = []

    def note(self, text: str) -> None:
        """Note one refusal, unless there were too many within the last second."""
        now = self._clock.now()
        self._recent = [time for time in self._recent if now - time < 1.0]
        if len(self._recent) >= REFUSALS_PER_SECOND:
            return
        self._recent.append(now)
        self._observers.tell("warning", text)
        self._journal.note(now, text)
