"""The controller with up to ten thousand agents: the real one, over real sockets, with agents that are pretended.

A process of its own plays the agents (`agents_crowd.py`): it speaks the true protocol, with handshake, samples and
traces at the pace of production, confirmations, and answers to every order of a recovery. There are no workers beyond
them. One rank dies; the controller has to decide, and to get every order out to every agent.

What the library of collectives does meanwhile is not in this: a rank puts one key into the store and waits for that of
rank 0, as NCCL's ranks do.

Run by ``python -m benchmarks.agents``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import secrets
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.agents_crowd import Crowd
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
from benchmarks.figures import markdown_table, mebibytes, milliseconds
from benchmarks.recovery.peers import REPOSITORY, JobFailed
from relight.launch.private_dir import make_private_dir
from relight.wire.connection.address import read_address
from relight.wire.settings import JobSettings

SIZES = ((10, 1), (100, 1), (1000, 1), (10_000, 1), (1000, 8))  # agents, ranks of each
BARE = ((1000, 1), (1000, 8), (4000, 1))  # without samples and store: what a recovery costs by itself
ROUNDS = 3  # failures, one after the other
IDLE_S = 10.0
FILES = 20_000
STAGES = ("stop", "restore", "resume")


def measure(agents: int, ranks_each: int, rounds: int, *, meets: bool = True) -> dict[str, Any]:
    """One controller with so many agents: idle, then a few failures."""
    run_dir = Path("/tmp") / f"relight-agents-{os.getpid()}-{agents}-{ranks_each}"
    run_dir.mkdir()
    settings = JobSettings(
        job="crowd",
        script="nothing.py",
        world_size=agents * ranks_each,
        nodes=agents,
        standbys=1,
        run_dir=str(run_dir),
    )
    token = secrets.token_bytes(32)
    private_dir = make_private_dir(settings, token)
    with (run_dir / "controller.txt").open("wb") as output:
        controller = subprocess.Popen(
            [sys.executable, "-m", "relight.server", "--private-dir", str(private_dir), "--parent", str(os.getpid())],
            cwd=REPOSITORY,
            stdout=output,
            stderr=output,
        )
    try:
        return asyncio.run(_measure(controller, private_dir, token, agents, ranks_each, rounds, meets=meets))
    except BaseException:
        print((run_dir / "controller.txt").read_text()[-3000:], file=sys.stderr)
        raise
    finally:
        controller.kill()
        controller.wait()
        shutil.rmtree(private_dir, ignore_errors=True)
        shutil.rmtree(run_dir, ignore_errors=True)


async def _measure(
    controller: subprocess.Popen[bytes],
    private_dir: Path,
    token: bytes,
    agents: int,
    ranks_each: int,
    rounds: int,
    *,
    meets: bool,
) -> dict[str, Any]:
    process = psutil.Process(controller.pid)
    address = None
    while address is None:
        await asyncio.sleep(0.02)
        address = read_address(private_dir)
        if controller.poll() is not None:
            raise JobFailed(f"the controller ended with status {controller.returncode}")
    empty_bytes = process.memory_info().rss
    crowd = Crowd(address, token, agents, ranks_each, meets=meets)
    started = time.monotonic()
    await crowd.join()
    joined_s = time.monotonic() - started
    await crowd.until_training()
    training_s = time.monotonic() - started
    pulse = asyncio.create_task(crowd.pulse())
    await asyncio.sleep(3.0)
    begun, cpu, heard = time.monotonic(), _cpu_s(process), crowd.samples_sent
    await asyncio.sleep(IDLE_S)
    spent = time.monotonic() - begun
    figures: dict[str, Any] = {
        "agents": agents,
        "ranks": agents * ranks_each,
        "meets": meets,
        "join_s": joined_s,
        "training_s": training_s,
        "idle_cpu": (_cpu_s(process) - cpu) / spent,
        "samples_per_s": (crowd.samples_sent - heard) / spent,
        "bytes_per_agent": (process.memory_info().rss - empty_bytes) / agents,
        "rounds": [],
    }
    if not meets:
        pulse.cancel()  # what a recovery costs by itself: nothing else is said meanwhile
    for number in range(rounds):
        await crowd.until_standby()
        await asyncio.sleep(1.0)
        rank = (number * 7919) % (agents * ranks_each)
        figures["rounds"].append(await crowd.fail(rank, lambda: _cpu_s(process)))
    figures["peak_bytes"] = process.memory_info().rss
    pulse.cancel()
    crowd.close()
    return figures


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def run(sizes: list[tuple[int, int]], rounds: int) -> Document:
    """All sizes; each in a process of its own, since memory that was taken once is not given back."""
    document = start_document("agents", sizes=sizes, rounds=rounds, idle_s=IDLE_S)
    progress = Progress(len(sizes) + len(BARE))
    rows: list[dict[str, Any]] = []
    document["not_measured"] = []
    bare: list[dict[str, Any]] = []
    for agents, ranks_each, meets in [*((*size, True) for size in sizes), *((*size, False) for size in BARE)]:
        arguments = ["--one", str(agents), str(ranks_each), "--rounds", str(rounds), *(() if meets else ("--bare",))]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.agents", *arguments],
            check=False,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            document["not_measured"].append(f"{agents} agents")
            progress.skipped(f"{agents} agents")
            continue
        row = json.loads(done.stdout)
        (rows if meets else bare).append(row)
        progress.done(f"{agents:,} agents: {row['rounds']}")
    document["rows"], document["bare_rows"] = rows, bare
    if len(bare) == len(BARE):
        document["recovery_costs"] = recovery_costs(bare)
    largest = max(rows, key=lambda row: row["agents"], default=None)
    if largest is not None:
        document["headline"] = (
            f"{largest['agents']:,} agents: a death decided upon and every order to stop received by its agent after "
            f"{milliseconds(_median(largest, 'stop_s'))}, the whole recovery but for the workers' own part "
            f"{milliseconds(_median(largest, 'total_s'))}; idle, the controller takes {largest['idle_cpu']:.0%} of a "
            f"core and {largest['bytes_per_agent'] / 1024:.0f} KiB for each agent."
        )
    at_10_000 = next((row for row in rows if row["agents"] == 10_000), None)
    add_verdicts(
        document,
        [
            Verdict(f"10,000 agents: {what}", None if at_10_000 is None else _median(at_10_000, f"{stage}_s"), 1.0, "s")
            for stage, what in (
                ("stop", "from a death to the last order to stop"),
                ("restore", "from the last report to the last order to restore"),
                ("resume", "from the last report to the last order to train on"),
            )
        ],
    )
    return document


def recovery_costs(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of the controller's processor for one recovery, for each agent and for each rank: least squares."""
    points = [(row["agents"], row["ranks"], _median(row, "cpu_s") or 0.0) for row in rows]
    aa, ar, rr = (sum(x * y for x, y in pairs) for pairs in (
        [(a, a) for a, _, _ in points], [(a, r) for a, r, _ in points], [(r, r) for _, r, _ in points]
    ))  # fmt: skip
    ac, rc = sum(a * c for a, _, c in points), sum(r * c for _, r, c in points)
    determinant = aa * rr - ar * ar
    return {
        "for_each_agent_s": max(0.0, (ac * rr - rc * ar) / determinant),
        "for_each_rank_s": max(0.0, (rc * aa - ac * ar) / determinant),
    }


def _median(row: dict[str, Any], name: str) -> float | None:
    values = [one[name] for one in row["rounds"] if name in one]
    return float(statistics.median(values)) if values else None


def render(document: Document) -> str:
    """Markdown."""
    rows = [
        [
            f"{row['agents']:,}",
            f"{row['ranks']:,}",
            f"{row['join_s']:.2f} s",
            f"{row['idle_cpu']:.1%}",
            f"{row['samples_per_s']:.0f}",
            f"{row['bytes_per_agent'] / 1024:.1f} KiB",
            mebibytes(row["peak_bytes"]),
            *(milliseconds(_median(row, f"{stage}_s")) for stage in STAGES),
            milliseconds(_median(row, "total_s")),
            f"{milliseconds(_median(row, 'stop_cpu_s'))} / {milliseconds(_median(row, 'cpu_s'))}",
        ]
        for row in document["rows"]
    ]
    header = [
        *("agents", "ranks", "all have joined after", "controller's core, idle", "messages of samples a second"),
        *("memory of an agent", "controller's memory in the end"),
        *("death to last Stop", "last report to last Restore", "last report to last Resume", "recovery"),
        "controller's CPU, to last Stop / in all",
    ]
    return "\n\n".join(
        [
            "The real controller and its journal, on loopback. One process plays all agents, so both cores of this "
            "machine are busy in a recovery, and what that process needs to read and to answer is in these times. They "
            "end when the last agent has read its order. The recovery has no worker's part in it: no copying, no "
            f"forming of groups. Medians of {document['settings']['rounds']} failures.",
            markdown_table(header, rows),
            markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)),
            *_costs(document),
            *(f"Not measured: {text}" for text in document["not_measured"]),
            *document.get("notes", []),
        ]
    )


def _costs(document: Document) -> list[str]:
    found = document.get("recovery_costs")
    if found is None:
        return []
    each_agent, each_rank = found["for_each_agent_s"] * 1e6, found["for_each_rank_s"] * 1e6
    what = "a recovery by itself, without samples and store"
    return [
        f"Of the controller's processor, {what}, takes {each_agent:.0f} us for each agent (three orders, "
        f"three messages) and {each_rank:.0f} us for each rank (three reports): least squares over "
        + ", ".join(f"{row['agents']:,} agents with {row['ranks']:,} ranks" for row in document["bare_rows"])
        + "."
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="The controller with up to ten thousand agents")
    parser.add_argument("--agents", type=int, nargs="+", help="only these numbers of agents, with --ranks each")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=RESULTS / "agents.json")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, most), most))
    if options.one:
        print(json.dumps(measure(options.one[0], options.one[1], options.rounds, meets=not options.bare)))
        return
    sizes = [(count, options.ranks) for count in options.agents] if options.agents else list(SIZES)
    write_document(run(sizes, options.rounds), render, options.output)


if __name__ == "__main__":
    command(main)
