"""Loaders that only an evaluation reads: the next pass over them goes on where the last one ended."""

from pathlib import Path

import pytest

from relight.transfer.io.codec import decode_tree
from tests.training.carried_loop import Loop, run_script

SCRIPT = """
import torch
from torch.utils.data import DataLoader, RandomSampler

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hand_over(model, optimizer)
def run():
    LOADER
    orders = []
    for step in steps():
        with step as value:
            if step.number in (5, 7, 9):
                orders.append([each.tolist() for each in loader])
            step.end()
    return orders
result = run()
"""
LOADERS = {
    "by its generator": "loader = DataLoader(range(6), shuffle=True, generator=torch.Generator().manual_seed(1))",
    "by a generator that has a name": (
        "g = torch.Generator().manual_seed(1); loader = DataLoader(range(6), shuffle=True, generator=g)"
    ),
    "by a sampler": (
        "loader = DataLoader(range(6), sampler=RandomSampler(range(6), generator=torch.Generator().manual_seed(1)))"
    ),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("begins_at", [6, 8])
def test_a_replacement_goes_on_in_the_same_order(name: str, begins_at: int, tmp_path: Path) -> None:
    script = SCRIPT.replace("LOADER", LOADERS[name])
    first = Loop(until=12)
    whole = run_script(script, first, tmp_path)
    second = Loop(until=12, begins_at=begins_at, tree=decode_tree(first.kept[begins_at]))
    assert run_script(script, second, tmp_path)[-1:] == whole[-1:]


@pytest.mark.parametrize("name", LOADERS)
def test_an_evaluation_that_is_undone_is_repeated_in_the_same_order(name: str, tmp_path: Path) -> None:
    script = SCRIPT.replace("LOADER", LOADERS[name])
    whole = run_script(script, Loop(until=12), tmp_path)
    assert run_script(script, Loop(until=12, fails_at=7), tmp_path) == whole
