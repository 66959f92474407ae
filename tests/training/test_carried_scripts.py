"""Scripts composed of ways to hold state from step to step: undone, and gone on with, they end as the undisturbed one.

`python -m tests.training.carried_scripts --seeds 0..10000` tries more of them.
"""

from pathlib import Path

import pytest

from tests.training.carried_scripts import compose, judge


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=pytest.mark.all if first % 100 else ()) for first in range(0, 200, 25)]
)
def test_no_script_ends_with_other_values_in_silence(first: int, tmp_path: Path) -> None:
    verdicts = {seed: judge(compose(seed), seed, tmp_path) for seed in range(first, first + 25)}
    assert not {seed: verdict for seed, verdict in verdicts.items() if verdict.startswith("SILENT")}
    assert any(verdict == "equal" for verdict in verdicts.values())
