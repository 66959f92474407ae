"""Code of the script between a step's block and the next one: what it sees in a rehearsal, and parts that it names."""

from pathlib import Path
from typing import Any

import pytest

from relight.transfer.io.codec import decode_tree
from tests.training.carried_loop import Loop, run_script

SCRIPT = """
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
hand_over(net, optimizer)
losses, seen, count, layer = [], [], 0, net
for step in steps():
    with step as value:
        losses.append(value * (1 + len(list(layer.parameters()))) + count)
        step.end()
    AFTER
result = losses, count, [net, *net].index(layer)
"""
AFTER = {
    "the newest loss": "print(losses[-1], sum(losses) / len(losses))",
    "a count": "count += len(losses) if step.committed else 0",
    "a list in place": "seen.append(losses[-1])\n    count = sum(seen[-2:]) if step.committed else count",
    "another layer": "layer = net[2] if step.number == 2 else layer",
    "one layer or the other": "layer = net[2 * (step.number % 2)]",
}
WRITES = (
    "net[0].weight.data.mul_(0.9)",
    "for p in net.parameters():\n        p.data = p.data * 0.9",
    "net.load_state_dict(net.state_dict())",
    "net.train(step.number % 2 == 0)",
)


def run(after: str, loop: Loop, directory: Path) -> Any:
    return run_script(SCRIPT.replace("AFTER", after), loop, directory)


@pytest.mark.parametrize("begins_at", range(1, 5))
@pytest.mark.parametrize("name", AFTER)
def test_a_replacement_goes_on_alike_or_that_is_doubted(name: str, begins_at: int, tmp_path: Path) -> None:
    """Its rehearsal has a step's values for this code, and leaves nothing of them."""
    first = Loop()
    expected = run(AFTER[name], first, tmp_path)
    replacement = Loop(begins_at=begins_at, tree=decode_tree(first.kept[begins_at]))
    assert run(AFTER[name], replacement, tmp_path) == expected
    assert not replacement.doubt


@pytest.mark.parametrize("write", WRITES)
def test_code_that_writes_into_a_module_is_read_without_refusal(write: str, tmp_path: Path) -> None:
    """A change shows between the steps: this code may put back what it changes, or end the loop."""
    run(f"if step.number == 4:\n        {write.replace('        ', '            ')}", Loop(), tmp_path)
