"""Reports that every rank gives once in a generation go to the controller in one message for each host. Pure.

The controller can decide only once it has all of them, so a report that waits for the last one of its host delays
nothing. It waits for `HOLD_SECONDS` at most: then the last one is late, and all wait for it anyway.
Any other message of a host comes after what it has gathered, so nothing overtakes anything.
"""

from collections.abc import Collection
from typing import Generic, TypeVar

from relight.core.protocol.events import Restored, StepResumed, Stopped, TrainingDone, TrainingEntered

HOLD_SECONDS = 0.02
MAX_GATHERED = 1024  # reports in one message: well below what a frame may hold
Message = TypeVar("Message")


def subject(report: object) -> tuple[str, int] | None:
    """The kind and generation of a report that every rank gives once; None for reports that are not gathered."""
    match report:
        case Stopped() | Restored() | StepResumed() | TrainingDone():
            return type(report).__name__, report.generation
        case TrainingEntered():
            return type(report).__name__, 0
    return None


class Gathering(Generic[Message]):
    """The reports of one host that wait for each other."""

    def __init__(self) -> None:
        self._about: tuple[str, int] | None = None
        self._said: set[str] = set()  # processes that have said it, those included that do not wait any more
        self._waiting: list[Message] = []

    def copy(self) -> "Gathering[Message]":
        """Return an equal one that shares nothing that changes."""
        twin: Gathering[Message] = Gathering()
        twin._about, twin._said, twin._waiting = self._about, self._said.copy(), self._waiting.copy()
        return twin

    def __len__(self) -> int:
        return len(self._waiting)

    def joins(self, about: tuple[str, int]) -> bool:
        """Return whether a report about this may wait with those that are here; else they have to go first."""
        return not self._waiting or about == self._about

    def add(self, process: str, about: tuple[str, int], message: Message, expected: Collection[str]) -> bool:
        """Add a report. True: it was the last of those that are expected, so all may go."""
        assert self.joins(about)
        if about != self._about:
            self._about = about
            self._said.clear()
        self._said.add(process)
        self._waiting.append(message)
        return self._said.issuperset(expected) or len(self._waiting) >= MAX_GATHERED

    def take(self) -> list[Message]:
        """Take the reports out, in the order in which they were given."""
        waiting, self._waiting = self._waiting, []
        return waiting
