"""The cost of the controller's own work for one recovery, against the number of ranks: the core alone, no sockets.

The core is given the facts of a whole job: every rank starts and enters, one is killed, every survivor stands still,
every rank is restored. Eight ranks to an agent. Its work must grow no faster than the number of reports, which is
that of the ranks: then a hundred thousand of them are still decided upon in seconds, most of them while reports are
on their way.

Run by ``python -m benchmarks.deciding``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

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
from benchmarks.figures import markdown_table
from relight.core.controller import Controller, ControllerSettings
from relight.core.protocol.commands import Command, Restore, Resume, Spawn, Stop
from relight.core.protocol.events import (
    AgentJoined,
    Event,
    ProcessExited,
    ProcessStarted,
    Restored,
    RestoreProgress,
    StandbyReady,
    Stopped,
    TrainingEntered,
)
from relight.core.protocol.position import Phase, Position

SIZES = (8, 64, 512, 4096, 10_000, 32_768, 100_000)
RANKS_PER_AGENT = 8
ROUNDS = 3
VERSION = 5


class Job:
    """One job's core, and the seconds that it took for each part of a recovery."""

    def __init__(self, ranks: int) -> None:
        self.core = Controller(ControllerSettings(world_size=ranks, standbys=1))
        agents = -(-ranks // RANKS_PER_AGENT) + 1
        for number in range(agents):
            for order in self.tell(AgentJoined(agent=f"node-{number}", slots=RANKS_PER_AGENT)):
                if isinstance(order, Spawn):
                    self.tell(ProcessStarted(process=order.process, pid=1))
        for rank, name in self.core.rank_processes().items():
            self.tell(
                TrainingEntered(process=name, rank=rank, version=0, layout_digest="l", state_digest="s", until=10**6)
            )
        for standby in self.core.members.standbys():
            self.tell(StandbyReady(process=standby.name, layout_digest="l"))

    def tell(self, event: Event) -> tuple[Command, ...]:
        return self.core.handle(event, 0.0)

    def recover(self) -> dict[str, float]:
        """Kill rank 0's process and go on to Resume; the seconds of each part."""
        victim = self.core.rank_processes()[0]
        where = Position(
            generation=1, phase=Phase.FORWARD, step=VERSION, version=VERSION, private_versions=(VERSION - 1, VERSION)
        )
        started = time.perf_counter()
        orders = self.tell(
            ProcessExited(process=victim, exit_status=-9, evidence="killed", position=where, noticed_ns=0)
        )
        noticed = time.perf_counter()
        _expect(orders, Stop)
        generation = self.core.generation
        for rank, process in self.core.members.by_rank().items():
            blank = process.replacement
            orders = self.tell(
                Stopped(
                    process=process.name,
                    rank=rank,
                    generation=generation,
                    step=VERSION,
                    version=0 if blank else VERSION,
                    lineage="" if blank else "lineage",
                    prepared=-1,
                    torn=False,
                    blank=blank,
                    stop_seconds=0.0,
                    restore_address="/nowhere",
                )
            )
        stopped = time.perf_counter()
        _expect(orders, Restore)
        for rank, name in self.core.rank_processes().items():
            orders = self.tell(
                Restored(
                    process=name,
                    rank=rank,
                    generation=generation,
                    version=VERSION,
                    lineage="lineage",
                    state_digest="s",
                    layout_digest="l",
                    progress=RestoreProgress(),
                )
            )
        _expect(orders, Resume)
        restored = time.perf_counter()
        return {"stop_s": noticed - started, "decide_s": stopped - noticed, "resume_s": restored - stopped}


def _expect(orders: tuple[Command, ...], kind: type[Command]) -> None:
    if not any(isinstance(order, kind) for order in orders):
        raise RuntimeError(f"the core gave {orders} and no {kind.__name__}")


def run(sizes: list[int], rounds: int) -> Document:
    """All sizes."""
    document = start_document("deciding", sizes=sizes, ranks_per_agent=RANKS_PER_AGENT, rounds=rounds)
    progress = Progress(len(sizes))
    rows: list[dict[str, Any]] = []
    for ranks in sizes:
        measured = [Job(ranks).recover() for _ in range(rounds)]
        median = {name: statistics.median(one[name] for one in measured) for name in measured[0]}
        rows.append({"ranks": ranks, **median, "total_s": sum(median.values())})
        progress.done(f"{ranks:,} ranks: {rows[-1]['total_s']:.3f} s")
    document["rows"] = rows
    document["headline"] = "One recovery costs the core " + ", ".join(
        f"{row['total_s'] * 1e3:.3g} ms at {row['ranks']:,} ranks" for row in rows
    )
    at_10_000 = next((row["total_s"] for row in rows if row["ranks"] == 10_000), None)
    add_verdicts(document, [Verdict("the core's own time for a recovery of 10,000 ranks", at_10_000, 1.0, "s")])
    return document


def render(document: Document) -> str:
    """Markdown."""
    rows = [
        [
            f"{row['ranks']:,}",
            f"{row['stop_s'] * 1e3:.3g} ms",
            f"{row['decide_s'] * 1e3:.3g} ms",
            f"{row['resume_s'] * 1e3:.3g} ms",
            f"{row['total_s'] * 1e3:.3g} ms",
            f"{row['total_s'] / row['ranks'] * 1e6:.3g} us",
        ]
        for row in document["rows"]
    ]
    header = ["ranks", "death to Stop", "all reports, to Restore", "all reports, to Resume", "in all", "for each rank"]
    return "\n\n".join(
        [
            "The core alone, given the facts of a job one after the other: what it takes on one processor, without "
            "sockets, journal and messages. Medians.",
            markdown_table(header, rows),
            markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The core's own time for a recovery")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path, default=RESULTS / "deciding.json")
    options = parser.parse_args()
    write_document(run(options.sizes, options.rounds), render, options.output)


if __name__ == "__main__":
    command(main)
