"""The part of a job to draw, as a value: around a recovery, or around a step. Pure."""

from collections.abc import Iterator, Sequence

import msgspec

from relight.core.account.report import JobReport, RecoveryReport
from relight.timeline.model.spans import IN_STEP, Activity, History, Row, Selection, Span, Strike


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """One recovery on the time axis: detect, stop, restore, redo lie between these times."""

    number: int
    struck_ns: int
    noticed_ns: int
    stopped_ns: int  # the last survivor is paused
    resumed_ns: int  # the last rank trains on
    ended_ns: int  # first step committed again
    repeats: bool = True  # that step had been started before
    sources: tuple[int, ...] = ()  # ranks that the state was copied from
    replaced: tuple[int, ...] = ()  # ranks that got it
    target_version: int = 0

    @property
    def times(self) -> tuple[int, ...]:
        """The edges of its stages."""
        return (self.struck_ns, self.noticed_ns, self.stopped_ns, self.resumed_ns, self.ended_ns)


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one figure. `rows` are all ranks; `important` those that must not be left out."""

    start_ns: int
    end_ns: int
    zero_ns: int  # times are counted from here: the failure, or the start of the step
    rows: tuple[Row, ...]
    strikes: tuple[Strike, ...] = ()
    bands: tuple[Band, ...] = ()
    base_version: int  # dark up to this version, light after it
    important: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        return all(span.activity is Activity.DEAD for row in self.rows for span in row.spans)

    def choose_rows(self, most: int) -> list[Row]:
        """The rows that matter and the lowest ranks, by rank."""
        by_weight = sorted(self.rows, key=lambda row: (row.rank not in self.important, row.rank))
        return sorted(by_weight[:most], key=lambda row: row.rank)

    def shown_version(self, span: Span) -> int | None:
        """The version of the parameters held there; None where there are none, as in a blank replacement."""
        # One step before is as far back as a figure goes: an older version is what a standby was built with.
        is_blank = span.activity is Activity.PARKED and span.version < self.base_version - 1
        return None if is_blank or span.activity in {Activity.DEAD, Activity.STARTING} else span.version


def name_steps(rows: Sequence[Row]) -> Iterator[tuple[int, str]]:
    """Yield when each step first began on these rows, in order, and its name there."""
    starts: dict[tuple[int, int], int] = {}
    for row in rows:
        for span in row.spans:
            if span.activity is Activity.FORWARD:
                key = (span.step, span.generation)
                starts[key] = min(span.start_ns, starts.get(key, span.start_ns))
    seen: set[int] = set()
    for (step, _), start in sorted(starts.items(), key=lambda item: (item[1], item[0])):
        yield start, f"step {step} again" if step in seen else f"step {step}"
        seen.add(step)


def recovery_selection(report: JobReport, recoveries: tuple[RecoveryReport, ...]) -> Selection:
    """The spans that the figures of these recoveries need."""
    steps, times = [], []
    for recovery in recoveries:
        steps.append((_step_in_flight(recovery) - 1, recovery.target_version + 1))
        struck, noticed = _struck_noticed(report, recovery)
        times.append((struck, noticed + _to_resume_ns(recovery)))
    return Selection(tuple(steps), tuple(times))


def step_selection(report: JobReport, step: int) -> Selection:
    """The spans that the figure of a step needs, with those of recoveries close to it."""
    near = [r for r in report.recoveries if _step_in_flight(r) - 1 <= step <= r.target_version + 1]
    times = recovery_selection(report, tuple(near)).times_ns
    return Selection(((step - 1, step + 1),), times)


def find_band(report: JobReport, recovery: RecoveryReport, history: History) -> Band:
    """Return the times of a recovery's stages: from the rows where they show it, else from the report's stage times."""
    struck, noticed = _struck_noticed(report, recovery)
    horizon = _next_struck(report, recovery)
    parked = [
        (row.rank, span)
        for row in history.rows
        for span in row.spans
        if span.activity is Activity.PARKED and struck <= span.start_ns < horizon
    ]
    stopped = noticed + round(recovery.stages.stop_seconds * 1e9)
    resumed = noticed + _to_resume_ns(recovery)
    if parked:
        first_parked: dict[int, int] = {}
        for rank, span in parked:
            first_parked[rank] = min(span.start_ns, first_parked.get(rank, span.start_ns))
        survivors = [at for rank, at in first_parked.items() if rank not in recovery.replaced]
        stopped = max(survivors, default=stopped)
        resumed = max(span.end_ns for _, span in parked)
    stopped = max(stopped, noticed)
    resumed = max(resumed, stopped)
    return Band(
        number=recovery.number,
        struck_ns=struck,
        noticed_ns=noticed,
        stopped_ns=stopped,
        resumed_ns=resumed,
        ended_ns=resumed + round(recovery.stages.redo_seconds * 1e9),
        repeats=recovery.steps_repeated > 0,
        sources=recovery.sources,
        replaced=recovery.replaced,
        target_version=recovery.target_version,
    )


def recovery_window(report: JobReport, recovery: RecoveryReport, history: History) -> Window:
    """From the start of the step before the failure to the end of the first step after the recovery."""
    near = [r for r in report.recoveries if abs(r.number - recovery.number) <= 2]
    bands = {r.number: find_band(report, r, history) for r in near}
    band = bands[recovery.number]
    step = _step_in_flight(recovery)
    before = [s.start_ns for s in _in_step(history) if s.step == step - 1 and s.start_ns < band.struck_ns]
    before = before or [s.start_ns for s in _in_step(history) if s.step == step and s.start_ns < band.struck_ns]
    start = min(before, default=band.struck_ns - max(1, band.resumed_ns - band.struck_ns) // 4)
    earlier = bands.get(recovery.number - 1)
    if earlier is not None and earlier.resumed_ns <= band.struck_ns:
        start = max(start, earlier.resumed_ns)
    after = [s for s in _in_step(history) if s.generation == recovery.generation]
    again = min((s.step for s in after if s.activity is Activity.FORWARD), default=None)
    end = max((s.end_ns for s in after if s.step == again), default=band.ended_ns)
    end = max(end, band.resumed_ns, start + 1)
    answered = set(recovery.failures)
    return _window(
        history,
        start,
        end + (end - band.resumed_ns) // 6,  # to show the version it led to
        band.struck_ns,
        tuple(bands.values()),
        base_version=step,
        important=(*recovery.replaced, *(s.rank for s in history.strikes if s.number in answered)),
    )


def step_window(report: JobReport, step: int, history: History) -> Window | None:
    """From the first forward of a step to its last update, repeats included; None if the step is not there."""
    spans = [span for span in _in_step(history) if span.step == step]
    if not spans:
        return None
    start, end = min(s.start_ns for s in spans), max(s.end_ns for s in spans)
    margin = (end - start) // 10
    bands = tuple(find_band(report, r, history) for r in report.recoveries)
    struck = [s.rank for s in history.strikes if start <= s.at_ns < end]
    return _window(
        history,
        start - margin,
        end + margin,
        start,
        bands,
        base_version=min(s.version for s in spans),
        important=tuple(struck),
    )


def _window(
    history: History,
    start_ns: int,
    end_ns: int,
    zero_ns: int,
    bands: tuple[Band, ...],
    base_version: int,
    important: tuple[int, ...],
) -> Window:
    return Window(
        start_ns=start_ns,
        end_ns=end_ns,
        zero_ns=zero_ns,
        rows=tuple(Row(row.rank, _clip(row.spans, start_ns, end_ns)) for row in history.rows),
        strikes=tuple(s for s in history.strikes if start_ns <= s.at_ns < end_ns),
        bands=tuple(b for b in bands if b.struck_ns < end_ns and start_ns < max(b.ended_ns, b.resumed_ns)),
        base_version=base_version,
        important=tuple(sorted({rank for rank in important if rank >= 0})),
    )


def _clip(spans: tuple[Span, ...], start_ns: int, end_ns: int) -> tuple[Span, ...]:
    return tuple(
        msgspec.structs.replace(s, start_ns=max(s.start_ns, start_ns), end_ns=min(s.end_ns, end_ns))
        for s in spans
        if s.start_ns < end_ns and start_ns < s.end_ns
    )


def _in_step(history: History) -> list[Span]:
    return [span for row in history.rows for span in row.spans if span.activity in IN_STEP]


def _step_in_flight(recovery: RecoveryReport) -> int:
    """Step i takes version i to i + 1. The failed rank's own word is no use: a blank replacement says 0."""
    return recovery.target_version - (recovery.decision == "forward")


def _struck_noticed(report: JobReport, recovery: RecoveryReport) -> tuple[int, int]:
    failures = [f for f in report.failures if f.number in recovery.failures]
    if not failures:
        return 0, 0
    noticed = min(f.noticed_seconds for f in failures)
    return round(min(noticed, *(f.struck_seconds for f in failures)) * 1e9), round(noticed * 1e9)


def _next_struck(report: JobReport, recovery: RecoveryReport) -> float:
    later = [_struck_noticed(report, r)[0] for r in report.recoveries if r.number > recovery.number]
    return min(later, default=float("inf"))


def _to_resume_ns(recovery: RecoveryReport) -> int:
    """From the notice to training again, in ns: the total counts from the fault."""
    return round((recovery.stages.total_seconds - (recovery.stages.detect_seconds or 0.0)) * 1e9)
