"""All benchmarks, one after another: ``python -m benchmarks [--only NAME ...] [--quick]``.

Each runs in a process of its own, so that one that fails takes nothing else with it. Nothing else should run on the
machine meanwhile. Results go to ``benchmarks/results``, those of a quick run to a folder beneath it: they show that
everything works, and little more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.documents import RESULTS, command, read_document
from benchmarks.recovery.peers import REPOSITORY, SOURCES
from benchmarks.summary import ORDER, targets, write_summary

END_DEADLINE_S = 90.0  # for a benchmark that was interrupted, to end its jobs


@dataclass(frozen=True)
class Benchmark:
    """One of them, with its arguments and about how long it takes on two idle cores, in full and quick."""

    name: str
    module: str
    what: str
    full_s: float
    quick_s: float
    full: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    output_flag: str = "--output"


BENCHMARKS = (
    Benchmark(
        "recovery",
        "benchmarks.recovery.run",
        "recovery beside torchrun and torchft",
        full_s=560,
        quick_s=80,
        quick=("--rounds", "1", "--systems", "relight", "torchrun", "torchft"),
    ),
    Benchmark(
        "detection",
        "benchmarks.detection",
        "noticing failures, stopping survivors",
        full_s=200,
        quick_s=65,
        quick=("--faults", "3"),
    ),
    Benchmark(
        "controller",
        "benchmarks.controller",
        "the controller killed a hundred times",
        full_s=400,
        quick_s=60,
        quick=("--kills", "4"),
    ),
    Benchmark(
        "overhead",
        "benchmarks.overhead",
        "step time without failures",
        full_s=410,
        quick_s=45,
        quick=("--quick", "--budget-s", "4"),
    ),
    Benchmark(
        "step_parts",
        "benchmarks.step_parts",
        "the parts of a small step",
        full_s=200,
        quick_s=40,
        quick=("--quick",),
    ),
    Benchmark(
        "verify",
        "benchmarks.verify",
        "comparing the replicas' state",
        full_s=220,
        quick_s=35,
        quick=("--quick", "--budget-s", "4"),
    ),
    Benchmark(
        "buddy",
        "benchmarks.buddy",
        "snapshots in a buddy's memory",
        full_s=300,
        quick_s=90,
        quick=("--quick", "--budget-s", "4"),
    ),
    Benchmark(
        "scaling",
        "benchmarks.scaling",
        "recovery against the number of workers",
        full_s=120,
        quick_s=35,
        quick=("--workers", "2", "4", "8", "--kills", "1"),
    ),
    Benchmark(
        "layouts",
        "benchmarks.layouts",
        "recovery of divided state beside DDP's",
        full_s=240,
        quick_s=60,
        quick=("--rounds", "1", "--kills", "1"),
    ),
    Benchmark(
        "deciding",
        "benchmarks.deciding",
        "the controller's own work against the number of ranks",
        full_s=40,
        quick_s=3,
        quick=("--rounds", "1", "--sizes", "8", "512", "10000"),
    ),
    Benchmark(
        "publish",
        "benchmarks.publish",
        "fresh weights in four engines",
        full_s=420,
        quick_s=60,
        quick=("--rounds", "1", "--mib", "256", "--no-curves"),
    ),
    Benchmark(
        "first_updates",
        "benchmarks.first_updates",
        "the first updates of new engines beside later ones",
        full_s=120,
        quick_s=40,
        quick=("--mib", "64", "--updates", "2"),
    ),
    Benchmark(
        "restore",
        "benchmarks.restore",
        "state for a replacement beside torchft's transports",
        full_s=60,
        quick_s=25,
        quick=("--rounds", "1", "--mib", "256"),
    ),
    Benchmark(
        "hosts",
        "benchmarks.hosts",
        "the same between hosts, on lines of limited speed",
        full_s=300,
        quick_s=40,
        quick=("--rounds", "1", "--mib", "128", "--limited-mib", "32", "--speeds", "1000"),
    ),
    Benchmark(
        "memory",
        "benchmarks.memory",
        "memory over ten thousand steps and thousands of failures",
        full_s=230,
        quick_s=60,
        quick=("--steps", "4000", "--failures", "600"),
    ),
)
# Long by themselves, or in need of a browser: only when asked for. The last measures torch rather than relight.
EXTRA = (
    Benchmark(
        "agents",
        "benchmarks.agents",
        "the controller with up to ten thousand agents over real sockets",
        full_s=300,
        quick_s=60,
        quick=("--agents", "10", "100", "--rounds", "1"),
    ),
    Benchmark(
        "at_scale",
        "benchmarks.at_scale",
        "recovery from 8 to 100,000 devices in virtual time",
        full_s=60,
        quick_s=10,
        quick=("--sizes", "8", "64", "512"),
    ),
    Benchmark(
        "soak",
        "benchmarks.soak",
        "a thousand faults of all kinds in one job",
        full_s=2400,
        quick_s=120,
        quick=("--faults", "20"),
    ),
    Benchmark(
        "dashboard",
        "benchmarks.dashboard",
        "the dashboard with a thousand ranks, and what it costs",
        full_s=400,
        quick_s=100,
        quick=("--ranks", "100", "--hours", "1", "--blocks", "4"),
    ),
    Benchmark(
        "strangers",
        "benchmarks.strangers",
        "a flood of nonsense against a live controller",
        full_s=1200,
        quick_s=60,
        quick=("--frames", "2000"),
    ),
    Benchmark(
        "simulator",
        "benchmarks.simulator",
        "simulated jobs, every order of small ones, planted bugs",
        full_s=3600,
        quick_s=120,
        quick=("--schedules", "5000", "--searches", "1", "--seconds", "30"),
    ),
    Benchmark(
        "stop_collective",
        "benchmarks.stop_collective",
        "ways out of a gloo collective",
        full_s=900,
        quick_s=400,
        quick=("--trials", "8"),
        output_flag="--out",
    ),
)


def run_all(chosen: Sequence[Benchmark], folder: Path, *, quick: bool) -> list[str]:
    """Run them; returns the names of those that failed."""
    failed = []
    spent_s = expected_s = 0.0
    for number, benchmark in enumerate(chosen):
        # A machine that took twice as long so far will go on to do so.
        pace = spent_s / expected_s if expected_s else 1.0
        left_s = pace * sum(_expected_s(one, quick) for one in chosen[number:])
        title = f"[{number + 1}/{len(chosen)}] {benchmark.name}: {benchmark.what}"
        print(f"\n=== {title}; about {left_s / 60:.0f} min left in all", flush=True)
        started = time.monotonic()
        if run_one(benchmark, folder, quick=quick) != 0:
            failed.append(benchmark.name)
        spent_s += time.monotonic() - started
        expected_s += _expected_s(benchmark, quick)
    return failed


def _expected_s(benchmark: Benchmark, quick: bool) -> float:
    return benchmark.quick_s if quick else benchmark.full_s


def run_one(benchmark: Benchmark, folder: Path, *, quick: bool) -> int:
    """Run one in a process of its own; returns its exit status. However this ends, that process has ended too."""
    arguments = benchmark.quick if quick else benchmark.full
    output = (benchmark.output_flag, str(folder / f"{benchmark.name}.json"))
    paths = [*map(str, SOURCES), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-m", benchmark.module, *arguments, *output],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"},
    )
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()  # a Ctrl-C has reached it already, a SIGTERM to this process alone has not
            try:
                process.wait(END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    known = {benchmark.name: benchmark for benchmark in (*BENCHMARKS, *EXTRA)}
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="All benchmarks, one after another")
    parser.add_argument("--only", metavar="NAME,...", help=f"some of them: {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help="about 4 minutes, to see that everything works")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [benchmark.name for benchmark in BENCHMARKS]
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(known)}")
    load = os.getloadavg()[0]
    if load > 1.0:
        print(f"The load of this machine is {load:.1f}: the figures will say more about that than about relight.")
    folder = RESULTS / "quick" if options.quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    failed = run_all([known[name] for name in names], folder, quick=options.quick)
    write_summary(folder)
    documents = [read_document(path) for name in ORDER if (path := folder / f"{name}.json").exists()]
    print(f"\n=== {targets(documents)}\n\nwritten to {folder.relative_to(REPOSITORY)}/README.md")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    command(main)
