"""The dashboard with a thousand ranks and hours of history, and what it costs a job to be watched.

A made-up job's files are written as a real one's would be, up to now, and go on growing while a real browser (Debian's
chromium, headless) shows the page. Frames are counted by `requestAnimationFrame`. Then a real job trains, and a
dashboard with an open page comes and goes in turns.

Run by ``python -m benchmarks.dashboard``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.documents import (
    RESULTS,
    Document,
    Progress,
    Verdict,
    add_verdicts,
    command,
    start_document,
    verdict_rows,
    write_document,
)
from benchmarks.figures import markdown_table, mebibytes, median_interval, percentile
from benchmarks.jobs import RelightJob, wait_until
from benchmarks.recovery.peers import trial_directory
from relight.core.protocol.position import Phase
from relight.timeline.model.trace import TraceReader
from tests.dashboard.made_up import MadeUpJob
from tests.dashboard.served import Served
from tests.dashboard.webdriver import MISSING, Browser, is_there

RANKS = 1000
HOURS = 3.0
HISTORY_STEP_S = 30.0
LIVE_STEP_S = 1.0
FAILURES = 12
LOAD_S = 300.0
VIEW_S = 6.0  # of frames for each way of looking
BLOCK_S = 6.0  # with or without a dashboard
BLOCKS = 20
STEP_S = 0.1
WARM_UP_S = 8.0

# What the page does in each frame while frames are counted.
VIEWS = {
    "follow, rows of 14 pixels": "t.setAllRanks(false); t.setFollow(true)",
    "follow, all ranks": "t.setAllRanks(true); t.setFollow(true)",
    "panning over hours, all ranks": "t.setAllRanks(true); t.view(0, t.now()); window.move = () => t.pan(6)",
    "panning over minutes": "t.setAllRanks(false); t.view(t.now() - 4e11, t.now() - 1e11); "
    "window.move = () => t.pan(-6)",
    "zooming in and out, all ranks": "t.setAllRanks(true); t.showAll(); let n = 0; "
    "window.move = () => t.zoom(n++ % 240 < 120 ? 0.97 : 1 / 0.97)",
    "scrolling through the ranks": "t.setAllRanks(false); t.view(t.now() - 3e11, t.now()); let d = 1; "
    "window.move = () => { const s = t.scroll; t.scrollRows(d); if (t.scroll === s) d = -d }",
}
FRAMES = """const t = relightTimeline; window.move = null; %s;
const move = window.move; t.frames = [];
return new Promise((done) => {
  const until = performance.now() + arguments[0];
  const next = () => {
    if (move) move();
    if (performance.now() < until) requestAnimationFrame(next); else { const f = t.frames; t.frames = null; done(f) }
  };
  requestAnimationFrame(next);
})"""


class Growing:
    """A made-up job that goes on, in a thread of its own."""

    def __init__(self, made: MadeUpJob) -> None:
        self._made = made
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._grow)
        self._thread.start()

    def _grow(self) -> None:
        made = self._made
        while not self._end.is_set():
            late = time.time() - made.wall - made.at
            if late > made.step_seconds:
                made.steps(1)
            self._end.wait(0.05)

    def close(self) -> None:
        self._end.set()
        self._thread.join()


def made_up(run_dir: Path, ranks: int, hours: float) -> MadeUpJob:
    """Hours of history, up to now, with failures in it."""
    steps = round(hours * 3600 / HISTORY_STEP_S)
    wall = time.time() - hours * 3600 - 60.0
    made = MadeUpJob(run_dir, ranks=ranks, wall=wall, step_seconds=HISTORY_STEP_S, standbys=2)
    for number in range(FAILURES):
        made.steps(steps // FAILURES - 1)
        made.fail(number * 83 % ranks, recovery_seconds=0.5 + 0.1 * number)
    made.step_seconds = LIVE_STEP_S
    return made


def wait_until_read(served: Served, version: int, started: float) -> tuple[float, float]:
    """Seconds since `started` until the page shows what goes on now, and until it knows all of the past."""
    present_s = 0.0
    with served.events() as events:
        for _, event in events:
            summary = event.get("summary", {})
            seconds = time.monotonic() - started
            if not present_s and summary.get("version", -1) >= version:
                present_s = seconds
            if present_s and summary and summary["gap_ns"] is None:
                return present_s, seconds
            if seconds > LOAD_S:
                raise TimeoutError(f"not read within {LOAD_S:g} s: {summary}")
    raise OSError("the dashboard closed the connection")


def measure_page(ranks: int, hours: float, workdir: Path, progress: Progress) -> dict[str, Any]:
    """Load, first paint, frames, memory."""
    made = made_up(workdir / "made-up", ranks, hours)
    size = (workdir / "made-up" / "trace.jsonl").stat().st_size
    version = made.step
    growing = Growing(made)
    started = time.monotonic()
    served = Served(workdir / "made-up")
    browser: Browser | None = None
    try:
        listening_s = time.monotonic() - started
        present_s, loaded_s = wait_until_read(served, version, started)
        process = psutil.Process(served.process.pid)
        progress.done(
            f"{ranks} ranks, {hours:g} h: the present after {present_s:.1f} s, all of it after {loaded_s:.1f} s, "
            f"{process.memory_info().rss >> 20} MiB"
        )
        browser = Browser()
        browser.open("about:blank")
        paints = []
        for _ in range(5):
            browser.open(served.url)
            browser.wait_for(f"relightTimeline.ranks.length === {ranks}", "all ranks are there")
            paints.append(browser.run(_PAINT))
        views = {}
        for name, script in VIEWS.items():
            before, begun = process.cpu_times(), time.monotonic()
            frames = browser.run(FRAMES % script, VIEW_S * 1e3)
            after = process.cpu_times()
            spent = after.user + after.system - before.user - before.system
            views[name] = {**frame_figures(frames), "server_cpu": spent / (time.monotonic() - begun)}
            progress.done(f"{name}: {views[name]['per_second']:.0f} frames a second")
        heap = browser.run("return performance.memory.usedJSHeapSize")
        return {
            "ranks": ranks,
            "hours": hours,
            "trace_bytes": size,
            "listening_s": listening_s,
            "present_s": present_s,
            "loaded_s": loaded_s,
            "paints": paints,
            "views": views,
            "server_rss_bytes": process.memory_info().rss,
            "page_heap_bytes": heap,
        }
    finally:
        if browser is not None:
            browser.close()
        served.close()
        growing.close()


_PAINT = """const paint = performance.getEntriesByName("first-contentful-paint")[0];
return { first_paint_ms: paint ? paint.startTime : null, ranks_shown_ms: performance.now() }"""


def frame_figures(frames: Sequence[float]) -> dict[str, float]:
    """Frames a second on average, the time of the slowest of a hundred, and the longest one."""
    gaps = [after - before for before, after in pairwise(frames)]
    return {
        "per_second": 1e3 * len(gaps) / (frames[-1] - frames[0]),
        "p99_ms": percentile(gaps, 0.99),
        "longest_ms": max(gaps),
    }


def measure_cost(blocks: int, workdir: Path, progress: Progress) -> dict[str, Any]:
    """Times of steps with and without a dashboard whose page is open, in turns, in one job."""
    with trial_directory(workdir) as directory:
        steps = round((blocks + 2) * BLOCK_S * 1.3 / STEP_S + WARM_UP_S / STEP_S)
        arguments = ("--steps", str(steps), "--pause", str(STEP_S - 0.006))
        job = RelightJob(directory, "tests.programs.train", *arguments, world_size=2, standbys=1)
        turns: list[tuple[bool, float, float]] = []  # watched, from, to (Unix time)
        shares: list[float] = []
        try:
            job.start()
            wait_until(lambda: _trains(job.run_dir), 120.0, "the job trained", job)
            time.sleep(WARM_UP_S)
            for block in range(blocks):
                watched = block % 2 == 1
                if not watched:
                    turns.append(_wait_block(watched))
                    continue
                served = Served(job.run_dir)
                stop = threading.Event()
                page = threading.Thread(target=_be_a_page, args=(served, stop))
                page.start()
                time.sleep(1.0)  # its start is not what is measured here
                process = psutil.Process(served.process.pid)
                before = process.cpu_times()
                turns.append(_wait_block(watched))
                after = process.cpu_times()
                shares.append((after.user + after.system - before.user - before.system) / BLOCK_S)
                stop.set()
                served.close()
                page.join()
                progress.done(f"block {block + 1} of {blocks}")
        finally:
            job.stop()
        return cost_figures(_step_times(job.run_dir), turns, shares)


def _trains(run_dir: Path) -> bool:
    return any(record[3] == Phase.OPTIMIZER for chunk in TraceReader(run_dir) for record in chunk.records)


def _wait_block(watched: bool) -> tuple[bool, float, float]:
    begun = time.time()
    time.sleep(BLOCK_S)
    return watched, begun, time.time()


def _be_a_page(served: Served, stop: threading.Event) -> None:
    """Requests of an open page: all events, and the newest tiles once a second. The browser itself is elsewhere."""
    asked = 0.0
    try:
        with served.events() as events:
            for _, event in events:
                if stop.is_set():
                    return
                if time.monotonic() - asked > 1.0:
                    asked = time.monotonic()
                    newest = event["known_ns"] >> 31
                    for tile in (newest - 1, newest):
                        served.get(f"/api/tiles?shift=23&tile={max(0, tile)}&first=0&rows=32&runs=1")
    except OSError:
        return  # it was closed first


def _step_times(run_dir: Path) -> list[tuple[float, float]]:
    """Return the end of each step of rank 0 (Unix time), and how long it took."""
    found = []
    begun: dict[int, int] = {}
    for chunk in TraceReader(run_dir):
        for stamp_ns, _, step, phase, _ in chunk.records if chunk.rank == 0 else ():
            if phase != Phase.FORWARD:
                continue
            begun[step] = stamp_ns
            if step - 1 in begun:
                seconds = (stamp_ns - begun.pop(step - 1)) / 1e9
                found.append(((stamp_ns + chunk.clock_offset_ns) / 1e9, seconds))
    return found


def cost_figures(
    steps: Sequence[tuple[float, float]], turns: Sequence[tuple[bool, float, float]], shares: Sequence[float]
) -> dict[str, Any]:
    """Medians of the step times of each block; each watched block against the mean of its neighbours."""
    medians = [
        (watched, statistics.median([seconds for at, seconds in steps if since <= at < until]))
        for watched, since, until in turns
    ]
    ratios = []
    for index, (watched, median) in enumerate(medians):
        beside = [medians[i][1] for i in (index - 1, index + 1) if 0 <= i < len(medians)]
        if watched:
            ratios.append(median / statistics.mean(beside) - 1)
    return {
        "step_s": statistics.median(median for watched, median in medians if not watched),
        "overhead": statistics.median(ratios),
        "interval": median_interval(ratios),
        "blocks": len(ratios),
        "server_cpu": statistics.median(shares),
    }


def run(ranks: int, hours: float, blocks: int, workdir: Path) -> Document:
    """Everything."""
    document = start_document("dashboard", ranks=ranks, hours=hours, blocks=blocks)
    progress = Progress(1 + len(VIEWS) + blocks // 2)
    document["page"] = page = measure_page(ranks, hours, workdir, progress)
    document["cost"] = cost = measure_cost(blocks, workdir, progress)
    slowest = min(view["per_second"] for view in page["views"].values())
    paint = statistics.median(each["first_paint_ms"] for each in page["paints"]) / 1e3
    low, high = (bound * 100 for bound in cost["interval"])
    add_verdicts(
        document,
        [
            Verdict(
                "time of a frame, slowest way of looking", 1e3 / slowest, 1e3 / 30, "ms", "at most: 30 frames a second"
            ),
            Verdict("first paint", paint, 1.0, "s"),
            Verdict(
                "cost of watching a job with 10 steps a second",
                cost["overhead"] * 100,
                0.5,
                "% of the step time",
                f"95 % interval {low:+.2f} to {high:+.2f} %",
            ),
        ],
    )
    document["headline"] = (
        f"{ranks} ranks with {hours:g} hours of history at {slowest:.0f} frames a second or better; first paint after "
        f"{paint:.2f} s; watching costs {cost['overhead'] * 100:+.2f} % of a step."
    )
    return document


def render(document: Document) -> str:
    """Markdown."""
    page, cost = document["page"], document["cost"]
    header = ["way of looking", "frames a second", "99th percentile", "longest", "server, of one core"]
    rows = [
        [
            name,
            f"{view['per_second']:.1f}",
            f"{view['p99_ms']:.0f} ms",
            f"{view['longest_ms']:.0f} ms",
            f"{view['server_cpu'] * 100:.0f} %",
        ]
        for name, view in page["views"].items()
    ]
    paint = statistics.median(each["first_paint_ms"] for each in page["paints"])
    shown = statistics.median(each["ranks_shown_ms"] for each in page["paints"])
    return "\n\n".join(
        [
            f"{page['ranks']} made-up ranks with {page['hours']:g} hours of history (a trace of "
            f"{mebibytes(page['trace_bytes'])}, {FAILURES} failures), which go on with a step a second, in headless "
            "chromium without a GPU, on the same two cores as the server. 60 frames a second is the most that can be.",
            markdown_table(header, rows),
            f"First paint {paint:.0f} ms after the request, all ranks shown after {shown:.0f} ms (medians of "
            f"{len(page['paints'])}). A server started beside all this listens after {page['listening_s']:.2f} s, "
            f"shows what goes on now after {page['present_s']:.1f} s, and has read all of the past after "
            f"{page['loaded_s']:.1f} s. Memory: server {mebibytes(page['server_rss_bytes'])}, page "
            f"{mebibytes(page['page_heap_bytes'])} (heap of its scripts).",
            "## What it costs to be watched",
            f"A real job, two workers, a step of {cost['step_s'] * 1e3:.1f} ms; a dashboard with an open page comes "
            f"and goes every {BLOCK_S:g} s ({cost['blocks']} times), its browser being elsewhere. Step times "
            f"{cost['overhead'] * 100:+.2f} % [{cost['interval'][0] * 100:+.2f}, {cost['interval'][1] * 100:+.2f}]; "
            f"the dashboard's process takes {cost['server_cpu'] * 100:.1f} % of one core, at low priority (nice 10).",
            markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The dashboard with many ranks, and what it costs")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--hours", type=float, default=HOURS)
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--output", type=Path, default=RESULTS / "dashboard.json")
    options = parser.parse_args()
    if not is_there():
        parser.error(MISSING)
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as workdir:
        document = run(options.ranks, options.hours, options.blocks, Path(workdir))
    write_document(document, render, options.output)


if __name__ == "__main__":
    command(main)
