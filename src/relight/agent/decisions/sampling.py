"""Decides when an agent looks at its processes, and when it reports them."""

from relight.core.detection.pace import SAMPLE_SECONDS
from relight.wire.messages import Pace

LOOK_SECONDS = 0.1  # between two looks at a process that was stopped, or whose stop no signal would announce
TRACE_SECONDS = 0.95  # between two reports of phases at least; they go with a sample


class SamplingSchedule:
    """Reports at the pace that the controller asks for, and at once when a process has been stopped."""

    def __init__(self) -> None:
        self._pace = Pace(sample_seconds=SAMPLE_SECONDS, trace=True)
        self._restart()

    def _restart(self) -> None:
        self._sent = self._traced = 0.0
        self._stopped = False

    @property
    def traces(self) -> bool:
        """True if the controller wants phases at all."""
        return self._pace.trace

    def set_pace(self, pace: Pace) -> None:
        """Report at this pace from now on."""
        self._pace = pace

    def begin(self) -> None:
        """Begin with a new connection: the next report is due at once."""
        self._restart()

    def is_due(self, now: float, *, any_stopped: bool) -> bool:
        """Return whether a look at the processes has to be reported."""
        changed = any_stopped or self._stopped
        self._stopped = any_stopped
        return changed or now - self._sent >= self._pause

    def note_sent(self, now: float) -> bool:
        """Note that samples were reported. True: phases have to be reported as well."""
        self._sent = now
        if now - self._traced < TRACE_SECONDS:
            return False
        self._traced = now
        return True

    def seconds_to_next_look(self, now: float, *, has_others: bool) -> float:
        """Return when to look again.

        `has_others`: processes that are no children of this agent (a predecessor started them, or they were forked of
        the template process), whose stops raise no signal here.
        """
        if self._stopped or has_others:
            return LOOK_SECONDS
        due = self._sent + self._pause
        return due - now if now < due else SAMPLE_SECONDS

    @property
    def _pause(self) -> float:
        return max(self._pace.sample_seconds, SAMPLE_SECONDS)
