"""Objects that hold what cannot be written down beside what steps change: each part is kept by itself."""

from pathlib import Path

import pytest

from relight.transfer.io.codec import decode_tree
from tests.training.carried_loop import Loop, run_script

SCRIPT = """
import torch
from torch import nn

class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.held = {"a": torch.ones(2)}
    def forward(self, x):
        self.held["a"].mul_(0.9).add_(x)
        return self.held["a"].sum().item()

class Meter:
    def __init__(self):
        self.sums, self.layer = [torch.zeros(1)], nn.Linear(1, 1)

class Trainer:
    def __init__(self):
        self.criterion, self.meter, self.scale, self.inner = Criterion(), Meter(), torch.ones(2), None
    def factor(self, x):
        self.meter.sums[0].add_(x)
        setattr(self, "sca" + "le", self.scale.mul_(0.9).add_(x))
        return self.criterion(x) + self.scale.sum().item() + self.meter.sums[0].item()

def main():
    trainer, found = MADE, []
    for step in steps():
        with step as value:
            found.append(CALLED)
            step.end()
    return found
result = main()
"""
CASES = {
    "an object": ("Trainer()", "trainer.factor(value)"),
    "an object in an object": (
        "Trainer(); trainer.inner = Trainer()",
        "trainer.factor(value) + trainer.inner.factor(value)",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_part_deep_inside_is_undone_and_reaches_a_replacement(case: tuple[str, str], tmp_path: Path) -> None:
    made, called = case
    script = (
        SCRIPT.replace("MADE, []", made).replace("CALLED", called).replace("trainer, found =", "found, trainer = [],")
    )
    first = Loop()
    expected = run_script(script, first, tmp_path)
    for number in range(1, 5):
        assert run_script(script, Loop(fails_at=number), tmp_path) == expected
        replacement = Loop(begins_at=number, tree=decode_tree(first.kept[number]))
        assert run_script(script, replacement, tmp_path) == expected
