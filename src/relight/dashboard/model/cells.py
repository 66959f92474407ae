"""Activities of a rank by stretches of time, of several widths, in bounded memory. Pure; times are ns since the start.

Two to the power of something everywhere: a stretch of one level is four of the level below, and a number of
nanoseconds is turned into a stretch by a shift.
"""

NOTHING = 255  # not known, or no process was there
SHIFTS = (26, 28, 30, 32, 34, 36, 38)  # 67 ms, 0.27 s, 1.07 s, 4.3 s, 17 s, 69 s, 4.6 min
KEPT = 4096  # stretches of each level: 4.6 minutes, 18 minutes, 73 minutes, 5 hours, 19 hours, 3 days, 13 days


class Level:
    """The activity that took most of each stretch."""

    def __init__(self, shift: int, kept: int = KEPT) -> None:
        self.shift = shift
        self._kept = kept
        self._first = 0  # number of the stretch that `_cells` begins with
        self._has_forgotten = False
        self._cells = bytearray()
        self._open = -1  # number of the stretch that is being filled
        self._spent: dict[int, int] = {}  # ns, by activity, in that stretch
        self._above: Level | None = None

    def stack(self, above: "Level") -> "Level":
        """Whatever is closed here is added to `above`. Returns `above`."""
        self._above = above
        return above

    def add(self, code: int, start_ns: int, end_ns: int) -> None:
        """`code` lasted from `start_ns` to `end_ns`; times never go back."""
        shift = self.shift
        number, last = start_ns >> shift, end_ns >> shift
        if number != self._open:
            self._turn(number)
        spent = self._spent
        if number == last:
            spent[code] = spent.get(code, 0) + end_ns - start_ns
            return
        whole = number + 1  # the first stretch that `code` fills from its beginning
        spent[code] = spent.get(code, 0) + (whole << shift) - start_ns
        if whole < last:  # many at once: a phase of minutes must not cost a loop of thousands
            self._fill(code, whole, last)
        self._turn(last)
        if rest := end_ns - (last << shift):
            self._spent[code] = rest

    def _fill(self, code: int, first: int, end: int) -> None:
        """`code` filled the stretches from `first` up to but not including `end`; the one before `first` is open."""
        self._close()
        begin = max(first, end - self._kept)
        if begin > first:
            self._cells.clear()
            self._first, self._has_forgotten = begin, True
        self._cells.extend(bytes([code]) * (end - begin))
        if self._above is not None:
            self._above.add(code, first << self.shift, end << self.shift)
        self._open = end
        self._trim()

    def cells(self, first: int, count: int) -> bytes:
        """`count` stretches from number `first` on. What is not there is NOTHING; the open one is as it stands."""
        begin = max(first, self._first)
        end = min(first + count, self._first + len(self._cells))
        known = bytes(self._cells[begin - self._first : end - self._first]) if begin < end else b""
        if known:
            found = bytes([NOTHING]) * (begin - first) + known
        else:
            found = bytes([NOTHING]) * max(0, min(count, self._open - first))
        if len(found) < count and first + len(found) == self._open:
            found += bytes([_most(self._spent)])
        return found + bytes([NOTHING]) * (count - len(found))

    @property
    def since_ns(self) -> int:
        """Time before which everything is forgotten."""
        return self._first << self.shift if self._has_forgotten else 0

    def _turn(self, number: int) -> None:
        """Close the open stretch, and begin `number`."""
        if number == self._open:
            return
        if self._open >= 0:
            self._close()
            gap = number - self._open - 1
            if gap > self._kept:  # all that is known is too old by now
                self._cells.clear()
                self._first, self._has_forgotten = number - self._kept, True
            self._cells.extend(bytes([NOTHING]) * min(gap, self._kept))
        else:
            self._first = number
        self._open = number
        self._trim()

    def _trim(self) -> None:
        surplus = len(self._cells) - self._kept
        if surplus > self._kept // 8:  # now and then, not each time: it moves everything
            del self._cells[:surplus]
            self._first, self._has_forgotten = self._first + surplus, True

    def _close(self) -> None:
        spent = self._spent
        if len(spent) == 1:  # the usual case: one activity, and mostly all of the stretch
            ((code, length),) = spent.items()
            self._cells.append(code)
            if self._above is not None:
                at = self._open << self.shift
                self._above.add(code, at, at + length)
            spent.clear()
            return
        self._cells.append(_most(spent))
        if self._above is not None:
            at = self._open << self.shift
            for code, length in spent.items():
                self._above.add(code, at, at + length)
                at += length
        spent.clear()


def _most(spent: dict[int, int]) -> int:
    return max(spent, key=spent.__getitem__) if spent else NOTHING


def halve(cells: bytes) -> bytes:
    """One cell for each two: the first of them, unless nothing is known there."""
    pairs = zip(cells[::2], cells[1::2], strict=True)
    return bytes(second if first == NOTHING else first for first, second in pairs)
