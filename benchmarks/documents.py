"""Documents of benchmarks: a JSON file with everything measured, and the same in Markdown for people.

The Markdown is made from the JSON alone, so that it can be made again without measuring again. Every file says on
which machine, with which versions and when: a figure without its conditions says nothing.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.recovery.peers import REPOSITORY, SOURCES, conditions, end_on_signal

RESULTS = Path(__file__).parent / "results"
Document = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """One target of the project and what was measured for it. Smaller is better in all of them."""

    what: str
    value: float | None  # None: it could not be measured
    target: float
    unit: str
    note: str = ""

    @property
    def met(self) -> bool:
        """True if the target was reached."""
        return self.value is not None and self.value <= self.target


def start_document(benchmark: str, **settings: object) -> Document:
    """The head of a document: conditions, and the load of the machine *before* anything was measured."""
    return {
        "benchmark": benchmark,
        **conditions(),
        "commit": _commit(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "settings": settings,
    }


def _commit() -> str | None:
    """The commit of the code that was measured; with a plus sign if files in src/ differ from it."""
    try:
        name = _git("rev-parse", "--short", "HEAD")
        return f"{name}+" if _git("status", "--porcelain", "--", "src") else name
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def add_verdicts(document: Document, verdicts: Sequence[Verdict]) -> None:
    """Put the targets into a document."""
    document["verdicts"] = [{**asdict(verdict), "met": verdict.met} for verdict in verdicts]


def write_document(document: Document, render: Callable[[Document], str], output: Path) -> None:
    """Write JSON and Markdown, and print the latter."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(_encode(document))
    text = "\n\n".join([f"# {document['benchmark']}", describe_conditions(document), render(document)]) + "\n"
    output.with_suffix(".md").write_text(text)
    print(f"\n{text}\nwritten to {_short(output)} and {output.with_suffix('.md').name}", flush=True)


def _encode(document: Document) -> str:
    """Indented, but with one line per innermost list: thousands of samples would otherwise be thousands of lines."""
    text = json.dumps(document, indent=1) + "\n"
    return re.sub(r"\[\n([^][{}]*)\]", lambda found: "[" + " ".join(found[1].split("\n")).strip() + "]", text)


def read_document(path: Path) -> Document:
    """Read a document back."""
    document: Document = json.loads(path.read_text())
    return document


def describe_conditions(document: Document) -> str:
    """One paragraph: when, where, with what."""
    hardware, versions = document["hardware"], document["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    commit = f", commit {document['commit']}" if document.get("commit") else ""
    load = document["load_before"][0]
    machine = f"{hardware['cores']} cores ({hardware['processor']})"
    return (
        f"Measured {document['date'][:16].replace('T', ' ')} UTC on {machine}, "
        f"{hardware['memory_gib']} GiB; {named}{commit}. Load of the machine before: {load}."
        + (" **The machine was not idle.**" if load > 1.0 else "")
    )


def verdict_rows(document: Document) -> list[list[str]]:
    """Rows for a table of targets."""
    rows = []
    for verdict in document.get("verdicts", []):
        value = "not measured" if verdict["value"] is None else _with_unit(verdict["value"], verdict["unit"])
        note = f" ({verdict['note']})" if verdict["note"] else ""
        mark = "yes" if verdict["met"] else "**no**"
        rows.append([verdict["what"], f"≤ {_with_unit(verdict['target'], verdict['unit'])}", value + note, mark])
    return rows


def _with_unit(value: float, unit: str) -> str:
    if unit == "ratio":
        return f"1/{1 / value:.3g}" if 0 < value < 1 else f"{value:.3g}"
    return f"{value:.3g} {unit}".strip()


def _short(path: Path) -> str:
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else str(path)


def measure_apart(module: str, *arguments: str) -> Any:
    """Run a module of this folder that prints its figures as JSON: it needs torch, or forks, or both."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    paths = [*map(str, SOURCES), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def command(main: Callable[[], None]) -> None:
    """Run a benchmark's `main`: Ctrl-C and SIGTERM end it through its `finally` clauses, which end its jobs."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_on_signal)
    main()


class Progress:
    """Says after each part of a benchmark how far it is, and how long the rest will take if it goes on like this."""

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._done = 0
        self._started = time.monotonic()

    def done(self, text: str) -> None:
        """One more part is done."""
        self._done += 1
        spent = time.monotonic() - self._started
        left = spent / self._done * (self._parts - self._done)
        rest = f", about {left:.0f} s left" if self._done < self._parts else f", {spent:.0f} s in all"
        print(f"  [{self._done}/{self._parts}{rest}] {text}", flush=True)

    def skipped(self, text: str) -> None:
        """A part that did not come to a result; the rest goes on."""
        self.done(f"NO RESULT: {text}")
        print(text, file=sys.stderr, flush=True)
