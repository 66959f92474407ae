"""Time to columns. Pure: an axis is a value, and so is the share of columns each span gets.

Linear, with one exception. A hang is noticed after half a minute, a step takes milliseconds: drawn to scale, one
of them is invisible. Stretches in which nothing changes anywhere are therefore shortened if they would fill the
figure, and marked as such.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

_CUTS = 3
_DOMINATES = 2.0  # a quiet stretch is shortened if it is so many times longer than all that is drawn to scale
_REACH = 4  # a span too short for a column takes one from a neighbour no further away than this


class Piece(msgspec.Struct, frozen=True):
    """A linear part of an axis. `cut`: shortened."""

    start_ns: int
    end_ns: int
    first_column: float
    columns: float
    cut: bool = False


class Axis(msgspec.Struct, frozen=True):
    pieces: tuple[Piece, ...]
    columns: int

    def coordinate(self, time_ns: float) -> float:
        """Return the column of a time; outside the axis: its end."""
        pieces = self.pieces
        index = bisect_right(pieces, time_ns, key=lambda piece: piece.start_ns) - 1
        if index < 0:
            return 0.0
        piece = pieces[index]
        share = (min(time_ns, piece.end_ns) - piece.start_ns) / (piece.end_ns - piece.start_ns)
        return piece.first_column + share * piece.columns

    def column(self, time_ns: float) -> int:
        """The column at which something that happens then is drawn."""
        return min(int(self.coordinate(time_ns) + 0.5), self.columns - 1)

    @property
    def cuts(self) -> tuple[Piece, ...]:
        return tuple(piece for piece in self.pieces if piece.cut)


def plan_axis(start_ns: int, end_ns: int, columns: int, changes_ns: Iterable[int] = ()) -> Axis:
    """An axis from `start_ns` to `end_ns`. `changes_ns` are the times at which something changes anywhere.

    Without `changes_ns` nothing is shortened.
    """
    end_ns = max(end_ns, start_ns + 1)
    times = sorted({start_ns, end_ns, *(t for t in changes_ns if start_ns < t < end_ns)})
    gaps = list(pairwise(times))
    cut = _quiet_stretches(gaps) if len(gaps) > 1 else frozenset[tuple[int, int]]()
    cut_columns = min(12, columns // 6)
    to_scale_ns = end_ns - start_ns - sum(end - start for start, end in cut)
    per_ns = (columns - len(cut) * cut_columns) / to_scale_ns
    pieces: list[Piece] = []
    at = 0.0
    for start, end in gaps:
        is_cut = (start, end) in cut
        if pieces and not is_cut and not pieces[-1].cut:
            start, at = pieces[-1].start_ns, pieces[-1].first_column  # noqa: PLW2901 - one piece with the last
            pieces.pop()
        width = float(cut_columns) if is_cut else (end - start) * per_ns
        pieces.append(Piece(start, end, at, width, is_cut))
        at += width
    return Axis(tuple(pieces), columns)


def _quiet_stretches(gaps: Sequence[tuple[int, int]]) -> frozenset[tuple[int, int]]:
    longest = sorted(gaps, key=lambda gap: (gap[0] - gap[1], gap[0]))
    for count in range(min(_CUTS, len(gaps) - 1), 0, -1):
        rest = sum(end - start for start, end in longest[count:])
        start, end = longest[count - 1]
        if end - start >= _DOMINATES * rest:
            return frozenset(longest[:count])
    return frozenset()


def share_columns(edges: Sequence[float], least: Sequence[int]) -> list[int]:
    """Return the number of columns that each of consecutive stretches gets.

    `edges` are their borders in columns, one more than stretches. A stretch that would vanish, though it should
    have `least` columns, takes them from the nearest that can spare some: a barrier of 1 ms stays visible.
    """
    borders = [int(edge + 0.5) for edge in edges]
    widths = [end - start for start, end in pairwise(borders)]
    for index in sorted(range(len(widths)), key=lambda i: (-least[i], i)):
        while widths[index] < least[index]:
            givers = [
                other
                for other in range(max(0, index - _REACH), min(len(widths), index + _REACH + 1))
                if other != index and widths[other] > max(1, least[other])
            ]
            if not givers:
                break
            giver = min(givers, key=lambda other: (abs(other - index), -widths[other]))
            widths[giver] -= 1
            widths[index] += 1
    return widths
