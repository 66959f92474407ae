"""State by place and step of its first change: disturbed, a script ends as without relight, or relight says so.

`python -m tests.training.carried_times --seed 0 --count 1000` tries more; `make fuzz-times` new ones.
"""

from pathlib import Path
from typing import Any

import pytest

from relight.training.carried.adoption import Adoption
from relight.training.carried.doubts import Doubts
from relight.training.carried.undo import Undo
from tests.training.carried_times import FAILURES, Case, draw, judge

BUGS: dict[str, tuple[type, tuple[str, ...], Any, Case]] = {
    "late changes are not told": (Doubts, ("risk",), "", Case("long list", "eval", "in step 6", "line", "function")),
    "a step is not undone": (
        Undo,
        ("roll_back", "put_back"),
        None,
        Case("attribute", "line", "from step 5", "afterwards", "function"),
    ),
    "a replacement gets nothing": (
        Adoption,
        ("put_in",),
        None,
        Case("attribute", "line", "in step 1", "line", "function"),
    ),
}


# Once silent: a case, and the seed of its faults.
ONCE_SILENT = {
    "a name that comes to stand for nothing": (
        Case("to nothing", "line", "in step 1", "line", "module"),
        9085,
    ),
    "kept by the lost rank before it was noticed": (
        Case("many objects", "eval", "in step 6", "line", "function"),
        0,
    ),
    "an iterator that cannot go back": (
        Case("iterator of a library", "eval", "every 7th", "line", "function"),
        1067,
    ),
    "only shown, and first changed after an early barrier": (
        Case("bytes", "optimizer hook", "from step 5", "afterwards", "module"),
        1076,
    ),
    "an attribute of an optimizer": (
        Case("optimizer's own attribute", "library", "from step 5", "late hook", "function"),
        1096,
    ),
    "an object that a step puts on a module": (
        Case("attribute of a module that was handed over", "line", "always", "line", "function"),
        0,
    ),
    "an attribute of what a name no longer stands for": (
        Case("swapped objects", "forward pre-hook", "from step 5", "late hook", "function"),
        3044,
    ),
    "a list of which one object's attribute was carried before": (
        Case("many objects", "optimizer pre-hook", "in step 6", "late hook", "module"),
        5,
    ),
    "objects that are exchanged": (Case("swapped objects", "eval", "from step 5", "line", "function"), 1),
    "an optimizer that steps between steps": (
        Case("scheduler that was not handed over", "next turn", "in step 1", "late line", "function"),
        1083,
    ),
}


@pytest.mark.parametrize("first", [0, pytest.param(4, marks=pytest.mark.all)])
def test_no_script_ends_with_other_values_in_silence(first: int, tmp_path: Path) -> None:
    verdicts = {seed: judge(draw(seed), seed, tmp_path, most=1) for seed in range(first, first + 4)}
    assert not {seed: verdict for seed, verdict in verdicts.items() if verdict.startswith(FAILURES)}
    assert any(verdict == "equal" for verdict in verdicts.values())


@pytest.mark.parametrize("name", ONCE_SILENT)
def test_is_told(name: str, tmp_path: Path) -> None:
    case, seed = ONCE_SILENT[name]
    assert not judge(case, seed, tmp_path).startswith((*FAILURES, "no script"))


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, methods, value, case = BUGS[name]
    assert not judge(case, 0, tmp_path, most=1).startswith((*FAILURES, "no script"))
    for method in methods:
        monkeypatch.setattr(owner, method, lambda *_: value)
    assert any(judge(case, seed, tmp_path, most=1).startswith(FAILURES) for seed in range(4))
