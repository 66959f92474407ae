"""State for a replacement on another host: relight beside torchft's transports, gloo, and the line alone.

The hosts are network namespaces on this machine (`benchmarks.namespaces`), so it takes root and iproute2; without
them it says so and measures nothing. What leaves a source is limited to each of the given speeds, one after the other.

Run by ``python -m benchmarks.hosts``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.documents import (
    RESULTS,
    Document,
    Progress,
    Verdict,
    add_verdicts,
    command,
    measure_apart,
    start_document,
    verdict_rows,
    write_document,
)
from benchmarks.figures import markdown_table, ways_table
from benchmarks.namespaces import CONGESTION, Network, missing

SOURCES, TARGET = ("source0", "source1"), "target"
NAMES = {
    "relight": "relight, one source, verified",
    "relight-two-sources": "relight, two sources, verified",
    "torchft-http": "torchft HTTPTransport, 4 pieces",
    "torchft-pg": "torchft PGTransport in place (gloo)",
    "gloo-same-buckets": "gloo send/recv, 4 MiB buckets as relight's",
    "gloo": "gloo send/recv, 64 MiB buckets",
    "tcp": "one socket from tensors to tensors, not verified",
    "raw": "the line: one MiB again and again",
}
FASTER_THAN = ("gloo-same-buckets", "gloo", "torchft-http")
STAGES = ("digest-source", "digest-target", "tcp")
UNLIMITED = "unlimited"


def run(rounds: int, mib: int, limited_mib: int, speeds: list[float]) -> Document:
    """One measurement of all ways, for each speed of the line. Megabits per second."""
    document = start_document("hosts", rounds=rounds, mib=mib, limited_mib=limited_mib, congestion=CONGESTION)
    progress = Progress(1 + len(speeds))
    document["lines"] = {}
    with Network([*SOURCES, TARGET]) as network:
        for speed in (None, *speeds):
            for source in SOURCES:
                network.limit(source, speed)
            name = UNLIMITED if speed is None else f"{speed / 1000:g} Gbit/s"
            figures = measure_apart(
                "weights.hosting",
                *("--mib", str(mib if speed is None else limited_mib), "--rounds", str(rounds)),
                *("--namespaces", *network.namespaces.values()),
                *("--addresses", *network.addresses.values()),
            )
            document["lines"][name] = figures
            progress.done(f"{name}: {_in_words(figures)}")
    document["headline"] = "; ".join(f"{name}: {_in_words(figures)}" for name, figures in document["lines"].items())
    add_verdicts(document, _verdicts(document["lines"]))
    return document


def _in_words(figures: dict[str, Any]) -> str:
    medians = figures["median_s"]
    return (
        f"{figures['total_bytes'] / 2**30:.2f} GiB in {medians['relight']:.3f} s (plain socket {medians['tcp']:.3f} s, "
        f"gloo {medians['gloo-same-buckets']:.3f} s), from two sources {medians['relight-two-sources']:.3f} s"
    )


def _verdicts(lines: dict[str, Any]) -> list[Verdict]:
    verdicts = []
    for way in FASTER_THAN:
        medians = lines[UNLIMITED]["median_s"]
        verdicts.append(
            Verdict(f"restore between hosts: time over {way}", medians["relight"] / medians[way], 1.0, "ratio")
        )
    for name, figures in lines.items():
        if name != UNLIMITED:
            medians = figures["median_s"]
            ratio = medians["relight-two-sources"] / medians["relight"]
            verdicts.append(Verdict(f"restore at {name}: two sources over one", ratio, 0.6, "ratio"))
            ratio = medians["relight"] / medians["tcp"]
            verdicts.append(Verdict(f"restore at {name}: time over a plain socket", ratio, 1.05, "ratio"))
    return verdicts


def render(document: Document) -> str:
    """Markdown."""
    parts = [
        "Two sources and the target, each in a network namespace of its own, on one switch; all share this machine's "
        f"cores. TCP congestion control {CONGESTION}. From the target's request until the state is in its own tensors, "
        "which were written before. Medians; the first round does not count."
    ]
    for name, figures in document["lines"].items():
        each = "" if name == UNLIMITED else " from each source (tbf)"
        moved = {**figures, "median_s": {way: figures["median_s"][way] for way in NAMES}}
        parts += [f"## {name}{each}", ways_table(NAMES, moved), _stages(figures)]
    parts += ["## Targets", markdown_table(["target", "at most", "measured", "met"], verdict_rows(document))]
    return "\n\n".join(parts)


def _stages(figures: dict[str, Any]) -> str:
    """The parts of one source's transfer, each alone, beside the whole."""
    medians = figures["median_s"]
    parts, whole = [medians[stage] for stage in STAGES], medians["relight"]
    header = ["digest at the source", "digest at the target", "plain socket", "one after another", "relight"]
    cells = [f"{seconds:.3f} s" for seconds in (*parts, sum(parts), whole)]
    return (
        "Each part alone, one after another, and together, as relight does it. What it takes beyond the plain socket: "
        f"{whole - medians['tcp']:+.3f} s.\n\n" + markdown_table(header, [cells])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Restoring a replacement on another host")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024, help="of state, where the line is not limited")
    parser.add_argument("--limited-mib", type=int, default=256, help="of state, where it is")
    parser.add_argument("--speeds", type=float, nargs="*", default=[1000, 4000], help="of the line, in Mbit/s")
    parser.add_argument("--output", type=Path, default=RESULTS / "hosts.json")
    options = parser.parse_args()
    why = missing()
    if why:
        print(f"hosts: nothing was measured: {why}")
        return
    write_document(run(options.rounds, options.mib, options.limited_mib, options.speeds), render, options.output)


if __name__ == "__main__":
    command(main)
