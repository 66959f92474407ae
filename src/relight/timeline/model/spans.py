"""From the phase stamps of processes to one row of spans per rank. Pure; times are ns since the job's start.

A trace records what *processes* did; people think in *ranks*. A row is therefore put together from all processes
that held the rank one after the other, with a DEAD span where no process did.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from relight.core.account.report import JobReport
from relight.core.protocol.position import Phase

Record = tuple[int, int, int, int, int]  # stamp_ns, generation, step, phase, version


class Activity(enum.StrEnum):
    """Activities in a rank's row: the phases of a worker, and DEAD for a rank that no process holds."""

    STARTING = "STARTING"
    OUTSIDE = "OUTSIDE"
    FORWARD = "FORWARD"
    BACKWARD = "BACKWARD"
    BARRIER = "BARRIER"
    OPTIMIZER = "OPTIMIZER"
    PARKED = "PARKED"
    DONE = "DONE"
    DEAD = "DEAD"


IN_STEP = frozenset({Activity.FORWARD, Activity.BACKWARD, Activity.BARRIER, Activity.OPTIMIZER})
_ACTIVITY = {int(phase): Activity(phase.name) for phase in Phase if phase is not Phase.STANDBY}
_STANDBY = int(Phase.STANDBY)
_STARTING = int(Phase.STARTING)


class Chunk(msgspec.Struct, frozen=True):
    """One line of `trace.jsonl`, a TraceChunk message as the controller wrote it down."""

    process: str
    rank: int  # the process's rank when the agent read the page; -1: none yet
    records: tuple[Record, ...]
    clock_offset_ns: int = 0  # wall clock minus CLOCK_MONOTONIC


class Span(msgspec.Struct, frozen=True):
    """One activity of one rank, from `start_ns` up to but not including `end_ns`."""

    start_ns: int
    end_ns: int
    activity: Activity
    step: int = 0
    version: int = 0
    generation: int = 0
    process: str = ""

    def __str__(self) -> str:
        return (
            f"{self.activity} of step {self.step} at version {self.version}, {self.start_ns / 1e6:.3f} to "
            f"{self.end_ns / 1e6:.3f} ms (generation {self.generation}, {self.process or 'no process'})"
        )


class Row(msgspec.Struct, frozen=True):
    """The life of one rank: spans in order of time, never overlapping."""

    rank: int
    spans: tuple[Span, ...]


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """A failure at its time. `rank` is -1 for one that no rank is to blame for."""

    number: int
    at_ns: int
    rank: int
    process: str
    kind: str


class History(msgspec.Struct, frozen=True):
    """The spans of all ranks, or those that were kept."""

    rows: tuple[Row, ...]
    strikes: tuple[Strike, ...]
    end_ns: int


class Selection(msgspec.Struct, frozen=True):
    """The spans to keep: those of some steps (first, last), and those that overlap some times (from, to)."""

    steps: tuple[tuple[int, int], ...] = ()
    times_ns: tuple[tuple[int, int], ...] = ()

    def touches(self, low_step: int, high_step: int, start_ns: int, end_ns: int) -> bool:
        """Return whether anything within these bounds can be selected."""
        return any(first <= high_step and low_step <= last for first, last in self.steps) or any(
            since <= end_ns and start_ns <= until for since, until in self.times_ns
        )


@dataclass
class _Track:
    """One process while its chunks are read."""

    offset_ns: int
    rank: int = -1
    first_ns: int | None = None  # first stamp as the holder of a rank, or on the way there
    takes_over_ns: int | None = None  # first stamp that is more than starting up
    last: Record | None = None  # with wall-clock time since the origin; its span is still open
    spans: list[Span] = field(default_factory=list)


@dataclass
class _Holder:
    """One process's turn at a rank."""

    process: str
    first_ns: int
    takes_over_ns: int
    spans: list[Span]
    death_ns: int | None


class SpanCollector:
    """Takes chunks in the order they were written, keeps only the selected spans, then gives the rows."""

    def __init__(self, origin_ns: int, selection: Selection | None = None) -> None:
        """`origin_ns` is the job's start on the wall clock. Without a `selection` everything is kept."""
        self._origin_ns = origin_ns
        self._selection = selection
        self._tracks: dict[str, _Track] = {}

    def add(self, chunk: Chunk) -> None:
        # One offset per process: a wall clock that is set anew must not bend a worker's monotonic time.
        track = self._tracks.setdefault(chunk.process, _Track(chunk.clock_offset_ns - self._origin_ns))
        if chunk.rank >= 0:
            track.rank = chunk.rank
        if not chunk.records:
            return
        if self._may_skip(track, chunk.records):
            track.last = _shifted(chunk.records[-1], track)
            return
        for record in chunk.records:
            self._take(chunk.process, track, record)

    def _may_skip(self, track: _Track, records: tuple[Record, ...]) -> bool:
        """Return whether no span of these records can be selected: then a look at first and last is enough."""
        if self._selection is None or track.last is None or track.takes_over_ns is None:
            return False
        # A process never goes back by more than the one step that is repeated.
        low = min(track.last[2], records[0][2]) - 1
        high = max(records[-1][2], records[0][2]) + 1
        if self._selection.touches(low, high, track.last[0], records[-1][0] + track.offset_ns):
            return False
        return all(record[3] != _STANDBY for record in records)

    def _take(self, process: str, track: _Track, raw: Record) -> None:
        record = _shifted(raw, track)
        if record[3] == _STANDBY:  # all before it was warm-up, on behalf of no rank
            track.spans.clear()
            track.first_ns = track.takes_over_ns = None
        else:
            if track.first_ns is None:
                track.first_ns = record[0]
            if track.takes_over_ns is None and record[3] != _STARTING:
                track.takes_over_ns = record[0]
            if track.last is not None:
                self._keep(track.spans, _span(process, track.last, record[0]))
        track.last = record

    def _keep(self, spans: list[Span], span: Span | None) -> None:
        if span is None or span.end_ns <= span.start_ns:
            return
        if self._selection is not None and not self._selection.touches(
            span.step, span.step, span.start_ns, span.end_ns
        ):
            return
        if spans and spans[-1].end_ns == span.start_ns and _same(spans[-1], span):
            spans[-1] = msgspec.structs.replace(spans[-1], end_ns=span.end_ns)
        else:
            spans.append(span)

    def history(self, report: JobReport) -> History:
        """The rows, with the failures of `report` marked in them."""
        end_ns = max(
            [round(report.wall_seconds * 1e9), *(t.last[0] for t in self._tracks.values() if t.last is not None)]
        )
        struck = {
            f.process: round(f.struck_seconds * 1e9)
            for f in reversed(report.failures)
            if f.rank >= 0 and f.kind != "communication"  # a broken connection is no death
        }
        holders: dict[int, list[_Holder]] = {rank: [] for rank in range(report.world_size)}
        for process, track in sorted(self._tracks.items()):
            if track.rank < 0 or track.last is None or track.first_ns is None:
                continue
            # What it did last is shown, however short: the clocks of two processes differ by more than that.
            death = max(struck[process], track.last[0] + 1) if process in struck else None
            spans = list(track.spans)
            self._keep(spans, _span(process, track.last, end_ns if death is None else death))
            takes_over = track.takes_over_ns if track.takes_over_ns is not None else track.first_ns
            holders.setdefault(track.rank, []).append(_Holder(process, track.first_ns, takes_over, spans, death))
        for failure in report.failures:  # a process that left no trace still leaves a hole
            if failure.process in struck and not _has_turn(holders.get(failure.rank, []), failure.process):
                at = struck[failure.process]
                holders.setdefault(failure.rank, []).append(_Holder(failure.process, at, at, [], at))
        deaths: dict[str, int] = {}
        rows = tuple(Row(rank, _row(turns, end_ns, deaths)) for rank, turns in sorted(holders.items()))
        return History(rows, _strikes(report, deaths), end_ns)


def _shifted(record: Record, track: _Track) -> Record:
    stamp = record[0] + track.offset_ns
    if track.last is not None and stamp < track.last[0]:
        stamp = track.last[0]
    return (stamp, *record[1:])


def _span(process: str, record: Record, end_ns: int) -> Span | None:
    start_ns, generation, step, phase, version = record
    if phase == _STANDBY:
        return None
    activity = _ACTIVITY.get(phase, Activity.OUTSIDE)
    return Span(start_ns, end_ns, activity, step, version, generation, process)


def _same(one: Span, other: Span) -> bool:
    return (one.activity, one.step, one.version, one.generation, one.process) == (
        other.activity,
        other.step,
        other.version,
        other.generation,
        other.process,
    )


def _has_turn(turns: Iterable[_Holder], process: str) -> bool:
    return any(turn.process == process for turn in turns)


def _row(turns: list[_Holder], end_ns: int, deaths: dict[str, int]) -> tuple[Span, ...]:
    """The turns at one rank, one after the other; records in `deaths` when each of the dead died."""
    turns.sort(key=lambda turn: (turn.takes_over_ns, turn.process))
    spans: list[Span] = []
    cursor: int | None = None
    for index, turn in enumerate(turns):
        successor = turns[index + 1] if index + 1 < len(turns) else None
        limit = end_ns if successor is None else successor.takes_over_ns
        if turn.death_ns is not None:
            limit = min(limit, turn.death_ns)
        for span in turn.spans:
            start = span.start_ns if cursor is None else max(span.start_ns, cursor)
            end = min(span.end_ns, limit)
            if start < end:
                spans.append(msgspec.structs.replace(span, start_ns=start, end_ns=end))
        cursor = limit if cursor is None else max(limit, cursor)
        if turn.death_ns is None:
            continue
        deaths[turn.process] = cursor
        until = end_ns if successor is None else successor.first_ns
        if cursor < until:
            spans.append(Span(cursor, until, Activity.DEAD))
            cursor = until
    return tuple(spans)


def _strikes(report: JobReport, deaths: Mapping[str, int]) -> tuple[Strike, ...]:
    return tuple(
        Strike(
            number=failure.number,
            at_ns=deaths.get(failure.process, round(failure.struck_seconds * 1e9)),
            rank=failure.rank,
            process=failure.process,
            kind=failure.kind,
        )
        for failure in report.failures
    )
