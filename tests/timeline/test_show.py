import io
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from relight.core.account.report import JobReport
from relight.timeline.model.trace import TraceReader, first_stamp_ns, latest_finished_step
from relight.timeline.show import print_report, print_timeline
from tests.timeline import jobs
from tests.timeline.jobs import WALL, Worker


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=100, file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))


def text(console: Console) -> str:
    """The printed text, without the breaks that the width made."""
    return " ".join(console.export_text().split())


def test_a_job_is_drawn_from_its_files(tmp_path: Path, console: Console) -> None:
    run_dir = jobs.write_run(tmp_path, *jobs.rolled_back())
    assert print_timeline(run_dir, console)
    shown = text(console)
    assert "Recovery 1 of 1, 70.0 ms: rank 1 (w1): killed in FORWARD of step 7" in shown
    assert "⚡1" in shown
    assert "no process at this rank" in shown


def test_a_report_is_printed_from_its_file(tmp_path: Path, console: Console) -> None:
    run_dir = jobs.write_run(tmp_path, *jobs.rolled_back())
    assert print_report(run_dir, console)
    assert "killed by SIGKILL" in text(console)


def test_a_step_with_a_recovery_shows_both(tmp_path: Path, console: Console) -> None:
    run_dir = jobs.write_run(tmp_path, *jobs.taken_over())
    assert print_timeline(run_dir, console, step=7)
    shown = text(console)
    assert "Recovery 1 of 1" in shown
    assert "X»p" in shown


def test_a_step_that_is_not_there(tmp_path: Path, console: Console) -> None:
    run_dir = jobs.write_run(tmp_path, *jobs.plain())
    assert not print_timeline(run_dir, console, step=99)
    assert "Step 99 is not in the trace" in text(console)


def test_without_a_failure_the_last_step_is_drawn(tmp_path: Path, console: Console) -> None:
    assert print_timeline(jobs.write_run(tmp_path, *jobs.plain()), console)
    assert "There was no recovery. Step 2, the last one finished:" in text(console)


def test_a_lost_job_shows_where_it_was_lost(tmp_path: Path, console: Console) -> None:
    report, chunks = jobs.rolled_back()
    lost = msgspec.structs.replace(report, recoveries=(), error="no standby is left", wall_seconds=0.9)
    assert print_timeline(jobs.write_run(tmp_path, lost, chunks[:3]), console)
    shown = text(console)
    assert "There was no recovery. Step 7, in which rank 1 failed:" in shown
    assert "⚡X" in shown


def test_only_the_first_recoveries_are_drawn(tmp_path: Path, console: Console) -> None:
    report, chunks = jobs.rolled_back()
    recoveries = tuple(msgspec.structs.replace(report.recoveries[0], number=n) for n in range(1, 8))
    jobs.write_run(tmp_path, msgspec.structs.replace(report, recoveries=recoveries), chunks)
    assert print_timeline(tmp_path, console, recoveries=2)
    shown = text(console)
    assert "Recovery 2 of 7" in shown
    assert "Recovery 3 of 7" not in shown
    assert "5 more not drawn: `relight timeline " in shown
    assert "--recoveries 7` draws all." in shown


# --- missing and damaged files ----------------------------------------------------------------------------------
def test_an_empty_directory(tmp_path: Path, console: Console) -> None:
    assert not print_report(tmp_path, console)
    assert not print_timeline(tmp_path, console)
    shown = text(console)
    assert "There is no report in" in shown
    assert "There is no trace in" in shown


def test_a_job_that_still_runs_has_no_report(tmp_path: Path, console: Console) -> None:
    assert print_timeline(jobs.write_run(tmp_path, None, jobs.rolled_back()[1]), console)
    shown = text(console)
    assert "the job is still running, or its controller was killed" in shown
    assert "Step 8, the last one finished:" in shown


@pytest.mark.parametrize("damage", [b"", b"{", b"{}", b'{"job": 7}', b'{"job": "\xff"}'])
def test_a_damaged_report(tmp_path: Path, console: Console, damage: bytes) -> None:
    jobs.write_run(tmp_path, None, jobs.plain()[1])
    (tmp_path / "report.json").write_bytes(damage)
    assert not print_report(tmp_path, console)
    assert print_timeline(tmp_path, console)
    assert "is damaged or from another version of relight" in text(console)


def test_a_report_that_cannot_be_read(tmp_path: Path, console: Console) -> None:
    (tmp_path / "report.json").mkdir()
    assert not print_report(tmp_path, console)
    assert "cannot be read: Is a directory." in text(console)


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_trace_cut_short_is_drawn_as_far_as_it_goes(tmp_path: Path, console: Console, cut: int) -> None:
    run_dir = jobs.write_run(tmp_path, *jobs.rolled_back())
    trace = run_dir / "trace.jsonl"
    trace.write_bytes(trace.read_bytes()[: -cut - 1])
    assert print_timeline(run_dir, console)
    shown = text(console)
    assert "⚡1" in shown
    assert "1 line of the trace could not be read (cut short?) and left out." in shown


@pytest.mark.parametrize("garbage", [b"\x00\xff\n", b"[]\n", b'{"process": "w0"}\n', b"null\n"])
def test_garbage_in_a_trace_is_left_out(tmp_path: Path, console: Console, garbage: bytes) -> None:
    run_dir = jobs.write_run(tmp_path, *jobs.rolled_back())
    trace = run_dir / "trace.jsonl"
    trace.write_bytes(garbage + trace.read_bytes())
    assert print_timeline(run_dir, console)
    assert "1 line of the trace could not be read" in text(console)


def test_a_line_without_an_end_is_never_held_whole(tmp_path: Path) -> None:
    good = msgspec.json.encode(jobs.plain()[1][0])
    (tmp_path / "trace.jsonl").write_bytes(b"x" * 50_000 + b"\n" + good + b"\n" + b"y" * 50_000)
    reader = TraceReader(tmp_path, max_line_bytes=4096)
    assert [chunk.process for chunk in reader] == ["w0"]
    assert reader.unreadable_lines == 2


def test_the_part_of_a_recovery_that_is_no_longer_kept(tmp_path: Path, console: Console) -> None:
    report, _ = jobs.rolled_back()
    later = [Worker(f"w{rank}", rank, generation=2).step(90_000, 900).chunk() for rank in range(3)]
    assert print_timeline(jobs.write_run(tmp_path, report, later), console)
    assert "This part of the trace is no longer there" in text(console)


def test_an_empty_trace(tmp_path: Path, console: Console) -> None:
    assert not print_timeline(jobs.write_run(tmp_path, JobReport(job="j"), []), console)
    assert "There was no recovery. The trace holds no finished step." in text(console)


def test_a_terminal_that_is_not_utf_8_gets_ascii(tmp_path: Path) -> None:
    raw = io.BytesIO()
    plain = Console(width=100, file=io.TextIOWrapper(raw, encoding="ascii"))
    assert print_timeline(jobs.write_run(tmp_path, *jobs.rolled_back()), plain)
    plain.file.flush()
    assert b"X>p" in raw.getvalue()


# --- the trace's two files --------------------------------------------------------------------------------------
def test_the_older_part_is_read_first(tmp_path: Path) -> None:
    early, late = (Worker("w0", 0).step(100 * step, step).chunk() for step in (3, 4))
    jobs.write_run(tmp_path, None, [early])
    (tmp_path / "trace.jsonl").rename(tmp_path / "trace.1.jsonl")
    jobs.write_run(tmp_path, None, [late])
    reader = TraceReader(tmp_path)
    assert [chunk.records[0][2] for chunk in reader] == [3, 4]
    assert latest_finished_step(reader) == 4
    assert first_stamp_ns(reader) == WALL * 10**9 + 300 * 10**6


def test_a_large_trace_is_never_held_whole(tmp_path: Path, console: Console) -> None:
    report, _ = jobs.plain()
    with (tmp_path / "trace.jsonl").open("wb") as file:
        for first in range(0, 20_000, 20):
            for rank in range(4):
                worker = Worker(f"w{rank}", rank)
                for step in range(first, first + 20):
                    worker.step(100 * step, step)
                file.write(msgspec.json.encode(worker.chunk()) + b"\n")
    size = (tmp_path / "trace.jsonl").stat().st_size
    assert size > 10_000_000
    jobs.write_report(tmp_path, msgspec.structs.replace(report, world_size=4, wall_seconds=2000.0))
    tracemalloc.start()
    try:
        assert print_timeline(tmp_path, console, step=12_345)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "step 12345" in text(console)
    assert peak < size / 4
