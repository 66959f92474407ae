"""Bits that are wrong for a known reason: followed from rank to rank, as far as they may get."""

from copy import copy

from relight.sim.model.contents import Reference, Violation
from relight.sim.model.shapes import Pattern


class WrongBits:
    """Flipped bits, and private states that ranks left inside a surprise: these, and all that is computed from them."""

    def __init__(self, right: Reference, pattern: Pattern) -> None:
        self._right = right
        self._pattern = pattern
        self.flipped: frozenset[int] = frozenset()
        self.own: frozenset[int] = frozenset()  # after a collective between two steps that was cut
        self._early: frozenset[int] = frozenset()  # private states of before a surprise
        self.doubted = False  # some rank has said that the bits may not be those of an undisturbed run

    def copy(self) -> "WrongBits":
        """Return a copy that can take another course."""
        return copy(self)

    def flip(self, content: int) -> None:
        """Note that a bit has flipped, which made this content."""
        self.flipped |= {content}

    def goes_alone(self, content: int) -> None:
        """Note what code between two steps has made with a rank's own value of a collective."""
        self.own |= {content}

    def follows(self, made: int, *of: int) -> None:
        """One content is computed from others: wrong, if one of these is."""
        if self.flipped and not self.flipped.isdisjoint(of):
            self.flipped |= {made}
        if self.own and not self.own.isdisjoint(of):
            self.own |= {made}
        if self._early and not self._early.isdisjoint(of):
            self._early |= {made}

    def takes_private(self, rank: int, version: int, private: int) -> None:
        """Note a private state that a rank left inside a surprise: the bits have to be doubted for it."""
        is_early = private == self._right.early_privates[version][rank] != self._right.privates[version][rank]
        if is_early and self._pattern.is_surprise(version - 1):
            self._early |= {private}

    def doubts(self, rank: int, *, is_disturbed: bool) -> None:
        """I20: a rank doubts the bits."""
        can_be = self._pattern.has_surprises or self._pattern.shares
        if not can_be or not is_disturbed:
            raise Violation(f"I20: rank {rank} doubts the bits, though no surprise was disturbed")
        self.doubted = True

    # --- judgement ----------------------------------------------------------------------------------------------
    def is_known(self, content: int) -> bool:
        """Return whether a content is wrong for a known reason."""
        return content in self.flipped or content in self._early or content in self.own

    def check_private(self, rank: int, version: int, private: int, what: str) -> None:
        """I3, and I20 of a private state that was left inside a surprise."""
        if private == self._right.privates[version][rank]:
            return
        if private not in self._early:
            raise Violation(f"I3: rank {rank} {what} a wrong private state of {version}")
        if not self.doubted:
            raise Violation(f"I20: rank {rank} {what} a private state of before a surprise, which no rank doubts")
