"""The README of a folder of results, made from its JSON files: what was promised, what was measured, where to look.

Run by ``python -m benchmarks.summary`` to make it again without measuring.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.documents import RESULTS, Document, describe_conditions, read_document, verdict_rows
from benchmarks.figures import markdown_table

ORDER = (
    "recovery",
    "detection",
    "controller",
    "overhead",
    "step_parts",
    "buddy",
    "verify",
    "scaling",
    "layouts",
    "deciding",
    "agents",
    "at_scale",
    "soak",
    "publish",
    "first_updates",
    "restore",
    "hosts",
    "memory",
    "strangers",
    "dashboard",
    "simulator",
)
TITLES = {
    "recovery": "Recovery beside torchrun and torchft",
    "detection": "Noticing a failure, stopping the survivors",
    "controller": "The controller's own death",
    "overhead": "Overhead without failures",
    "step_parts": "The parts of a small step",
    "buddy": "Buddy memory while nothing fails",
    "verify": "Comparing replicas while nothing fails",
    "scaling": "Recovery against the number of workers",
    "layouts": "Recovery of divided state",
    "deciding": "The controller's own work against the number of ranks",
    "agents": "Thousands of agents",
    "at_scale": "Recovery from 8 to 100,000 devices, in virtual time",
    "soak": "A thousand faults in one job",
    "publish": "Publishing weights to inference engines",
    "first_updates": "The first updates of new engines",
    "restore": "State for a replacement",
    "hosts": "State for a replacement on another host",
    "memory": "Memory over many steps",
    "strangers": "Strangers at the controller's door",
    "dashboard": "The live page",
    "simulator": "Simulated jobs",
}


def write_summary(folder: Path) -> str:
    """Write README.md from the JSON files that are there; returns its text."""
    documents = [read_document(path) for name in ORDER if (path := folder / f"{name}.json").exists()]
    stops = folder / "stop_collective.json"
    parts = [
        "# Results",
        "Made by `python -m benchmarks` from the JSON files here; each has its tables in a Markdown file of the same "
        "name. Compare ratios, not seconds: the machine is small and shared.",
        "## Targets",
        targets(documents),
        *(part for document in documents for part in _section(document)),
        *(_stop_collective(read_document(stops)) if stops.exists() else []),
    ]
    text = "\n\n".join(parts) + "\n"
    (folder / "README.md").write_text(text)
    return text


def targets(documents: Sequence[Document]) -> str:
    """All targets of all benchmarks in one table."""
    rows = [
        [*row, f"[{document['benchmark']}]({document['benchmark']}.md)"]
        for document in documents
        for row in verdict_rows(document)
    ]
    if not rows:
        return "Nothing was measured yet."
    met = sum(verdict["met"] for document in documents for verdict in document.get("verdicts", []))
    table = markdown_table(["target", "at most", "measured", "met", "details"], rows)
    return f"{met} of {len(rows)} met.\n\n{table}"


def _section(document: Document) -> list[str]:
    name = document["benchmark"]
    headline = document.get("headline", "")
    return [f"## {TITLES[name]}", f"{headline} [Details]({name}.md).".strip(), describe_conditions(document)]


# ---------------------------------------------------------------- ways out of a collective


def _stop_collective(document: Document) -> list[str]:
    """Another measurement, with a document of its own kind."""
    environment = document["environment"]
    rows = [
        [
            row["road"],
            row["fault"],
            str(row["load"]),
            f"{row['ok']} of {row['trials']}",
            str(row["hangs"]),
            _spread(row["out_ms"]),
            _spread(row["recovered_ms"]),
        ]
        for row in sorted(document["comparison"], key=lambda row: (row["road"], row["fault"], row["load"]))
    ]
    header = ["way out", "fault", "busy loops beside", "came out", "hung", "order to out", "until the next group works"]
    return [
        "## Ways out of a gloo collective",
        "How survivors leave a collective whose peer has died or frozen, and form a new group in the same process "
        "(`stop_collective.py` describes each way). Milliseconds: median / 95th percentile / greatest.",
        markdown_table(header, rows),
        f"Measured {document['date']} on {environment['cores']} cores ({environment['cpu']}), "
        f"{environment['memory_gib']} GiB; torch {environment['torch']}, python {environment['python']}, kernel "
        f"{environment['kernel']}.",
    ]


def _spread(figures: dict[str, Any]) -> str:
    if "median" not in figures:
        return "–"
    return " / ".join(f"{figures[name]:.1f}" for name in ("median", "p95", "max"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the README of a folder of results again")
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    print(write_summary(parser.parse_args().folder))


if __name__ == "__main__":
    main()
