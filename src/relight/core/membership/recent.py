"""Counts that do not grow with the job: of what happened lately."""

from typing import TypeVar

Thing = TypeVar("Thing")
KEPT = 256


class Recent(dict[Thing, int]):
    """Counts of the newest `KEPT` different things that have happened; of any other thing, 0.

    Limits need it ("the same twice", "so often at one step"). A thing that is that many other things old was not
    repeated.
    """

    __slots__ = ()

    def __missing__(self, thing: Thing) -> int:
        return 0

    def add(self, thing: Thing) -> None:
        """Count a thing once more."""
        count = self.pop(thing, 0)
        self[thing] = count + 1  # the newest last
        if len(self) > KEPT:
            del self[next(iter(self))]

    def copy(self) -> "Recent[Thing]":
        """An equal copy."""
        twin: Recent[Thing] = Recent()
        dict.update(twin, self)
        return twin
