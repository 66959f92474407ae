"""Where in a step the barrier may stand, learnt from the steps before. Pure.

The barrier may stand in front of a write if nothing follows that needs another rank or changes rank-private state: from
there on a rank can finish the step by itself. In front of an earlier write it may not, and until a pattern is learnt it
stands at the end of the block, where that always holds. All ranks count the same all-reduced numbers, so all of them
learn and forget a pattern at the same step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

_BITS = 44  # of a number that stands for a pattern: the sum over thousands of ranks stays in 63 bits
_AGREEMENTS = 2  # of steps in a row, before a pattern counts as learnt
_MORE_AGREEMENTS = 4  # times as many after each time that a learnt pattern did not hold
_MOST_AGREEMENTS = 2**20


@dataclass(frozen=True)
class Pattern:
    """The writes after which a step still needs other ranks, and whether another write follows these.

    The names of the later writes do not matter: the barrier stands in front of the first one of them, whichever it is.
    """

    before: tuple[str, ...] = ()
    early: bool = False

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
    return Pattern(tuple(writes[:stirred]), early=stirred < len(writes) and not more_expected)


class Learner:
    """Learns where the barrier may stand from the steps of this generation."""

    def __init__(self) -> None:
        self.learnt: Pattern | None = None
        self._last: Pattern | None = None
        self._streak = 0
        self._needed = _AGREEMENTS

    def reset(self) -> None:
        """Forget everything, after a recovery: a replacement has seen no step."""
        self.learnt, self._last, self._streak, self._needed = None, None, 0, _AGREEMENTS

    def stands_before(self, writes: Sequence[str]) -> bool:
        """Whether the barrier stands in front of the next write, after `writes` were made in this step."""
        return self.learnt is not None and tuple(writes) == self.learnt.before

    def count(self, seen: Pattern, total: int, ranks: int) -> None:
        """Take a passed barrier: `seen` is this rank's pattern, `total` the sum of all ranks' numbers."""
        agreed = total == ranks * seen.number()
        if self.learnt is not None:
            if not agreed or seen != self.learnt:
                self._doubt()
            return
        self._streak = self._streak + 1 if agreed and seen == self._last else int(agreed)
        self._last = seen if agreed else None
        if seen.early and self._streak >= self._needed:
            self.learnt = seen

    def _doubt(self) -> None:
        """Give up the learnt pattern, which did not hold, and ask for more agreement before the next one."""
        self.learnt, self._last, self._streak = None, None, 0
        self._needed = min(_MOST_AGREEMENTS, self._needed * _MORE_AGREEMENTS)
