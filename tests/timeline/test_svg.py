"""The figures as SVG: well formed, complete, nothing outside the picture, nothing from outside as markup."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from relight.core.account.report import JobReport
from relight.errors import UsageError
from relight.timeline.draw.svg import MAX_ROWS, WIDTH, draw_svg, legend_svg
from relight.timeline.export import write_timeline
from relight.timeline.model.spans import Activity, Chunk, Row, Span, Strike
from relight.timeline.model.windows import Band, Window, recovery_window, step_window
from tests.timeline import jobs

SVG = "{http://www.w3.org/2000/svg}"
Job = Callable[[], tuple[JobReport, list[Chunk]]]


def titles(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}title")]


def window_of(job: Job) -> Window:
    report, chunks = job()
    return recovery_window(report, report.recoveries[0], jobs.history(report, chunks))


@pytest.mark.parametrize("job", [jobs.rolled_back, jobs.taken_over, jobs.hung])
def test_a_recovery_has_everything_in_it(job: Job) -> None:
    window = window_of(job)
    told = titles(draw_svg(window, "a title"))
    assert told[0] == "a title"
    band = window.bands[0]
    for name in ("Failure noticed", "Stop + Clean + Reset", "Restoration + Rollback"):
        assert any(title.startswith(name) for title in told), name
    for source in band.sources:
        for target in band.replaced:
            assert f"version {band.target_version} restored from rank {source} to rank {target}" in told
    for strike in window.strikes:
        assert f"failure {strike.number}: rank {strike.rank} {strike.kind}" in told
    spans = [span for row in window.rows for span in row.spans]
    assert sum(any(title.startswith(str(span)) for title in told) for span in spans) == len(spans)
    assert any("gradient synchronization barrier" in title for title in told)
    assert any(title.endswith("takes over") for title in told)


@pytest.mark.parametrize("job", [jobs.rolled_back, jobs.taken_over, jobs.hung])
def test_nothing_lies_outside_the_picture(job: Job) -> None:
    root = ElementTree.fromstring(draw_svg(window_of(job)))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root:
        for shape in [element, *element]:
            if shape.tag == f"{SVG}rect":
                x, y = float(shape.attrib["x"]), float(shape.attrib["y"])
                assert 0 <= x <= x + float(shape.attrib["width"]) <= width + 2
                assert 0 <= y <= y + float(shape.attrib["height"]) <= height
            for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", shape.attrib.get("points", "")):
                assert -10 <= float(x) <= width + 10
                assert -20 <= float(y) <= height


def test_versions_are_dark_before_the_update_and_light_after_it() -> None:
    report, chunks = jobs.plain()
    window = step_window(report, 1, jobs.history(report, chunks))
    assert window is not None
    root = ElementTree.fromstring(draw_svg(window))
    strips = [
        (e.attrib["class"], e[0].text) for e in root.iter(f"{SVG}rect") if e.attrib.get("class") in ("dark", "light")
    ]
    assert {kind for kind, told in strips if told == "parameters of version 1"} == {"dark"}
    assert {kind for kind, told in strips if told == "parameters of version 2"} == {"light"}


def test_what_comes_from_outside_stays_text() -> None:
    evil = "<script>alert(1)</script>\"'&"
    span = Span(0, 10, Activity.FORWARD, 1, 1, 1, evil)
    dead = Span(10, 20, Activity.DEAD)
    window = Window(
        start_ns=0,
        end_ns=30,
        zero_ns=10,
        rows=(Row(0, (span, dead, msgspec.structs.replace(span, start_ns=20, end_ns=30))),),
        strikes=(Strike(number=1, at_ns=10, rank=0, process=evil, kind=evil),),
        bands=(Band(number=1, struck_ns=10, noticed_ns=12, stopped_ns=14, resumed_ns=20, ended_ns=30),),
        base_version=1,
    )
    svg = draw_svg(window, evil)
    assert "<script" not in svg
    assert titles(svg)[0] == evil


def test_a_thousand_ranks_show_those_that_matter() -> None:
    rows = tuple(Row(rank, (Span(0, 10, Activity.FORWARD),)) for rank in range(1000))
    window = Window(start_ns=0, end_ns=10, zero_ns=0, rows=rows, base_version=0, important=(777,))
    root = ElementTree.fromstring(draw_svg(window))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert "rank 777" in texts
    assert f"{1000 - MAX_ROWS} more ranks are not shown" in texts


def test_the_legend_is_an_svg_of_its_own() -> None:
    root = ElementTree.fromstring(legend_svg())
    assert root.attrib["viewBox"].split()[2] == str(WIDTH)


# --- files --------------------------------------------------------------------------------------------------------
@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    report, chunks = jobs.rolled_back()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "report.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(report, job="<b>job</b>")))
    (run_dir / "trace.jsonl").write_bytes(b"".join(msgspec.json.encode(chunk) + b"\n" for chunk in chunks))
    return run_dir


def test_files_of_every_kind(run_dir: Path, tmp_path: Path) -> None:
    svg, html, trace = (tmp_path / name for name in ("a.svg", "a.html", "a.json"))
    said = write_timeline(run_dir, svg=svg, html=html, trace=trace)
    assert len(said) == 3
    assert ElementTree.parse(svg).getroot().tag == f"{SVG}svg"
    page = html.read_text()
    assert "&lt;b&gt;job&lt;/b&gt;" in page
    assert "<b>" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", ""), "needs nothing else"
    events = json.loads(trace.read_bytes())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"recoveries", "rank 0", "rank 1", "rank 2"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {"Forward", "Backward", "stop, clean, reset", "restoration, rollback"} <= {each["name"] for each in slices}


def test_a_report_that_is_missing_is_said(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "report.json").unlink()
    said = write_timeline(run_dir, svg=tmp_path / "a.svg", step=6)
    assert "There is no report" in said[0]
    assert (tmp_path / "a.svg").exists()


@pytest.mark.parametrize(("step", "why"), [(99, "no longer there, or was never written")])
def test_nothing_to_draw(run_dir: Path, tmp_path: Path, step: int, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        write_timeline(run_dir, svg=tmp_path / "a.svg", step=step)
    assert not (tmp_path / "a.svg").exists()


def test_no_trace_and_no_place(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        write_timeline(run_dir, svg=tmp_path / "none" / "a.svg")
    (run_dir / "trace.jsonl").unlink()
    with pytest.raises(UsageError, match="There is no trace"):
        write_timeline(run_dir, svg=tmp_path / "a.svg")
