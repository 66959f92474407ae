"""The figures of an update: how it would go, and how it went above how it would have. No torch.

Glue between what `transfer` plans and measures and what `timeline` draws, which do not know each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from relight.timeline.draw.terminal import ASCII, UNICODE
from relight.timeline.draw.weights import MAX_DEVICES, Doing, Figure, Use, draw_update, legend_of_update
from relight.transfer.plan.cost import Span
from relight.transfer.plan.schedule import IPC_BUFFERS, Kind, Schedule
from relight.transfer.plan.timings import stages_of
from relight.transfer.plan.update.result import Published, Stage

if TYPE_CHECKING:
    from rich.console import Console

_SLOT_COLUMNS = 5  # a bucket drawn narrower than this cannot be read
MEASURED_WORDS = {
    Doing.SOURCE: "a source writes the bucket",
    Doing.RELOAD: "engines reload it, from the first one's start to the last one's end",
    Doing.HELD: "still to be read",
}


def figure_of(schedule: Schedule, spans: Sequence[Span], rounds: int, width: int) -> Figure:
    """The first `rounds` rounds, or as many buckets as can be distinguished in so many columns; to the last's end."""
    last = min(rounds * schedule.devices, _shown(schedule.buckets, width)) - 1
    ends = _times(schedule, spans)
    end_seconds = 0.0 if last < 0 else ends[Kind.RELOAD, last][1]
    marks: dict[int, float] = {}
    for operation, span in zip(schedule.operations, spans, strict=True):
        if span.start_seconds < end_seconds:
            marks.setdefault(operation.round, span.start_seconds)
    names = tuple((at, f"round {number}") for number, at in marks.items())
    uses = _planned_uses(schedule, spans, end_seconds)
    return Figure(schedule.devices, buffers_of(schedule), tuple(uses), end_seconds, names)


def figure_of_measured(result: Published, schedule: Schedule, spans: Sequence[Span], width: int) -> Figure:
    """Draw the plan, and below it the measurement, from the first bucket's start to the last shown one's end.

    Both are as if there were one device: in host memory all sources write into the same two IPC buffers. Where the
    plan is the slower one it is cut off; a wait that would fill the figure is shortened. Without a stage there is
    nothing to draw, and `end_seconds` is 0.
    """
    shown = _shown(result.buckets, width)
    stages = [*stages_of(result, "broadcast"), *stages_of(result, "reload")]
    start_ns = min((stage.start_ns for stage in stages), default=0)
    end_ns = max((stage.end_ns for stage in stages if stage.bucket < shown), default=start_ns)
    end_seconds = (end_ns - start_ns) / 1e9
    planned = (use for use in _planned_uses(schedule, spans, end_seconds) if use.bucket < shown)
    measured = _measured_uses(result, start_ns, end_seconds)
    rows = tuple(map(_name_of, range(IPC_BUFFERS)))
    return Figure(2, rows, (*planned, *measured), end_seconds, names=("planned", "measured"), is_shortened=True)


def drawn_buckets(figure: Figure) -> int:
    """The number of buckets that are drawn to their end on the last device."""
    device = min(figure.devices, MAX_DEVICES) - 1
    reloads = (use for use in figure.uses if use.device == device and use.doing is Doing.RELOAD)
    return len({use.bucket for use in reloads if use.end_seconds <= figure.end_seconds})


def print_figure(figure: Figure, console: "Console", words: Mapping[Doing, str] | None = None) -> None:
    """Draw it as wide as the console is, with a legend: `words`, or what is usual."""
    glyphs = UNICODE if console.encoding.lower().startswith("utf") else ASCII
    legend = (
        legend_of_update(console.width, glyphs) if words is None else legend_of_update(console.width, glyphs, words)
    )
    for lines in (draw_update(figure, console.width, glyphs), legend):
        console.print()
        for line in lines:
            console.print(line, highlight=False, no_wrap=True, overflow="crop")


def buffers_of(schedule: Schedule) -> tuple[str, ...]:
    """Names of the buffers that each device has."""
    return tuple(_name_of(buffer) for buffer in range(0 if schedule.from_host else -1, IPC_BUFFERS))


def _shown(buckets: int, width: int) -> int:
    return min(buckets, max(2, width // _SLOT_COLUMNS))


def _name_of(buffer: int) -> str:
    return "H2D" if buffer < 0 else f"I{buffer}"


def _times(schedule: Schedule, spans: Sequence[Span]) -> dict[tuple[Kind, int], tuple[float, float]]:
    operations = zip(schedule.operations, spans, strict=True)
    return {(o.kind, o.bucket): (s.start_seconds, s.end_seconds) for o, s in operations}


def _planned_uses(schedule: Schedule, spans: Sequence[Span], end_seconds: float) -> Iterator[Use]:
    """Select the stages that begin before `end_seconds`."""
    rows = buffers_of(schedule)
    times = _times(schedule, spans)
    for operation, span in zip(schedule.operations, spans, strict=True):
        if span.start_seconds >= end_seconds:
            continue
        bucket, source, row = operation.bucket, operation.source, rows.index(_name_of(operation.buffer))
        start, stop = span.start_seconds, span.end_seconds
        if operation.kind is Kind.H2D:
            if source >= MAX_DEVICES:
                continue
            yield Use(source, row, Doing.H2D, bucket, start, stop)
            yield Use(source, row, Doing.HELD, bucket, stop, times[Kind.BROADCAST, bucket][1])
            continue
        for device in range(min(schedule.devices, MAX_DEVICES)):
            doing = Doing.SOURCE if device == source else Doing.TARGET
            if operation.kind is Kind.RELOAD:
                doing = Doing.RELOAD
            yield Use(device, row, doing, bucket, start, stop)
            if operation.kind is Kind.BROADCAST:
                yield Use(device, row, Doing.HELD, bucket, stop, times[Kind.RELOAD, bucket][0])


def _measured_uses(result: Published, start_ns: int, end_seconds: float) -> Iterator[Use]:
    """For the second device: each write of a bucket, its readers, and the times between."""
    writes: dict[int, list[Stage]] = {}
    reloads: dict[int, list[Stage]] = {}
    for stage in stages_of(result, "broadcast"):
        writes.setdefault(stage.bucket, []).append(stage)
    for stage in stages_of(result, "reload"):
        reloads.setdefault(stage.bucket, []).append(stage)

    def seconds(time_ns: float) -> float:
        return min((time_ns - start_ns) / 1e9, end_seconds + 1.0)

    for bucket, mine in writes.items():
        row = bucket % IPC_BUFFERS
        for write, following in pairwise([*mine, None]):
            assert write is not None
            over_ns = float("inf") if following is None else following.start_ns  # then it is written again
            loads = [stage for stage in reloads.get(bucket, ()) if write.start_ns <= stage.start_ns < over_ns]
            yield Use(1, row, Doing.SOURCE, bucket, seconds(write.start_ns), seconds(write.end_ns))
            if not loads:
                yield Use(1, row, Doing.HELD, bucket, seconds(write.end_ns), seconds(over_ns))
                continue
            begun_ns, ended_ns = loads[0].start_ns, max(stage.end_ns for stage in loads)
            yield Use(1, row, Doing.HELD, bucket, seconds(write.end_ns), seconds(begun_ns))
            yield Use(1, row, Doing.RELOAD, bucket, seconds(begun_ns), seconds(ended_ns))
            if following is not None:
                yield Use(1, row, Doing.HELD, bucket, seconds(ended_ns), seconds(over_ns))
