"""The number of situations that the simulator tries, its speed, and the time until it finds planted bugs.

Random schedules on all processors and on one; every order of small jobs; each planted bug until it shows. A violation
anywhere is not a slow result but a defect, and is written down as such.
"""

from __future__ import annotations

import argparse
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
from relight.sim.model.shapes import pattern_of
from relight.sim.planted.mutations import HUNTED, Mutation
from relight.sim.search.exhaustive import explore, situation
from relight.sim.search.swarm import search

FIRST_SEED = 100_000_000  # none that a test uses
ALONE = 2000  # schedules on one processor, to show what one costs
TARGET_SCHEDULES = 100_000
_TWO_WRITES = ("late-private", "two-early")  # one step of each form
# ranks, faults, kinds of faults, whether everything is told apart, shapes of the two steps
SEARCHES = (
    (3, 1, ("kill",), True, ()),
    (3, 2, ("kill",), False, ()),
    (3, 1, ("kill", "freeze", "cut"), False, ()),
    (4, 1, ("kill", "freeze", "cut"), False, ()),
    (4, 2, ("kill",), False, ()),
    (3, 2, ("kill",), False, _TWO_WRITES),
    (3, 2, ("kill",), False, ("surprise", "one")),
    (4, 2, ("kill",), False, _TWO_WRITES),
)


def measure_search(
    ranks: int, faults: int, kinds: tuple[str, ...], fine: bool, shapes: tuple[str, ...], seconds: float
) -> dict[str, Any]:
    """Every order of one small job of two steps, or as many as fit into the time."""
    spent = time.process_time()
    found = explore(situation(ranks, 2, faults, kinds, fine=fine, pattern=pattern_of(shapes)), seconds=seconds)
    return {
        "ranks": ranks,
        "faults": faults,
        "kinds": list(kinds),
        "fine": fine,
        "shapes": list(shapes),
        "situations": found.situations,
        "steps": found.steps,
        "seconds": found.seconds,
        "processor_seconds": time.process_time() - spent,
        "complete": found.complete,
        "violation": found.violation.partition("\n")[0],
    }


def measure_mutation(mutation: Mutation) -> dict[str, Any]:
    """Return the number of random schedules until a planted bug shows."""
    spent = time.process_time()
    found = mutation.hunt()
    return {
        "name": mutation.name,
        "what": " ".join(mutation.what.split()),
        "within": mutation.within,
        "schedules": found[0] if found else None,
        "processor_seconds": time.process_time() - spent,
        "violation": str(found[1]).partition("\n")[0] if found else "",
    }


def run(schedules: int, seconds: float, searches: int) -> Document:
    """All of it."""
    document = start_document("simulator", schedules=schedules, first_seed=FIRST_SEED, search_seconds=seconds)
    progress = Progress(2 + searches + len(HUNTED))
    spent = time.process_time()
    alone = search(FIRST_SEED, ALONE, processes=1)
    document["alone"] = {
        "schedules": alone.schedules,
        "seconds": alone.seconds,
        "processor_seconds": time.process_time() - spent,
    }
    progress.done(f"{alone.schedules} schedules on one processor")
    found = search(FIRST_SEED, schedules)
    document["random"] = {
        "schedules": found.schedules,
        "seconds": found.seconds,
        "violations": {str(seed): violation for seed, violation in found.violations.items()},
    }
    progress.done(f"{found.schedules} schedules, {len(found.violations)} violations")
    document["searches"] = []
    for ranks, faults, kinds, fine, shapes in SEARCHES[:searches]:
        document["searches"].append(measure_search(ranks, faults, kinds, fine, shapes, seconds))
        progress.done(f"{ranks} ranks, {faults} faults: {document['searches'][-1]['situations']} situations")
    document["mutations"] = []
    for mutation in HUNTED:
        document["mutations"].append(measure_mutation(mutation))
        progress.done(f"{mutation.name}: {document['mutations'][-1]['schedules']}")
    wrong = len(found.violations) + sum(bool(one["violation"]) for one in document["searches"])
    missed = [one["name"] for one in document["mutations"] if one["schedules"] is None]
    incomplete = [one for one in document["searches"] if not one["complete"]]
    add_verdicts(
        document,
        [
            Verdict("simulated jobs in which an invariant breaks", wrong, 0, "", f"of {found.schedules:,}"),
            Verdict("searches of all orders that did not come to an end", len(incomplete), 0, ""),
            Verdict("planted bugs that were not found", len(missed), 0, "", f"of {len(HUNTED)}"),
            Verdict("100,000 over the random schedules tried", TARGET_SCHEDULES / found.schedules, 1.0, "ratio"),
        ],
    )
    document["headline"] = (
        f"{found.schedules:,} random schedules and {sum(one['situations'] for one in document['searches']):,} "
        f"situations of small jobs: {wrong} violations; {len(HUNTED) - len(missed)} of {len(HUNTED)} planted "
        "bugs found."
    )
    return document


def render(document: Document) -> str:
    """Markdown."""
    alone, found = document["alone"], document["random"]
    rate = alone["schedules"] / alone["processor_seconds"]
    return "\n\n".join(
        [
            f"**Random**: {found['schedules']:,} schedules in {found['seconds']:.0f} s on all processors, "
            f"{len(found['violations'])} violations. One takes {1000 / rate:.2f} ms of one processor "
            f"({rate:,.0f} a second).",
            *(f"- `--seed {seed}`: {violation}" for seed, violation in found["violations"].items()),
            "**Every order** of jobs of two steps. *Fine* tells every message and every pause apart; otherwise what "
            "no process can tell apart happens at once (`src/relight/sim/search/exhaustive.py` says why); "
            "what differs in names only is followed once (`src/relight/sim/search/sameness.py`). What steps are: "
            "`src/relight/sim/model/shapes.py`.",
            markdown_table(
                [
                    "ranks",
                    "up to",
                    "",
                    "steps are",
                    "situations",
                    "steps between them",
                    "processor",
                    "complete",
                    "violation",
                ],
                [_search_cells(one) for one in document["searches"]],
            ),
            "**Planted bugs**: the number of random schedules until the first violation.",
            markdown_table(
                ["planted", "found by", "promised", "processor", "what broke first"],
                [_mutation_cells(one) for one in document["mutations"]],
            ),
            markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)),
            *document.get("notes", []),
        ]
    )


def _search_cells(one: dict[str, Any]) -> list[str]:
    return [
        str(one["ranks"]),
        f"{one['faults']} of {', '.join(one['kinds'])}",
        "fine" if one["fine"] else "",
        ", ".join(one.get("shapes", ())) or "of one write",
        f"{one['situations']:,}",
        f"{one['steps']:,}",
        f"{one['processor_seconds']:.0f} s",
        "yes" if one["complete"] else "**no**",
        one["violation"] or "none",
    ]


def _mutation_cells(one: dict[str, Any]) -> list[str]:
    number = "**not found**" if one["schedules"] is None else f"{one['schedules']:,}"
    return [
        f"{one['name']}: {one['what']}",
        number,
        f"{one['within']:,}",
        f"{one['processor_seconds']:.1f} s",
        one["violation"][:110].replace("|", "\\|"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="What the simulator tries, how fast, and how soon it finds bugs")
    parser.add_argument("--schedules", type=int, default=TARGET_SCHEDULES)
    parser.add_argument("--seconds", type=float, default=7200.0, help="for each search of all orders")
    parser.add_argument("--searches", type=int, default=len(SEARCHES), help="how many of the searches of all orders")
    parser.add_argument("--output", type=Path, default=RESULTS / "simulator.json")
    options = parser.parse_args()
    write_document(run(options.schedules, options.seconds, options.searches), render, options.output)


if __name__ == "__main__":
    command(main)
