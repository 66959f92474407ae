"""Questions of a process group about every operation, for the worker to answer."""

from collections.abc import Sequence
from typing import Any, Protocol


class Cuttable(Protocol):
    """A collective under way, for whose end the script may wait."""

    def call_again(self) -> None:
        """Call it once more, on the groups of a new generation: the script waits for that one now."""


class CodeBetween(Protocol):
    """Code between two epochs, where ranks can wait in a collective for a replacement."""

    @property
    def may_wait(self) -> bool:
        """True if the collective that is called next, or was called last, is one in which this rank can wait."""

    def come(self, operation: str, arguments: Sequence[Any], ranks: int) -> bool:
        """The script calls a collective that a recovery cannot repeat, of so many ranks.

        Return True if this gave it its result, so that it is not launched.
        """

    def launched(self, work: Cuttable) -> None:
        """The collective that came last is under way."""

    def complete(self, work: Cuttable) -> None:
        """A collective is over, and its result has not been changed yet."""

    def took_future(self) -> None:
        """The script has taken a collective's future, and may learn of its end from that instead of waiting for it."""

    def meet(self) -> bool:
        """Recover inside a collective that was cut, and call again those under way. False: go on alone.

        A collective that was not launched is not called: its caller does that.
        """


class NoCodeBetween:
    """No code in which a rank can wait."""

    may_wait = False

    def come(self, operation: str, arguments: Sequence[Any], ranks: int) -> bool:  # noqa: ARG002
        return False

    def launched(self, work: Cuttable) -> None:
        """Do nothing."""

    def complete(self, work: Cuttable) -> None:
        """Do nothing."""

    def took_future(self) -> None:
        """Do nothing."""

    def meet(self) -> bool:
        return False


class CollectivePolicy(Protocol):
    """The worker, as its process groups see it."""

    code_between: CodeBetween

    launches: int  # operations launched by the script, and exchanges that it has begun to wait for
    launches_of_all: int  # of these, the ones in which every rank takes part

    after_recovery: bool  # code between two steps runs that a replacement does not run

    @property
    def rank(self) -> int:
        """The rank that this process holds."""

    @property
    def closed(self) -> bool:
        """True if Stop has arrived: nothing of this generation may continue."""

    def count_collective(self) -> None:
        """An operation is about to be launched."""

    def waited(self, nanoseconds: int) -> None:
        """A wait for an operation took so long."""

    def is_protected(self) -> bool:
        """Return whether a failure here can be undone: inside a step, before its write."""

    def cut(self, operation: str) -> None:
        """An operation that cannot be repeated was cut short by a recovery; its result is this rank's own."""

    def unprotected(self, operation: str) -> None:
        """An operation was launched where a recovery could not repeat it."""

    def await_verdict(self) -> bool:
        """Wait for Stop, after an operation broke before it arrived. Returns False if it does not arrive."""
