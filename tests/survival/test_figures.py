"""The figures of the mission, drawn from a job that really lost two workers: their spans must tell what happened."""

from pathlib import Path

from relight.core.account.report import JobReport, RecoveryReport
from relight.timeline.export import write_timeline
from relight.timeline.model.load import read_history
from relight.timeline.model.spans import Activity, History, Row, Span
from relight.timeline.model.trace import TraceReader
from relight.timeline.model.windows import Window, find_band, recovery_window, step_window
from tests.survival.harness import Bench, Training

TRAINING = Training(steps=40, arguments=("--pause", "0.02"))
PLAIN, BACKWARD, OPTIMIZER = 20, 10, 30  # steps: nothing happens; rank 1 is killed; rank 2 is killed


def row_of(window: Window, rank: int) -> Row:
    return next(row for row in window.rows if row.rank == rank)


def kinds(row: Row, step: int) -> list[Activity]:
    """The phases of the rank in a step, the last time that it did it."""
    spans = [span for span in row.spans if span.step == step]
    last = max(span.generation for span in spans)
    return [span.activity for span in spans if span.generation == last]


def lies_within(span: Span, start_ns: int, end_ns: int) -> bool:
    return start_ns <= span.start_ns <= span.end_ns <= end_ns


def test_the_figures_of_a_real_job(bench: Bench, tmp_path: Path) -> None:
    faults = [f"kill rank 1 in BACKWARD of step {BACKWARD}", f"kill rank 2 in OPTIMIZER of step {OPTIMIZER}"]
    outcome = bench.run(TRAINING, faults=faults, standbys=2)
    assert outcome.status == 0, outcome.describe()
    report = outcome.report
    history = read_history(TraceReader(outcome.run_dir), report)
    check_plain_step(report, history)
    first, second = report.recoveries
    check_recovery(report, first, history, rank=1, died_in=Activity.BACKWARD)
    check_recovery(report, second, history, rank=2, died_in=Activity.OPTIMIZER)
    assert first.target_version == BACKWARD, "before the barrier: back to step i"
    assert second.target_version == OPTIMIZER + 1, "after the barrier: no rank goes back before i + 1"
    said = write_timeline(outcome.run_dir, svg=tmp_path / "a.svg", html=tmp_path / "a.html", trace=tmp_path / "a.json")
    assert len(said) == 4
    for name in ("a.svg", "a-2.svg"):
        text = (tmp_path / name).read_text()
        assert "Restoration + Rollback" in text
        assert "takes over" in text


def check_plain_step(report: JobReport, history: History) -> None:
    window = step_window(report, PLAIN, history)
    assert window is not None
    assert not window.bands
    for row in window.rows:
        assert kinds(row, PLAIN)[:4] == [Activity.FORWARD, Activity.BACKWARD, Activity.BARRIER, Activity.OPTIMIZER]
    # No rank begins to write before all have come to the barrier.
    spans = [span for row in window.rows for span in row.spans if span.step == PLAIN]
    arrived = max(span.start_ns for span in spans if span.activity is Activity.BARRIER)
    assert all(span.start_ns >= arrived for span in spans if span.activity is Activity.OPTIMIZER)


def check_recovery(
    report: JobReport, recovery: RecoveryReport, history: History, *, rank: int, died_in: Activity
) -> None:
    window = recovery_window(report, recovery, history)
    band = find_band(report, recovery, history)
    assert band.struck_ns <= band.noticed_ns <= band.stopped_ns <= band.resumed_ns < band.ended_ns
    assert band.replaced == (rank,)
    assert rank not in band.sources
    row = row_of(window, rank)
    dead = [index for index, span in enumerate(row.spans) if span.activity is Activity.DEAD]
    assert len(dead) == 1
    last, successor = row.spans[dead[0] - 1], row.spans[dead[0] + 1]
    assert last.activity is died_in
    assert successor.process not in ("", last.process), "a replacement takes over the row"
    parked = [span for other in window.rows for span in other.spans if span.activity is Activity.PARKED]
    assert {other.rank for other in window.rows if any(span in parked for span in other.spans)} == {0, 1, 2}
    assert all(lies_within(span, band.struck_ns, band.resumed_ns) for span in parked)
    # Dark before, light after: a rank that trains on does so with the version that was agreed upon.
    after = [s for other in window.rows for s in other.spans if s.generation == recovery.generation]
    begun = [span for span in after if span.activity is Activity.FORWARD]
    assert {span.version for span in begun if span.step == recovery.target_version} == {recovery.target_version}
