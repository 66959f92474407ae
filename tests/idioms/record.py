"""The verdicts of a run of the library: a table, a file of lines to go on from, and the document of results."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.documents import RESULTS, Document, start_document, write_document
from tests.idioms.verdict import Verdict

_WORDS = 160


@dataclass(frozen=True)
class Trial:
    """One job."""

    what: str  # "undisturbed", "phases", "random 3"
    verdict: Verdict
    failures: int  # that the job lived through
    words: str


@dataclass
class Row:
    """One script."""

    name: str
    plain: str = ""  # why the script does not run without relight; empty: it does
    trials: list[Trial] = field(default_factory=list)

    @property
    def worst(self) -> Verdict:
        """The worst verdict of all its jobs."""
        order = list(Verdict)
        return max((trial.verdict for trial in self.trials), key=order.index, default=Verdict.EQUAL)

    @property
    def random_kills(self) -> int:
        """The number of failures at random times that its jobs lived through."""
        return sum(trial.failures for trial in self.trials if trial.what.startswith("random"))


def table(rows: list[Row]) -> list[str]:
    """In Markdown, the failures first."""
    lines = ["| script | verdict | jobs | failures survived | at random times | what was said |", "|" + " --- |" * 6]
    order = list(Verdict)
    for row in sorted(rows, key=lambda row: (-order.index(row.worst), row.name)):
        said = next((trial for trial in row.trials if trial.verdict is row.worst and trial.words), None)
        words = _cell(f"{said.what}: {said.words}") if said is not None else ""
        survived = sum(trial.failures for trial in row.trials if trial.verdict is Verdict.EQUAL)
        lines.append(f"| {row.name} | {row.worst} | {len(row.trials)} | {survived} | {row.random_kills} | {words} |")
    counts = ", ".join(f"{sum(row.worst is verdict for row in rows)} {verdict}" for verdict in Verdict)
    return [*lines, "", f"{len(rows)} scripts: {counts}."]


def remember(path: Path, row: Row) -> None:
    """Append a script's verdicts."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def recall(path: Path) -> list[Row]:
    """Results that were remembered; of a job that was run several times, the last."""
    rows: dict[str, Row] = {}
    for row in map(_decode, map(json.loads, path.read_text().splitlines())):
        trials = {trial.what: trial for trial in (*rows.get(row.name, row).trials, *row.trials)}
        rows[row.name] = Row(name=row.name, plain=row.plain, trials=list(trials.values()))
    return list(rows.values())


def _decode(row: dict[str, Any]) -> Row:
    trials = [Trial(**{**trial, "verdict": Verdict(trial["verdict"])}) for trial in row["trials"]]
    return Row(name=row["name"], plain=row["plain"], trials=trials)


def write(rows: list[Row], **settings: object) -> None:
    """Into benchmarks/results/idioms.json and .md."""
    document = start_document("idioms", **settings)
    document["rows"] = [asdict(row) for row in rows]
    write_document(document, _render, RESULTS / "idioms.json")


def _render(document: Document) -> str:
    rows = [_decode(row) for row in document["rows"]]
    settings = ", ".join(f"{key} {value}" for key, value in document["settings"].items())
    intro = (
        "Scripts in the shapes that people publish (tests/idioms/scripts), each undisturbed, with kills in phases of "
        "its steps, and with kills of random processes at random times. **equal**: the bits of the undisturbed job. "
        "**refused**: relight said before the first step what to change. **told**: other bits, and the report says "
        "that they are not known, or it ended and said why. **SILENT** and **LOST** are failures."
    )
    return "\n".join([intro, "", f"Settings: {settings}.", "", *table(rows)])


def _cell(text: str) -> str:
    flat = " ".join(text.replace("|", "/").split())
    return flat if len(flat) <= _WORDS else f"{flat[:_WORDS]} ..."
