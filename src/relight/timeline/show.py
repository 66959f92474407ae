"""Shows a finished or running job from the files in its run directory. Missing and damaged files are said so."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from relight.core.account.report import JobReport
from relight.timeline.draw.terminal import ASCII, UNICODE, draw, legend
from relight.timeline.model.load import load_report, no_trace, read_history
from relight.timeline.model.trace import TraceReader, first_stamp_ns, latest_finished_step
from relight.timeline.model.windows import (
    Window,
    recovery_selection,
    recovery_window,
    step_selection,
    step_window,
)
from relight.timeline.report import describe_recovery, render_report


def print_report(run_dir: Path, console: Console) -> bool:
    """Print the report's tables. False if there is none to print; then it is said why."""
    report = _load_report(run_dir, console)
    if report is None:
        return False
    console.print(render_report(report))
    return True


def print_timeline(run_dir: Path, console: Console, step: int | None = None, recoveries: int = 5) -> bool:
    """Draw the first `recoveries` recoveries, or `step`; a plain step if nothing failed. False: nothing to draw."""
    trace = TraceReader(run_dir)
    if not trace.paths:
        _say(console, no_trace(run_dir))
        return False
    report = _load_report(run_dir, console)
    if report is None:
        _say(console, "Without it the failures are not known; what follows comes from the trace alone.")
    chosen = () if report is None else report.recoveries[: max(0, recoveries)]
    if step is None and not chosen:
        step = _step_to_show(trace, report, console)
        if step is None:
            return False
    if step is not None:
        return _print_step(trace, report, step, console)
    assert report is not None
    history = read_history(trace, report, recovery_selection(report, chosen))
    for recovery in chosen:
        _say(console, describe_recovery(report, recovery), "bold")
        window = recovery_window(report, recovery, history)
        if window.is_empty:
            _say(console, "This part of the trace is no longer there, or was never written.\n")
        else:
            _draw(window, console)
    _end(trace, console)
    left = len(report.recoveries) - len(chosen)
    if left:
        _say(
            console,
            f"{left} more not drawn: `relight timeline {run_dir} --recoveries {len(report.recoveries)}` draws all.",
        )
    return True


def _step_to_show(trace: TraceReader, report: JobReport | None, console: Console) -> int | None:
    """Without a recovery to draw: where the job was lost, or the last step finished."""
    start = "" if report is None or report.recoveries else "There was no recovery. "
    lost = [f for f in report.failures if f.rank >= 0] if report is not None and report.error else []
    if lost and not (report and report.recoveries):
        _say(console, f"{start}Step {lost[-1].step}, in which rank {lost[-1].rank} failed:")
        return lost[-1].step
    step = latest_finished_step(trace)
    if step is None:
        _say(console, f"{start}The trace holds no finished step.")
    else:
        _say(console, f"{start}Step {step}, the last one finished:")
    return step


def _print_step(trace: TraceReader, report: JobReport | None, step: int, console: Console) -> bool:
    known = report or JobReport(job="", started_wall=first_stamp_ns(trace) / 1e9)
    window = step_window(known, step, read_history(trace, known, step_selection(known, step)))
    if window is None:
        _say(console, f"Step {step} is not in the trace: it was not reached, or that part is no longer kept.")
        return False
    for recovery in known.recoveries:
        if any(band.number == recovery.number for band in window.bands):
            _say(console, describe_recovery(known, recovery), "bold")
    _draw(window, console)
    _end(trace, console)
    return True


def _draw(window: Window, console: Console) -> None:
    for line in draw(window, console.width, UNICODE if _is_unicode(console) else ASCII):
        console.print(line, highlight=False)
    console.print()


def _end(trace: TraceReader, console: Console) -> None:
    for line in legend(console.width, UNICODE if _is_unicode(console) else ASCII):
        console.print(line, highlight=False)
    if trace.unreadable_lines:
        lines = "1 line" if trace.unreadable_lines == 1 else f"{trace.unreadable_lines} lines"
        _say(console, f"{lines} of the trace could not be read (cut short?) and left out.")


def _load_report(run_dir: Path, console: Console) -> JobReport | None:
    loaded = load_report(run_dir)
    if isinstance(loaded, str):
        _say(console, loaded)
        return None
    return loaded


def _is_unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def _say(console: Console, sentence: str, style: str = "") -> None:
    console.print(Text(sentence, style), highlight=False)
