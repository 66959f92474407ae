"""Recovery time from 8 to 100,000 devices, in virtual time: the real core, and around it what was measured.

The core is the production controller, and what it costs is measured while it runs. Everything around it takes what
other benchmarks measured (`detection.json`, `scaling.json`, `agents.json` in the results), or, where this machine can
tell nothing, what is stated here: the network, and the state of a device. One rank dies, and a warm standby takes its
place.

Forming the next process group is the communication library's part. It is shown apart, as published for a synchronous
job of about 100,000 devices (250 s, taken as proportional to their number): relight waits for it like everybody else.

Run by ``python -m benchmarks.at_scale``.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.deciding import VERSION, Job
from benchmarks.documents import (
    RESULTS,
    Document,
    Progress,
    command,
    read_document,
    start_document,
    write_document,
)
from benchmarks.figures import markdown_table, milliseconds
from benchmarks.recovery.peers import REPOSITORY
from relight.core.membership.members import Process
from relight.core.protocol.commands import Command, Restore, Resume, Stop
from relight.core.protocol.events import Event, ProcessExited, Restored, RestoreProgress, Stopped
from relight.core.protocol.gathering import HOLD_SECONDS, Gathering, subject
from relight.core.protocol.position import Phase, Position

SIZES = (8, 64, 512, 4096, 16_384, 32_768, 100_000)
FIGURE = REPOSITORY / "docs" / "figures" / "recovery-at-scale.svg"
FORM_SECONDS_PER_DEVICE = 250 / 100_000  # published, see docs/SCALE.md
SEED = 7
STAGES = ("notice", "stop", "restore", "resume")


@dataclass(frozen=True)
class Costs:
    """Seconds. Measured ones are replaced by what the results say; the others are stated."""

    notice_s: float = 0.001  # a death, by its agent
    latency_s: float = 0.0001  # one way, controller to agent or back
    order_s: float = 16e-6  # of the controller's processor, for an order to one agent
    message_s: float = 16e-6  # the same, to receive and to confirm one message of an agent ...
    report_s: float = 11e-6  # ... and for each report in it: decoding, core and journal
    stop_s: float = 0.008  # from Stop to standing still: median of one rank ...
    stop_spread: float = 0.4  # ... and the standard deviation of its logarithm
    local_s: float = 0.02  # digest, rollback and all else of a restore but copying, of one rank
    resume_s: float = 0.005  # from Resume to the first forward, of one rank
    state_bytes: float = 16 * 2**30  # of one device: weights, gradients' scale and optimizer
    link_bytes_per_s: float = 50e9  # 400 Gbit/s


def measured_costs(folder: Path) -> tuple[Costs, list[str]]:
    """The defaults above, with what the results say in their place; and which results those were."""
    values: dict[str, float] = {}
    used = []
    if (path := folder / "scaling.json").exists():
        growth = read_document(path)["growth"]
        parts = [growth[name]["at_zero_s"] for name in ("digest", "rollback", "finish") if name in growth]
        values["local_s"] = max(0.001, sum(max(0.0, part) for part in parts))
        if "stop" in growth:
            values["stop_s"] = max(0.001, growth["stop"]["at_zero_s"])
        used.append(path.name)
    if (path := folder / "agents.json").exists():
        found = read_document(path).get("recovery_costs")
        if found is None:
            return Costs(**values), used
        # Three times an order goes out to each agent, and a message comes in; so often each rank reports.
        values["order_s"] = values["message_s"] = found["for_each_agent_s"] / 6
        values["report_s"] = found["for_each_rank_s"] / 3
        used.append(path.name)
    return Costs(**values), used


@dataclass
class Agent:
    """One host: its ranks' reports wait for each other, by production code."""

    gathering: Gathering[Event]
    processes: set[str]


class Run:
    """One recovery in virtual time."""

    def __init__(self, ranks: int, costs: Costs) -> None:
        self.costs = costs
        self.ranks = ranks
        self.now = 0.0
        self.job = Job(ranks)
        self.core_s = 0.0  # that the core took, measured
        self.busy_until = 0.0  # the controller does one thing after the other
        self.busy_s = 0.0  # of the controller, in all
        self.moments: dict[str, float] = {}
        self._draw = random.Random(f"{SEED} {ranks}")
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._agents: dict[str, Agent] = {}

    def run(self) -> dict[str, float]:
        """Seconds of each stage."""
        victim = self.job.core.rank_processes()[0]
        where = Position(
            generation=1, phase=Phase.FORWARD, step=VERSION, version=VERSION, private_versions=(VERSION - 1, VERSION)
        )
        died = ProcessExited(process=victim, exit_status=-9, evidence="killed", position=where, noticed_ns=0)
        self._after(self.costs.notice_s + self.costs.latency_s, lambda: self._controller_hears([died]))
        while self._due:
            self.now, _, happen = heapq.heappop(self._due)
            happen()
        stop, restore, resume = (self.moments[kind] for kind in ("Stop", "Restore", "Resume"))
        return {
            "notice": self.costs.notice_s + self.costs.latency_s,
            "stop": restore - stop,
            "restore": resume - restore,
            "resume": self.moments["training"] - resume,
            "total": self.moments["training"],
            "core": self.core_s,
            "controller": self.busy_s,
        }

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.now + seconds, self._count, happen))

    def _controller_hears(self, events: Sequence[Event]) -> None:
        """One message. It comes to it once it is through with those before."""
        begun = max(self.now, self.busy_until)
        orders: list[Command] = []
        before = time.process_time()
        for event in events:
            orders += self.job.tell(event)
        core_s = time.process_time() - before
        self.core_s += core_s
        # The core's part is in `report_s`, too, but not what it takes longer with more ranks: rather twice than never.
        spent = core_s + self.costs.message_s + len(events) * self.costs.report_s
        self.busy_until = begun + spent
        self.busy_s += spent
        for order in orders:
            self._carry_out(order)

    def _agent_hears(self, agent: Agent, process: str, report: Event) -> None:
        """agent.py, `relay`."""
        about = subject(report)
        assert about is not None
        if agent.gathering.add(process, about, report, agent.processes):
            self._pass_on(agent)
        elif len(agent.gathering) == 1:
            self._after(HOLD_SECONDS, lambda: self._pass_on(agent))

    def _pass_on(self, agent: Agent) -> None:
        reports = agent.gathering.take()
        if reports:
            self._after(self.costs.latency_s, lambda: self._controller_hears(reports))

    def _carry_out(self, order: Command) -> None:
        if not isinstance(order, Stop | Restore | Resume):
            return
        self.moments.setdefault(type(order).__name__, self.busy_until)
        members = self.job.core.members.by_rank()
        if isinstance(order, Stop):
            self._agents = {}
            for process in members.values():
                self._agents.setdefault(process.agent, Agent(Gathering(), set())).processes.add(process.name)
        last = self.busy_until
        told: set[str] = set()
        for rank, process in members.items():
            if process.agent not in told:  # one frame for each agent
                told.add(process.agent)
                self.busy_until += self.costs.order_s
                self.busy_s += self.costs.order_s
            arrives = self.busy_until + self.costs.latency_s
            if isinstance(order, Stop):
                self._answer_stop(order, rank, process, arrives)
            elif isinstance(order, Restore):
                self._answer_restore(order, rank, process, arrives)
            else:
                last = max(last, arrives + self._spread(self.costs.resume_s))
        if isinstance(order, Resume):
            self.moments["training"] = last

    def _report(self, process: Process, seconds: float, report: Event) -> None:
        agent = self._agents[process.agent]
        self._after(seconds - self.now, lambda: self._agent_hears(agent, process.name, report))

    def _spread(self, median_s: float) -> float:
        return median_s * math.exp(self.costs.stop_spread * self._draw.gauss(0.0, 1.0))

    def _answer_stop(self, order: Stop, rank: int, process: Process, arrives: float) -> None:
        blank = process.replacement
        stopped = Stopped(
            process=process.name,
            rank=rank,
            generation=order.generation,
            step=VERSION,
            version=0 if blank else VERSION,
            lineage="" if blank else "lineage",
            prepared=-1,
            torn=False,
            blank=blank,
            stop_seconds=0.0,
            restore_address="/nowhere",
        )
        self._report(process, arrives + self._spread(self.costs.stop_s), stopped)

    def _answer_restore(self, order: Restore, rank: int, process: Process, arrives: float) -> None:
        seconds = self._spread(self.costs.local_s)
        if process.replacement:
            seconds += self.costs.state_bytes / self.costs.link_bytes_per_s
        restored = Restored(
            process=process.name,
            rank=rank,
            generation=order.generation,
            version=VERSION,
            lineage="lineage",
            state_digest="s",
            layout_digest="l",
            progress=RestoreProgress(),
        )
        self._report(process, arrives + seconds, restored)


def run(sizes: Sequence[int], folder: Path) -> Document:
    """All sizes."""
    costs, used = measured_costs(folder)
    stated = {name: getattr(costs, name) for name in costs.__dataclass_fields__}
    document = start_document("at_scale", sizes=list(sizes), costs=stated, measured_by=used)
    progress = Progress(len(sizes))
    rows: list[dict[str, Any]] = []
    for ranks in sizes:
        found = Run(ranks, costs).run()
        rows.append({"ranks": ranks, **found, "form": FORM_SECONDS_PER_DEVICE * ranks})
        progress.done(f"{ranks:,} devices: {found['total']:.3f} s")
    document["rows"] = rows
    first, last = rows[0], rows[-1]
    grown = last["controller"] - first["controller"]
    document["headline"] = (
        f"relight's own part of a recovery takes {first['total']:.2f} s at {first['ranks']:,} devices and "
        f"{last['total']:.2f} s at {last['ranks']:,}; the controller, which hears every host twice, works for "
        f"{grown:.2f} s more. Forming the next group is the library's: as published, {last['form']:.0f} s at "
        f"{last['ranks']:,}."
    )
    return document


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """The table as a figure: seconds over devices, both logarithmic."""
    left, top, width, height = 70, 30, 560, 300
    xs = [math.log10(row["ranks"]) for row in rows]
    least, most = -3.0, 3.0
    lines = {
        "relight's own part": ("#1f6feb", [row["total"] for row in rows]),
        "of it the controller": ("#8250df", [row["controller"] for row in rows]),
        "of it copying and restoring": ("#1a7f37", [row["restore"] for row in rows]),
        "forming the group (library, published)": ("#9a6700", [row["form"] for row in rows]),
    }

    def place(x: float, seconds: float) -> tuple[float, float]:
        y = (math.log10(max(seconds, 10**least)) - least) / (most - least)
        return left + (x - xs[0]) / (xs[-1] - xs[0]) * width, top + height * (1 - y)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 30} {top + height + 130}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="18" font-size="14">Recovery time against the number of devices</text>',
    ]
    for exponent in range(round(least), round(most) + 1):
        _, y = place(xs[0], 10**exponent)
        label = f"{10**exponent:g} s"
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for x, row in zip(xs, rows, strict=True):
        column, _ = place(x, 1.0)
        parts.append(f'<text x="{column:.1f}" y="{top + height + 18}" text-anchor="middle">{row["ranks"]:,}</text>')
    for number, (name, (colour, values)) in enumerate(lines.items()):
        points = " ".join("{:.1f},{:.1f}".format(*place(x, value)) for x, value in zip(xs, values, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = top + height + 45 + 18 * number
        parts.append(
            f'<line x1="{left}" y1="{y - 4}" x2="{left + 24}" y2="{y - 4}" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(f'<text x="{left + 32}" y="{y}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def render(document: Document) -> str:
    """Markdown."""
    rows = [
        [
            f"{row['ranks']:,}",
            *(milliseconds(row[stage]) for stage in STAGES),
            f"**{milliseconds(row['total'])}**",
            f"{milliseconds(row['controller'])} ({milliseconds(row['core'])})",
            f"{row['form']:.3g} s",
        ]
        for row in document["rows"]
    ]
    header = [
        *("devices", "notice", "stop, and decide", "restore", "resume"),
        *("relight's own part", "of it the controller (its core)", "forming the group, as published"),
    ]
    costs = document["settings"]["costs"]
    said = [[name.removesuffix("_s").replace("_", " "), f"{value:.3g}"] for name, value in costs.items()]
    used = " and ".join(document["settings"]["measured_by"]) or "nothing"
    return "\n\n".join(
        [
            "The production core in virtual time; its own time is measured as it runs. A warm standby, eight devices "
            f"on a host, all ranks replicas of one another. Calibrated by {used}; the rest is stated below.",
            markdown_table(header, rows),
            document["headline"],
            "What grows, and why: the controller hears each host twice, for all of its ranks, and orders it three "
            "times, one after the other; and the slowest of more ranks is slower. Copying does not grow: it is one "
            "device's state over its own link. Forming the group overlaps with copying, and is not relight's.",
            markdown_table(["cost", "seconds (or bytes)"], said),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Recovery time from 8 to 100,000 devices, in virtual time")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--output", type=Path, default=RESULTS / "at_scale.json")
    parser.add_argument("--figure", type=Path, help="write it here too; docs/figures has the one of the results")
    options = parser.parse_args()
    document = run(options.sizes, RESULTS)
    write_document(document, render, options.output)
    figure = options.figure or (FIGURE if options.output.parent == RESULTS else None)
    if figure is not None:
        figure.write_text(draw(document["rows"]))


if __name__ == "__main__":
    command(main)
