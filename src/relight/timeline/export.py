"""A job's timeline as files: SVG and PNG for papers, a page that needs nothing else, a trace for Perfetto."""

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from relight.core.account.report import JobReport
from relight.errors import UsageError
from relight.timeline.draw.perfetto import Slice, encode_trace
from relight.timeline.draw.png import to_png
from relight.timeline.draw.svg import NAMES, draw_svg, legend_svg
from relight.timeline.draw.terminal import duration
from relight.timeline.model.load import load_report, no_trace, read_history
from relight.timeline.model.spans import Activity, History
from relight.timeline.model.trace import TraceReader, first_stamp_ns, latest_finished_step
from relight.timeline.model.windows import (
    Window,
    find_band,
    recovery_selection,
    recovery_window,
    step_selection,
    step_window,
)
from relight.timeline.report import describe_recovery

_PAGE_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #ffffff; --rule: #cccccc; --soft: #f3f3f3 }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #16181b; --rule: #444444; --soft: #23262a } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1140px;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem } figure { margin: 0; overflow-x: auto }
svg { width: 100%; min-width: 760px; height: auto } td, th { text-align: left; padding: .15rem 1.2rem .15rem 0;
  vertical-align: top } th { font-weight: 600 } .bad { background: var(--soft); border-left: 4px solid #d00000;
  padding: .5rem 1rem }
"""


def write_timeline(
    run_dir: Path,
    *,
    svg: Path | None = None,
    png: Path | None = None,
    html: Path | None = None,
    trace: Path | None = None,
    step: int | None = None,
    recoveries: int = 5,
) -> list[str]:
    """Write the files asked for; returns sentences for people. Raises UsageError if there is nothing to draw."""
    reader = TraceReader(run_dir)
    if not reader.paths:
        raise UsageError(no_trace(run_dir))
    said: list[str] = []
    loaded = load_report(run_dir)
    if isinstance(loaded, str):
        said.append(f"{loaded} What failed is not known; the figure comes from the trace alone.")
        loaded = JobReport(job=run_dir.name, started_wall=first_stamp_ns(reader) / 1e9)
    if svg is not None or png is not None or html is not None:
        figures = _figures(reader, loaded, step, recoveries)
        if svg is not None:
            said += _write_figures(figures, svg, str.encode)
        if png is not None:
            said += _write_figures(figures, png, to_png)
        if html is not None:
            said.append(_write(html, _page(loaded, figures).encode()))
    if trace is not None:
        said.append(_write(trace, _perfetto(read_history(reader, loaded), loaded)))
    if reader.unreadable_lines:
        said.append(f"{reader.unreadable_lines} lines of the trace could not be read and were left out.")
    return said


def _figures(reader: TraceReader, report: JobReport, step: int | None, recoveries: int) -> list[tuple[str, Window]]:
    """Titles and windows: the step asked for, or the first recoveries, or the last step of a job without any."""
    chosen = report.recoveries[: max(0, recoveries)] if step is None else ()
    if chosen:
        history = read_history(reader, report, recovery_selection(report, chosen))
        found = [(describe_recovery(report, r), recovery_window(report, r, history)) for r in chosen]
        figures = [(title, window) for title, window in found if not window.is_empty]
    else:
        number = latest_finished_step(reader) if step is None else step
        if number is None:
            raise UsageError("the trace holds no finished step")
        window = step_window(report, number, read_history(reader, report, step_selection(report, number)))
        figures = [] if window is None else [(f"Step {number}", window)]
    if not figures:
        raise UsageError("this part of the trace is no longer there, or was never written")
    return figures


def _write_figures(figures: Sequence[tuple[str, Window]], path: Path, encode: Callable[[str], bytes]) -> list[str]:
    """One file for each figure: NAME.svg, NAME-2.svg, ..."""
    said = []
    for number, (title, window) in enumerate(figures, start=1):
        place = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        said.append(_write(place, encode(draw_svg(window, title))))
    return said


def _page(report: JobReport, figures: Sequence[tuple[str, Window]]) -> str:
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(report.job)}: relight</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # A job's name or an error's text must stay text, whatever it says.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<style>{_PAGE_STYLE}</style></head><body>",
        f"<h1>{escape(report.job)}</h1>",
        f'<p class="bad">{escape(report.error)}</p>' if report.error else "",
        _facts(report),
        _failures(report),
        f"<h2>Legend</h2><figure>{legend_svg()}</figure>",
    ]
    for title, window in figures:
        parts.append(f"<h2>{escape(title)}</h2><figure>{draw_svg(window, title)}</figure>")
    left = len(report.recoveries) - len(figures)
    if report.recoveries and left > 0:
        parts.append(f"<p>{left} more recoveries: <code>--recoveries {len(report.recoveries)}</code> draws them.</p>")
    return "\n".join([*parts, "</body></html>", ""])


def _facts(report: JobReport) -> str:
    share = report.time_lost_seconds / report.wall_seconds if report.wall_seconds else 0.0
    facts = (
        ("ranks", f"{report.world_size}, {report.standbys} in reserve"),
        ("steps", f"{report.steps} of {report.until}, {report.steps_repeated} repeated"),
        ("failures", f"{len(report.failures)}, {len(report.recoveries)} recoveries"),
        ("time", f"{duration(report.wall_seconds)}, of which {duration(report.time_lost_seconds)} lost ({share:.2%})"),
        ("final state", f"version {report.final_version}, digest {report.final_state_digest or 'not known'}"),
    )
    rows = "".join(f"<tr><th>{name}</th><td>{escape(words)}</td></tr>" for name, words in facts)
    return f"<table>{rows}</table>"


def _failures(report: JobReport) -> str:
    if not report.failures:
        return ""
    rows = "".join(
        f"<tr><td>{failure.number}</td><td>{'' if failure.rank < 0 else failure.rank}</td>"
        f"<td>{escape(failure.kind)}</td><td>{escape(failure.phase)} of step {failure.step}</td>"
        f"<td>{escape(failure.evidence)}</td></tr>"
        for failure in report.failures
    )
    head = "".join(f"<th>{name}</th>" for name in ("", "rank", "failure", "in", "evidence"))
    return f"<h2>Failures</h2><table><tr>{head}</tr>{rows}</table>"


def _perfetto(history: History, report: JobReport) -> bytes:
    """A track for each rank, one for the controller's recoveries."""
    ranks = [
        Slice(
            f"rank {row.rank}",
            NAMES[span.activity],
            span.start_ns,
            span.end_ns,
            {"step": span.step, "version": span.version, "generation": span.generation, "process": span.process},
        )
        for row in history.rows
        for span in row.spans
        if span.activity is not Activity.OUTSIDE
    ]
    stages: list[Slice] = []
    for recovery in report.recoveries:
        band = find_band(report, recovery, history)
        title = f"recovery {recovery.number}: {recovery.decision} to {recovery.target_version}"
        details = {"reason": recovery.reason, "moved_bytes": recovery.moved_bytes}
        stages.append(Slice("recoveries", title, band.struck_ns, band.ended_ns, details))
        for name, start, end in (
            ("notice", band.struck_ns, band.noticed_ns),
            ("stop, clean, reset", band.noticed_ns, band.stopped_ns),
            ("restoration, rollback", band.stopped_ns, band.resumed_ns),
            ("again" if band.repeats else "next step", band.resumed_ns, band.ended_ns),
        ):
            if start < end:
                stages.append(Slice("recoveries", name, start, end))
    return encode_trace({"controller": stages, report.job or "job": ranks} if stages else {report.job or "job": ranks})


def _write(path: Path, data: bytes) -> str:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    return f"Written to {path}."
