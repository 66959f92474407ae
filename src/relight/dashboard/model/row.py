"""One rank's row while it grows: the newest phase changes exactly, older ones as cells. Pure, bounded.

Times are ns since the job's start. A row records what *processes* stamped while they held the rank; that a rank has
died is not in it, but in the list of failures.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable

from relight.core.protocol.position import Phase
from relight.dashboard.model.cells import NOTHING, SHIFTS, Level, halve

TILE_CELLS = 256
MAX_HOLDERS = 64
MIN_SHIFT, MAX_SHIFT = 10, 42  # a microsecond to 73 minutes for one cell
_STEP_MEMORY = 0.2  # weight of the newest step in the running means
_SHARP = 60  # with fewer changes than this in a tile, a barrier of a millisecond is kept visible


class Row:
    """Phase changes of one rank."""

    def __init__(self, kept: int) -> None:
        """`kept`: how many of the newest changes are remembered exactly."""
        self._kept = kept
        self._times = array("q")
        self._has_forgotten = False
        self._codes = bytearray()
        self._steps = array("q")
        self._versions = array("q")
        self._levels = [Level(shift) for shift in SHIFTS]
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            below.stack(above)
        self.holders: deque[tuple[int, str]] = deque(maxlen=MAX_HOLDERS)  # since when, which process
        self.generation = 0
        self.step_seconds = 0.0  # from forward to forward, running mean
        self.forward_seconds = 0.0  # of which in FORWARD
        self._forward_ns = -1  # when the last forward began
        self._forward_step = -1

    @property
    def first_ns(self) -> int:
        return self._times[0] if self._times else -1

    @property
    def last_ns(self) -> int:
        return self._times[-1] if self._times else -1

    @property
    def phase(self) -> int:
        return self._codes[-1] if self._codes else NOTHING

    @property
    def step(self) -> int:
        return self._steps[-1] if self._steps else -1

    @property
    def version(self) -> int:
        return self._versions[-1] if self._versions else -1

    @property
    def process(self) -> str:
        return self.holders[-1][1] if self.holders else ""

    def taken_over_ns(self, process: str) -> int | None:
        """Return the first stamp of the process after `process` here; None if none did, or it is forgotten."""
        found = False
        for since_ns, name in self.holders:
            if found:
                return since_ns
            found = name == process
        return None

    def add(self, process: str, at_ns: int, generation: int, step: int, code: int, version: int) -> None:
        """One change of phase. One that is older than the newest change is left out."""
        if at_ns < self.last_ns or at_ns < 0:
            return
        if not self.holders or self.holders[-1][1] != process:
            self.holders.append((at_ns, process))
            self._forward_ns = -1
        if self._times:
            self._levels[0].add(self._codes[-1], self._times[-1], at_ns)
        self._measure(at_ns, step, code)
        self.generation = generation
        self._times.append(at_ns)
        self._steps.append(step)
        self._versions.append(version)
        self._codes.append(code)
        if len(self._times) > self._kept + self._kept // 4:
            surplus, self._has_forgotten = len(self._times) - self._kept, True
            for column in (self._times, self._steps, self._versions, self._codes):
                del column[:surplus]

    def _measure(self, at_ns: int, step: int, code: int) -> None:
        if code == Phase.FORWARD:
            if self._forward_ns >= 0 and step == self._forward_step + 1:
                self.step_seconds = _mean(self.step_seconds, (at_ns - self._forward_ns) / 1e9)
            self._forward_ns, self._forward_step = at_ns, step
        elif code == Phase.BACKWARD and self.phase == Phase.FORWARD and self._forward_ns >= 0:
            self.forward_seconds = _mean(self.forward_seconds, (at_ns - self._forward_ns) / 1e9)

    # --- tiles: what a stretch of 256 cells looks like ------------------------------------------------------------
    def cells(self, shift: int, tile: int, end_ns: int) -> bytes:
        """The 256 activities of a tile whose cells are `1 << shift` ns wide; NOTHING from `end_ns` on."""
        exact_since = self._times[0] if self._has_forgotten else 0
        start_ns = tile * TILE_CELLS << shift
        if shift < SHIFTS[0] and start_ns >= exact_since:
            return self._exact(shift, start_ns, end_ns)
        level = self._level(shift, start_ns)
        if level.shift <= shift:
            factor = 1 << (shift - level.shift)
            found = level.cells(tile * TILE_CELLS * factor, TILE_CELLS * factor)
            while len(found) > TILE_CELLS:
                found = halve(found)
        else:  # older than what is known so finely: several cells show the same
            factor = 1 << (level.shift - shift)
            first = tile * TILE_CELLS // factor
            coarse = level.cells(first, TILE_CELLS // factor + 2)
            found = bytes(coarse[(tile * TILE_CELLS + i) // factor - first] for i in range(TILE_CELLS))
        return self._with_newest(found, shift, tile, end_ns)

    def runs(self, shift: int, tile: int, end_ns: int) -> list[int]:
        """Return a tile as runs of equal cells: first cell, activity, step, version; steps only where exact."""
        return _runs(self.cells(shift, tile, end_ns), shift, tile, self.at)

    def _level(self, shift: int, start_ns: int) -> Level:
        """The coarsest one that is fine enough, or the finest that still knows `start_ns`."""
        fitting = [level for level in self._levels if level.shift <= shift] or self._levels[:1]
        for level in (fitting[-1], *self._levels):
            if level.since_ns <= start_ns and level.shift >= fitting[-1].shift:
                return level
        return self._levels[-1]

    def _exact(self, shift: int, start_ns: int, end_ns: int) -> bytes:
        times, codes = self._times, self._codes
        low = max(0, bisect_right(times, start_ns) - 1)
        stop_ns = min(start_ns + (TILE_CELLS << shift), end_ns)
        high = bisect_left(times, stop_ns, low)
        found = bytearray([NOTHING]) * TILE_CELLS
        sharp = high - low <= _SHARP
        longest = [0] * TILE_CELLS  # of what is in each cell so far
        for index in range(low, high):
            begin = max(times[index], start_ns)
            end = min(times[index + 1] if index + 1 < len(times) else end_ns, stop_ns)
            if end <= begin:
                continue
            code = codes[index]
            first, last = (begin - start_ns) >> shift, (end - 1 - start_ns) >> shift
            if first == last:
                if longest[first] < end - begin and not (sharp and found[first] == Phase.BARRIER):
                    found[first], longest[first] = code, end - begin
                if sharp and code == Phase.BARRIER:
                    found[first] = code
                continue
            width = 1 << shift
            head = ((first + 1) << shift) + start_ns - begin
            if head > longest[first] and not (sharp and found[first] == Phase.BARRIER):
                found[first], longest[first] = code, head
            found[first + 1 : last] = bytes([code]) * (last - first - 1)
            found[last], longest[last] = code, end - start_ns - (last << shift)
            longest[first + 1 : last] = [width] * (last - first - 1)
        return bytes(found)

    def _with_newest(self, cells: bytes, shift: int, tile: int, end_ns: int) -> bytes:
        """Add the present activity, which is in no level yet: it lasts until `end_ns`."""
        if not self._times or end_ns <= self.last_ns:
            return cells
        first = (self.last_ns >> shift) - tile * TILE_CELLS
        last = (end_ns >> shift) - tile * TILE_CELLS
        found = bytearray(cells)
        for at in range(max(0, first), min(TILE_CELLS, last + 1)):
            if found[at] == NOTHING or at > first:
                found[at] = self._codes[-1]
        return bytes(found)

    def at(self, at_ns: int, code: int) -> tuple[int, int]:
        """Step and version at a time, of the newest change to `code` before it, if that is near and still known."""
        index = bisect_right(self._times, at_ns) - 1
        for earlier in range(index, max(-1, index - 8), -1):
            if self._codes[earlier] == code:
                return self._steps[earlier], self._versions[earlier]
        return -1, -1


class Joined:
    """One rank's past from two rows: what the newer one does not know, the older one may."""

    def __init__(self, newer: Row, older: Row) -> None:
        self._newer = newer
        self._older = older

    def cells(self, shift: int, tile: int, end_ns: int) -> bytes:
        newer = self._newer.cells(shift, tile, end_ns)
        if NOTHING not in newer:
            return newer
        older = self._older.cells(shift, tile, min(end_ns, self._older.last_ns))
        return bytes(b if a == NOTHING else a for a, b in zip(newer, older, strict=True))

    def runs(self, shift: int, tile: int, end_ns: int) -> list[int]:
        return _runs(self.cells(shift, tile, end_ns), shift, tile, self._at)

    def taken_over_ns(self, process: str) -> int | None:
        found = self._newer.taken_over_ns(process)
        return self._older.taken_over_ns(process) if found is None else found

    def _at(self, at_ns: int, code: int) -> tuple[int, int]:
        row = self._newer if 0 <= self._newer.first_ns <= at_ns else self._older
        return row.at(at_ns, code)


def _runs(cells: bytes, shift: int, tile: int, find: Callable[[int, int], tuple[int, int]]) -> list[int]:
    start_ns = tile * TILE_CELLS << shift
    flat: list[int] = []
    before: tuple[int, int, int] | None = None
    for at, code in enumerate(cells):
        if before is not None and before[0] == NOTHING == code:
            continue
        step, version = (-1, -1) if code == NOTHING else find(start_ns + (at + 1 << shift) - 1, code)
        if (code, step, version) != before:
            before = (code, step, version)
            flat += (at, code, step, version)
    return flat


def _mean(before: float, value: float) -> float:
    return value if before == 0.0 else before + _STEP_MEMORY * (value - before)
