"""Values compared in every step: marked anew once they have changed, and not crowded out by many layers."""

from pathlib import Path
from typing import Any

import pytest

from relight.training.carried.finding.watch import Watch
from tests.training.carried_loop import Loop, run_script

LAYER = """
import torch

class Thing:
    pass

def run():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.25))
    hand_over(net, torch.optim.SGD(net.parameters(), 0.1))
    values, seen = {5: 0.5, 7: Thing()}, []
    def act(number):
        net[1].p = values[number]
    acts = [act]
    for step in steps():
        with step as value:
            if step.number in values:
                seen.append(str(net[1].p))
                eval("acts[0](number)", {"acts": acts, "number": step.number})
            step.end()
    return seen
result = run()
"""
MANY = """
import torch

count = 0

def act():
    global count
    count += 1

def run():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), *(torch.nn.ReLU() for _ in range(600)))
    hand_over(net, torch.optim.SGD(net.parameters(), 0.1))
    acts = [act]
    for step in steps():
        with step as value:
            if step.number == 5:
                eval("acts[0]()", {"acts": acts})
            step.end()
    return count
result = run()
"""
FLAGS = """
import enum
import torch

class Part(enum.Flag):
    HEAD = 1
    BODY = 2

def run():
    net = torch.nn.Linear(2, 2)
    hand_over(net, torch.optim.SGD(net.parameters(), 0.1))
    rest = 0
    for step in steps():
        with step as value:
            if step.number > 4:
                rest = rest + (~Part.HEAD).value
            step.end()
    return rest
result = run()
"""
IGNORED = """
class Clock:
    def __init__(self):
        self.ticks, self.seen = 0, 0

    def tick(self):
        vars(self)["ticks"] += 1

def run():
    clock = Clock()
    carry(ignore=("clock",))
    for step in steps():
        with step as value:
            clock.tick()
            step.end()
    return clock.ticks
result = run()
"""


def test_a_value_that_changed_goes_back_to_what_it_was_last(tmp_path: Path) -> None:
    assert run_script(LAYER, Loop(until=8), tmp_path) == ["0.25", "0.5"]
    assert run_script(LAYER, Loop(until=8, fails_at=7), tmp_path) == ["0.25", "0.5"]


def test_a_watch_that_marks_nothing_again_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Watch.begin

    def planted(self: Any) -> None:
        before = list(self._marks)
        begin(self)
        self._marks = before or self._marks

    monkeypatch.setattr(Watch, "begin", planted)
    assert run_script(LAYER, Loop(until=8, fails_at=7), tmp_path) != ["0.25", "0.5"]


def test_names_of_a_script_are_watched_beside_hundreds_of_layers(tmp_path: Path) -> None:
    assert run_script(MANY, Loop(until=7, fails_at=5), tmp_path) == run_script(MANY, Loop(until=7), tmp_path) == 1


def test_what_a_flag_notes_of_its_members_is_no_change(tmp_path: Path) -> None:
    """`~member` is kept with the member once it has been asked for."""
    loop = Loop(until=7, fails_at=5)
    assert run_script(FLAGS, loop, tmp_path) == 4
    assert not loop.doubt


def test_what_the_script_ignores_is_not_compared_in_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Watch.changes
    changes = list[Any]()

    def noted(self: Any, *, settings: bool) -> Any:
        for change in found(self, settings=settings):
            changes.append(change)
            yield change

    monkeypatch.setattr(Watch, "changes", noted)
    assert run_script(IGNORED, Loop(until=8), tmp_path) == 8
    assert not changes
