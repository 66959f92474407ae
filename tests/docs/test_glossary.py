"""The glossary against the code: every word that users see is explained, and no term is explained that nothing uses."""

import ast
import enum
import re
from pathlib import Path

import pytest

from relight.core.job.job import Stage
from relight.core.protocol.commands import FallbackTier
from relight.core.protocol.position import Phase
from relight.core.worker.states import State as WorkerState
from relight.timeline.model.spans import Activity
from relight.transfer.plan.schedule import Form
from relight.transfer.plan.update.way import Way
from relight.watch.run_dir import State as JobState

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHOWN: tuple[tuple[type[enum.Enum], str], ...] = (
    (Phase, "GLOSSARY.md"),
    (Activity, "GLOSSARY.md"),
    (FallbackTier, "GLOSSARY.md"),
    (Form, "GLOSSARY.md"),
    (Way, "GLOSSARY.md"),
    (Stage, "PROTOCOL.md"),
    (WorkerState, "PROTOCOL.md"),
    (JobState, "WATCHING.md"),
)
# Names that gave way to the field's own words.
RETIRED = "ballot|bell|fence|ladder|ledger|roster|rung|uplink|put_down|far_source|inquiry"


def terms() -> list[str]:
    rows = [line.split("|")[1] for line in (DOCS / "GLOSSARY.md").read_text().splitlines() if line.startswith("| ")]
    return [term.strip() for row in rows for term in row.split(",") if term.strip() != "term"]


def words_of_code() -> str:
    """Return the source as words: names taken apart at their capitals and underscores."""
    text = " ".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    return re.sub(r"[_\s-]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)).lower()


def _shown(word: enum.Enum) -> str:
    """Return a word as it is shown: a phase by its name, a worker's state by its name in lower case."""
    if isinstance(word, WorkerState):
        return word.name.lower().replace("_", " ")
    return word.name if isinstance(word, Phase) else str(word.value)


@pytest.mark.parametrize(("kind", "page"), SHOWN, ids=lambda value: getattr(value, "__name__", value))
def test_every_word_that_users_see_is_explained(kind: type[enum.Enum], page: str) -> None:
    text = (DOCS / page).read_text()
    shown = {_shown(word) for word in kind}
    missing = sorted(word for word in shown if not re.search(rf"\b{re.escape(word)}\b", text))
    assert not missing, f"docs/{page} lacks {missing}"


def test_every_term_is_used_by_the_code() -> None:
    code = words_of_code()
    unused = [term for term in terms() if not re.search(rf"\b{term.lower().replace('-', ' ')}(s|d|ed)?\b", code)]
    assert not unused, f"no code uses {unused}: take them off docs/GLOSSARY.md, or name the thing so"


def test_no_name_returns_that_gave_way_to_the_fields_own_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (name := node.name)
        and re.search(rf"(^|_)({RETIRED})(_|$)", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    ]
    assert not found
