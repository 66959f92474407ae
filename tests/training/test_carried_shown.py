"""Objects of the script's that an integration holds, where no name of the loop's reaches them."""

from pathlib import Path
from typing import Any

import pytest

from relight.transfer.io.codec import decode_tree
from tests.training.carried_loop import STEPS, Loop, run_script

SCRIPT = """
import weakref
from collections import deque
import torch

class Average:
    def __init__(self):
        self.count, self.shadow = 0, {"w": torch.zeros(2)}
    def update(self, value):
        self.count += 1
        self.shadow["w"] = 0.9 * self.shadow["w"] + 0.1 * value

class Callback:
    def __init__(self):
        self.average, self.window, self.librarys = Average(), deque(maxlen=3), 0
    def on_step(self, value):
        self.average.update(value)
        self.window.append(value)
        self.librarys += 1

def run():
    steps.hidden = Callback()
    held = weakref.WeakValueDictionary({"callback": steps.hidden})
    SHOW
    for step in steps():
        with step as value:
            held["callback"].on_step(value)
            step.end()
    callback = steps.hidden
    return callback.average.count, callback.average.shadow["w"].tolist(), list(callback.window), callback.librarys
result = run()
"""
SHOW = "steps.carried.show('callback', steps.hidden, lambda name, value: name == 'librarys')"


def run(loop: Loop, directory: Path, show: str = SHOW) -> Any:
    return run_script(SCRIPT.replace("SHOW", show), loop, directory)


@pytest.mark.parametrize("step", range(STEPS))
def test_what_is_shown_is_undone_with_its_step(step: int, tmp_path: Path) -> None:
    whole = run(Loop(), tmp_path)
    assert run(Loop(fails_at=step), tmp_path)[:3] == whole[:3]


@pytest.mark.parametrize("step", range(3, STEPS))
def test_a_replacement_gets_what_is_shown(step: int, tmp_path: Path) -> None:
    first = Loop()
    whole = run(first, tmp_path)
    tree = decode_tree(first.kept[step])
    assert run(Loop(begins_at=step, tree=tree), tmp_path)[:3] == whole[:3]


def test_without_it_a_step_would_count_twice(tmp_path: Path) -> None:
    assert run(Loop(fails_at=2), tmp_path, "pass")[0] == STEPS + 1


def test_what_the_integration_keeps_is_left_to_it(tmp_path: Path) -> None:
    assert run(Loop(fails_at=3), tmp_path)[3] == STEPS + 1


def test_objects_of_packages_are_not_looked_into() -> None:
    assert not Loop().carried.show("path", Path("/"), lambda _name, _value: False)
