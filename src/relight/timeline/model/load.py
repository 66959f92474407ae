"""Load the files of a run directory. Missing and damaged files are reported in sentences."""

from pathlib import Path

import msgspec

from relight.core.account.report import JobReport, decode_report
from relight.timeline.model.spans import History, Selection, SpanCollector
from relight.timeline.model.trace import TraceReader


def load_report(run_dir: Path) -> JobReport | str:
    """The report, or why there is none."""
    path = run_dir / "report.json"
    try:
        return decode_report(path.read_bytes())
    except FileNotFoundError:
        return f"There is no report in {run_dir}: the job is still running, or its controller was killed."
    except OSError as error:
        return f"The report {path} cannot be read: {error.strerror or error}."
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"The report {path} is damaged or from another version of relight: {error}."


def read_history(trace: TraceReader, report: JobReport, selection: Selection | None = None) -> History:
    """One pass over the trace; only selected spans stay in memory."""
    collector = SpanCollector(round(report.started_wall * 1e9), selection)
    for chunk in trace:
        collector.add(chunk)
    return collector.history(report)


def no_trace(run_dir: Path) -> str:
    return f"There is no trace in {run_dir}: no trace.jsonl was written, or it was moved away."
