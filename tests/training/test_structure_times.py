"""Changes of modules between steps: a step that is undone runs the code after its block once more than it counts.

`python -m tests.training.structure_times` tries all places and times.
"""

from pathlib import Path
from typing import Any

import pytest

from relight.training.transaction.step_images import StepImages
from tests.training.carried_times import FAILURES, judge
from tests.training.structure_times import StructureCase

ACTIONS = ["evaluation", "freeze in turn", "a hook is added", "a parameter is assigned"]


@pytest.mark.parametrize("action", ACTIONS)
def test_what_code_between_steps_changes_in_modules_is_undone_or_told(action: str, tmp_path: Path) -> None:
    verdict = judge(StructureCase(action, "between steps", "in step 6", True), 1, tmp_path)

    assert verdict.partition(":")[0] not in FAILURES, verdict


def test_code_that_is_not_undone_after_an_undone_step_is_found(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(StepImages, "put_back_modules", lambda _: None)

    verdicts = [judge(StructureCase("evaluation", "between steps", "in step 6", True), n, tmp_path) for n in range(3)]

    assert any(verdict.startswith("SILENT") for verdict in verdicts), verdicts
