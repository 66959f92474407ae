"""What a process group asks the worker about every operation."""

from typing import Protocol


class CollectivePolicy(Protocol):
    """What the process group asks about every operation; the runtime answers."""

    rank: int  # that this process holds
    closed: bool  # Stop has arrived; nothing of this generation may go on
    launches: int  # operations that the script has launched, and exchanges that it has begun to wait for

    def count_collective(self) -> None:
        """An operation is about to be launched."""

    def waited(self, nanoseconds: int) -> None:
        """Somebody waited so long for an operation."""

    def is_protected(self) -> bool:
        """Whether a failure here can be undone: inside a step, before its write."""

    def cut(self, operation: str) -> None:
        """An operation that cannot be repeated was cut short by a recovery; its result is this rank's own."""

    def unprotected(self, operation: str) -> None:
        """An operation was launched where a recovery could not repeat it."""

    def await_verdict(self) -> bool:
        """Something broke before Stop arrived: wait for it. False if none comes."""
