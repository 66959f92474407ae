"""State for a replacement on one host: relight beside torchft's transports and beside plain ways of copying.

The same processes and tensors, in turns (`benchmarks.weights.restoring`).

Run by ``python -m benchmarks.restore``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

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

NAMES = {
    "relight": "relight, one source, verified",
    "relight-two-sources": "relight, two sources, verified",
    "torchft-http": "torchft HTTPTransport, 4 pieces",
    "torchft-pg": "torchft PGTransport in place (gloo)",
    "gloo": "gloo send/recv, 64 MiB buckets",
    "unix-socket": "Unix socket, not verified",
    "limit": "one copy in one process: the limit",
}
TARGETS = {"torchft-pg": 1 / 2, "torchft-http": 1 / 3}


def run(rounds: int, mib: int) -> Document:
    """One measurement of all ways."""
    document = start_document("restore", rounds=rounds, mib=mib)
    progress = Progress(1)
    document |= measure_apart("weights.restoring", "--mib", str(mib), "--rounds", str(rounds))
    medians = document["median_s"]
    document["headline"] = (
        f"{document['total_bytes'] / 2**30:.2f} GiB in {medians['relight']:.3f} s; "
        + ", ".join(f"{way} {medians[way]:.3f} s" for way in (*TARGETS, "limit"))
        + "."
    )
    verdicts = [
        Verdict(f"restore: time over {way}", medians["relight"] / medians[way], target, "ratio")
        for way, target in TARGETS.items()
    ]
    add_verdicts(document, verdicts)
    progress.done(document["headline"])
    return document


def render(document: Document) -> str:
    """Markdown."""
    return "\n\n".join(
        [
            "From the target's request until the state is in its own tensors, which were written before. Medians; the "
            "first round does not count.",
            ways_table(NAMES, document),
            markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Restoring a replacement on one host")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--output", type=Path, default=RESULTS / "restore.json")
    options = parser.parse_args()
    write_document(run(options.rounds, options.mib), render, options.output)


if __name__ == "__main__":
    command(main)
