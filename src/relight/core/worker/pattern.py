"""The place of the barrier in a step, learnt from the steps before.

The barrier may stand in front of a write if nothing follows that needs another rank or changes rank-private state: from
there on a rank can finish the step by itself. In front of an earlier write it may not, and until a pattern is learnt it
stands at the end of the block, where that always holds. All ranks count the same all-reduced numbers, so all of them
learn and forget a pattern at the same step.

A step that needs other ranks after the place that was learnt (a *surprise*) can be neither undone nor finished by a
rank alone. So a script whose steps have been seen to differ is never believed again: for the rest of the job its steps
have their barrier at the end. One rank that knows of a difference tells all others at the next barrier.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import xxhash

# In a rank's number, for sums over fewer than 2^14 ranks: what stands for its pattern, and what the rank knows.
_BITS = 20
_SEVERAL = 1 << 34  # some step made several writes
_DIFFERS = 1 << 48  # steps have differed
# Steps in a row, before a pattern counts as learnt. Where some step wrote several times, the next one may do so more
# often (lazy regularization, a critic that is trained more often): these are asked for longer.
AGREEMENTS = 2
AGREEMENTS_OF_SEVERAL = 64


@dataclass(frozen=True)
class Pattern:
    """The writes after which a step still needs other ranks, and whether another write follows these.

    The names of the later writes do not matter: the barrier stands in front of the first one of them, whichever it is.
    """

    before: tuple[str, ...] = ()
    early: bool = False
    more_expected: bool = False  # nothing can be said yet

    @property
    def is_evidence(self) -> bool:
        """True if it says where a barrier may stand; a step without a write says nothing."""
        return not self.more_expected and (self.early or bool(self.before))

    @property
    def has_several(self) -> bool:
        """True if more than one write matters."""
        return len(self.before) + self.early > 1

    def number(self) -> int:
        """Return the number that stands for this pattern in an all-reduce; never 0."""
        text = "/".join((*self.before, "early" if self.early else "end"))
        return xxhash.xxh3_64_intdigest(text.encode()) >> 64 - _BITS | 1


def observed(writes: Sequence[str], stirred: int, *, more_expected: bool = False) -> Pattern:
    """The pattern of a step that made `writes`, of which `stirred` came before its last need of other ranks.

    `more_expected`: some optimizer has made no step yet, or a name that decides steps is still empty and the code sets
    it after the last write. That may come in a later step and need other ranks (a discriminator that starts late), or
    be lost with a rank (a mask for pruning), so until then no barrier stands before the end.
    """
    return Pattern(tuple(writes[:stirred]), stirred < len(writes) and not more_expected, more_expected)


@dataclass(frozen=True)
class Learner:
    """Learns where the barrier may stand from the steps of this generation; it remembers forever that steps differ."""

    learnt: Pattern | None = None
    differs: bool = False  # steps need other ranks up to different places: nothing is learnt in this job any more
    first: Pattern | None = None  # the first pattern that this process saw with a barrier that may stand early
    has_several: bool = False  # some step made several writes
    last: Pattern | None = None
    streak: int = 0  # steps in a row that were alike on all ranks
    agreements: int = AGREEMENTS
    agreements_of_several: int = AGREEMENTS_OF_SEVERAL

    def anew(self) -> "Learner":
        """Return one that has learnt nothing, after a recovery: a replacement has seen no step."""
        return replace(self, learnt=None, last=None, streak=0)

    def stands_before(self, writes: Sequence[str]) -> bool:
        """Return whether the barrier stands in front of the next write, after `writes` were made in this step."""
        return self.learnt is not None and tuple(writes) == self.learnt.before

    def number(self, seen: Pattern) -> int:
        """Return what this rank adds to the barrier's all-reduce, in a step of the pattern `seen`."""
        differs, has_several = self.differs or self._is_other(seen), self.has_several or seen.has_several
        return seen.number() + _SEVERAL * has_several + _DIFFERS * differs

    def _is_other(self, seen: Pattern) -> bool:
        """True if a step differs from those before. A replacement may not know: so it is told in the same barrier."""
        if self.learnt is not None:
            return seen != self.learnt
        return self.first is not None and seen.is_evidence and seen != self.first

    def surprised(self, *, everywhere: bool) -> "Learner":
        """Return one that knows of a surprise.

        It forgets what it has learnt at the next barrier, together with the others; or at once, if all ranks were
        surprised (`everywhere`): by a collective that no rank can have been without.
        """
        return replace(self, differs=True, learnt=None if everywhere else self.learnt)

    def count(self, seen: Pattern, total: int, ranks: int) -> "Learner":
        """Return one that knows of a passed barrier.

        Args:
            seen: this rank's pattern.
            total: the sum of all ranks' numbers.
            ranks: how many there are.
        """
        differing, rest = divmod(total, _DIFFERS)
        several, numbers = divmod(rest, _SEVERAL)
        agreed = numbers == ranks * seen.number()
        if self.learnt is not None and agreed and not differing and seen == self.learnt:
            return self
        if self.learnt is not None or differing:
            return replace(self, differs=True, learnt=None, last=None, streak=0)
        streak = self.streak + 1 if agreed and seen == self.last else int(agreed)
        has_several = self.has_several or several > 0
        needed = self.agreements_of_several if has_several else self.agreements
        return replace(
            self,
            learnt=seen if seen.early and streak >= needed else None,
            first=self.first or (seen if seen.early else None),
            has_several=has_several,
            last=seen if agreed else None,
            streak=streak,
        )
