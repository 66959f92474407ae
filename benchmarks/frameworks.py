"""Steps of frameworks under `relight run`, beside the framework's own run: `python -m benchmarks.frameworks NAME...`.

Both run the same script (framework_job.py) on the same two ranks, in turns. A run replaces the rows of its frameworks
in `results/frameworks.json` and `.md`.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DEADLINE_SECONDS = 600
HEAD = """# Steps of frameworks

Made by `python -m benchmarks.frameworks`: the same script under torchrun, where the framework trains by itself, and
under `relight run`, on two ranks, in turns. Medians of the rounds; a round's wall time is the median of its steps, its
CPU time the mean of a step of rank 0. The load is the machine's before a round: other programs ran beside it where it
is much above 0, and wall times say little then.

"""


def command(kind: str, framework: str, output: str, steps: int) -> list[str]:
    """Return the command of a run."""
    script = [str(ROOT / "benchmarks" / "framework_job.py"), framework, "--output", output, "--steps", str(steps)]
    if kind == "alone":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    flags = ["--nproc-per-node", "2", "--standby", "0", "--run-dir", f"{output}/run"]
    return [sys.executable, "-m", "relight", "run", *flags, *script]


def measure(kind: str, framework: str, steps: int) -> dict[str, float]:
    """Run once. Returns milliseconds, and the load before."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as output:
        done = subprocess.run(
            command(kind, framework, output, steps),
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
    found = re.search(r"median ([\d.]+) ms, cpu ([\d.]+) ms", done.stdout)
    if done.returncode or found is None:
        raise SystemExit(f"{kind} {framework}: status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return {"wall_ms": float(found[1]), "cpu_ms": float(found[2]), "load": round(load, 1)}


def compare(framework: str, rounds: int, steps: int) -> dict[str, Any]:
    """Run in turns."""
    runs: dict[str, list[dict[str, float]]] = {"alone": [], "relight": []}
    for number in range(rounds):
        for kind in sorted(runs, reverse=bool(number % 2)):
            runs[kind].append(measure(kind, framework, steps))
            print(framework, kind, runs[kind][-1], flush=True)
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "torch": version("torch"),
        "version": version(framework),
        "steps": steps,
        "runs": runs,
    }


def table(results: dict[str, Any]) -> str:
    """Return the page."""
    names = ["framework", "torch", "rounds", "load", "wall alone", "wall relight", "CPU alone", "CPU relight", "date"]
    lines = [names, ["---"] * len(names)]
    for framework, result in sorted(results.items()):
        runs = result["runs"]
        loads = [run["load"] for kind in runs.values() for run in kind]
        times = [
            f"{statistics.median(run[what] for run in runs[kind]):.1f} ms"
            for what in ("wall_ms", "cpu_ms")
            for kind in ("alone", "relight")
        ]
        load = f"{min(loads):.0f} to {max(loads):.0f}"
        name = f"{framework} {result['version']}"
        lines.append([name, result["torch"], str(len(runs["alone"])), load, *times, result["date"]])
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", nargs="+", choices=["transformers", "trl", "torchtitan"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=170)
    options = parser.parse_args(arguments)
    path = RESULTS / "frameworks.json"
    for framework in options.framework:
        found = compare(framework, options.rounds, options.steps)
        results = json.loads(path.read_text()) if path.exists() else {}
        results[framework] = found
        path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        (RESULTS / "frameworks.md").write_text(table(results))


if __name__ == "__main__":
    main()
