import io
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from relight.core.account.report import JobReport
from relight.core.protocol.position import Phase
from relight.timeline.draw.terminal import ASCII, Glyphs, draw, duration, legend
from relight.timeline.model.spans import Activity, Chunk, Row, Span, Strike
from relight.timeline.model.windows import Band, Window, recovery_window, step_window
from tests.timeline import jobs
from tests.timeline.jobs import MS, Worker

FIGURES = Path(__file__).parent / "figures"


def figure(window: Window | None, width: int = 100, **options: object) -> str:
    """The figure as a terminal without colour shows it."""
    assert window is not None
    console = Console(record=True, width=width, file=io.StringIO(), color_system=None)
    for line in draw(window, width, **options):  # type: ignore[arg-type]
        assert line.cell_len <= width
        console.print(line, highlight=False)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n"


def recovery_of(job: tuple[JobReport, list[Chunk]]) -> Window:
    report, chunks = job
    return recovery_window(report, report.recoveries[0], jobs.history(report, chunks))


def same_as_file(drawn: str, name: str) -> None:
    """Compare with the stored figure. A file that is missing is written: look at it before it is committed."""
    path = FIGURES / f"{name}.txt"
    if not path.exists():
        path.write_text(drawn, encoding="utf-8")
        pytest.fail(f"{path} was missing and has been written from what is drawn now; check it")
    assert drawn == path.read_text(encoding="utf-8")


# --- the three figures ------------------------------------------------------------------------------------------
def test_figure_of_a_plain_step() -> None:
    report, chunks = jobs.plain()
    same_as_file(figure(step_window(report, 1, jobs.history(report, chunks))), "plain")


def test_figure_of_a_rollback() -> None:
    same_as_file(figure(recovery_of(jobs.rolled_back())), "rolled-back")


def test_figure_of_a_take_over() -> None:
    same_as_file(figure(recovery_of(jobs.taken_over())), "taken-over")


def test_figure_of_a_hang_shortens_the_wait() -> None:
    same_as_file(figure(recovery_of(jobs.hung())), "hung")


def test_figure_in_ascii() -> None:
    drawn = figure(recovery_of(jobs.rolled_back()), glyphs=ASCII)
    assert drawn.isascii()
    same_as_file(drawn, "ascii")


# --- what must be in them ---------------------------------------------------------------------------------------
def rank_line(drawn: str, rank: int) -> str:
    return next(line for line in drawn.splitlines() if line.startswith(f"rank {rank} "))[10:]


def test_the_marks_of_a_rollback_are_there_without_colour() -> None:
    drawn = figure(recovery_of(jobs.rolled_back()))
    assert "⚡1" in drawn
    assert "step 7 again" in drawn
    assert "[restore" in drawn
    assert "[redo" in drawn
    dead = rank_line(drawn, 1)
    assert dead.index("⚡") < dead.index("X") < dead.index("»") < dead.index("p") < dead.rindex("F")
    assert "X" not in rank_line(drawn, 0)


def test_a_forward_recovery_repeats_nothing() -> None:
    drawn = figure(recovery_of(jobs.taken_over()))
    assert "[next step" in drawn
    assert "[redo" not in drawn


def test_parameters_are_dark_before_and_light_after_the_update() -> None:
    window = recovery_of(jobs.taken_over())
    line = next(after for before, after in pairwise(draw(window, 100)) if before.plain.startswith("rank 0"))
    styles = {line.plain[span.start : span.end].strip()[:2]: str(span.style) for span in line.spans[1:]}
    assert styles["v7"] == styles["v6"]
    assert styles["v8"] == styles["v9"] != styles["v7"]
    assert "▁" in line.plain
    assert "▔" in line.plain


def test_a_blank_replacement_shows_no_parameters() -> None:
    drawn = figure(recovery_of(jobs.rolled_back())).splitlines()
    phases, version = drawn[5], drawn[6]
    assert version[phases.index("X") : phases.index("»")].strip() == ""


def test_a_barrier_of_a_microsecond_stays_visible() -> None:
    worker = Worker("w0", 0).stamp(0, Phase.FORWARD, 0).stamp(400, Phase.BACKWARD, 0)
    worker.stamp(800, Phase.BARRIER, 0).stamp(800.001, Phase.OPTIMIZER, 0).stamp(801, Phase.OUTSIDE, 0, 1)
    report = JobReport(job="j", started_wall=jobs.WALL, wall_seconds=1)
    drawn = figure(step_window(report, 0, jobs.history(report, [worker.chunk()])))
    assert "B|O" in drawn


def test_many_ranks_show_those_that_matter() -> None:
    rows = tuple(Row(rank, (Span(0, 100, Activity.FORWARD),)) for rank in range(1000))
    window = Window(start_ns=0, end_ns=100, zero_ns=0, rows=rows, base_version=0, important=(777,))
    drawn = figure(window, max_rows=4)
    assert [line.split()[1] for line in drawn.splitlines() if line.startswith("rank")] == ["0", "1", "2", "777"]
    assert "996 more ranks are not shown." in drawn


def test_failures_close_together_share_a_lightning() -> None:
    strikes = tuple(
        Strike(number=i + 1, at_ns=500 + i, rank=rank, process="p", kind="killed") for i, rank in enumerate((3, 5, -1))
    )
    rows = (Row(0, (Span(0, 1000, Activity.FORWARD),)),)
    window = Window(start_ns=0, end_ns=1000, zero_ns=500, rows=rows, strikes=strikes, base_version=0)
    assert "⚡3,5,standby" in figure(window)


# --- properties -------------------------------------------------------------------------------------------------
@st.composite
def windows(draw: st.DrawFn) -> Window:
    rows = []
    for rank in range(draw(st.integers(1, 4))):
        at, spans = draw(st.integers(0, 20)), []
        for activity in draw(st.lists(st.sampled_from(list(Activity)), max_size=30)):
            start = at + draw(st.sampled_from([0, 0, 0, 7]))
            at = start + draw(st.one_of(st.integers(1, 20), st.integers(1, 10**6)))
            spans.append(Span(start, at, activity, step=at % 5, version=at % 4))
        rows.append(Row(rank, tuple(spans)))
    end = max((span.end_ns for row in rows for span in row.spans), default=1)
    strikes = tuple(
        Strike(number=1, at_ns=span.start_ns, rank=row.rank, process="p", kind="killed")
        for row in rows
        for span in row.spans
        if span.activity is Activity.DEAD
    )
    times = sorted(draw(st.lists(st.integers(0, end), min_size=5, max_size=5)))
    band = Band(
        number=1,
        struck_ns=times[0],
        noticed_ns=times[1],
        stopped_ns=times[2],
        resumed_ns=times[3],
        ended_ns=times[4],
    )
    return Window(
        start_ns=0,
        end_ns=end,
        zero_ns=times[0],
        rows=tuple(rows),
        strikes=strikes,
        bands=draw(st.sampled_from([(), (band,), (band, band)])),
        base_version=2,
    )


@given(windows(), st.integers(34, 200), st.sampled_from([Glyphs(*(["#"] * 9)), ASCII]))
def test_no_line_is_wider_than_the_terminal(window: Window, width: int, glyphs: Glyphs) -> None:
    lines = draw(window, width, glyphs)
    assert max(line.cell_len for line in lines) <= width
    ranks = [line for line in lines if line.plain.startswith("rank")]
    assert {line.cell_len for line in ranks} == {width}


@given(windows(), st.integers(34, 200))
def test_a_wide_lightning_shifts_nothing(window: Window, width: int) -> None:
    assert {line.cell_len for line in draw(window, width) if line.plain.startswith("rank")} == {width}


def test_the_legend_fits() -> None:
    assert all(line.cell_len <= 60 for line in legend(60))
    assert "".join(line.plain for line in legend(60, ASCII)).isascii()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0"),
        (0.0000021, "2.10 µs"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.00 s"),
        (-0.25, "-250 ms"),
        (59.96, "60.0 s"),
        (125, "2 min 05 s"),
        (7200, "2 h 00 min"),
    ],
)
def test_durations_in_the_unit_people_would_use(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_the_window_starts_a_step_before_the_failure() -> None:
    window = recovery_of(jobs.rolled_back())
    assert (window.start_ns, window.zero_ns) == (600 * MS, 730 * MS)
    (band,) = window.bands
    assert (band.noticed_ns, band.stopped_ns, band.resumed_ns) == (742 * MS, 750 * MS, 800 * MS)
