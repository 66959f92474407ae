"""Changes of modules between steps: a step that is undone runs the code after its block once more than it counts.

`python -m tests.training.structure_times` tries all places and times.
"""

from pathlib import Path
from typing import Any

import pytest

from relight.training.state.modules.structure import Structure
from relight.training.state.modules.tables import ModuleTables
from relight.training.state.optimizers.gradients import Gradients
from relight.training.transaction.transaction import Transaction
from relight.training.worker.step.left_gradients import LeftGradients
from tests.training.carried_times import FAILURES, judge
from tests.training.structure_times import StructureCase

ACTIONS = [
    "evaluation",
    "freeze in turn",
    "a hook is added",
    "a parameter is assigned",
    "momentum is scaled",
    "momentum by hand",
    "momentum is forgotten",
]
# In one place of a step each, by code that relight reads or not.
IN_STEPS = [
    ("a gradient hook is added", "after the write", True),
    ("a hook of the optimizer is added", "before", False),
    ("a head is swapped", "after the write", False),
    ("momentum is scaled", "before", True),
    ("momentum is forgotten", "above", False),
    ("weights are normed", "above", True),
    ("weights are pruned", "before", False),
    ("a parameter changes its group", "before", True),
]


@pytest.mark.parametrize("action", ACTIONS)
def test_what_code_between_steps_changes_in_modules_is_undone_or_told(action: str, tmp_path: Path) -> None:
    verdict = judge(StructureCase(action, "between steps", "in step 6", True), 1, tmp_path)

    assert verdict.partition(":")[0] not in FAILURES, verdict


def test_code_that_is_not_undone_after_an_undone_step_is_found(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(Transaction, "undo_code", lambda *_: False)

    verdicts = [judge(StructureCase("evaluation", "between steps", "in step 6", True), n, tmp_path) for n in range(3)]

    assert any(verdict.startswith("SILENT") for verdict in verdicts), verdicts


@pytest.mark.parametrize("case", IN_STEPS, ids=str)
def test_what_a_step_changes_in_modules_and_their_hooks_is_undone_or_told(
    case: tuple[str, str, bool], tmp_path: Path
) -> None:
    action, place, is_read = case

    verdict = judge(StructureCase(action, place, "in step 6", is_read), 1, tmp_path)

    assert verdict.partition(":")[0] not in FAILURES, verdict


@pytest.mark.parametrize(
    ("owner", "method", "planted", "action", "place"),
    [
        (ModuleTables, "roll_back", lambda _: False, "weights are pruned", "before"),
        (Transaction, "changed_state", lambda _: "", "momentum is scaled", "before"),
        (Structure, "differs", lambda *_: "", "a gradient hook is added", "after the write"),
        (Gradients, "put_back", Gradients._make_zero, "a parameter changes its group", "before"),
        (LeftGradients, "_doubt_lost", lambda *_: None, "a parameter changes its group", "before"),
    ],
)
def test_a_structure_that_is_not_looked_after_is_found(
    owner: type, method: str, planted: Any, action: str, place: str, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(owner, method, planted)

    verdicts = [judge(StructureCase(action, place, "in step 6", True), n, tmp_path) for n in range(3)]

    assert any(verdict.partition(":")[0] in FAILURES for verdict in verdicts), verdicts
