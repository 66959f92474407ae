"""Values of every kind in attributes of layers: undone with a step, and kept for a replacement."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from relight.training.state.modules.attributes import AttributeLog
from relight.transfer.io.codec import decode_tree, encode_tree
from tests.idioms.kinds import GENERATORS, IN_PLACE, ITERATORS, KINDS, OBJECTS, Kind

ELSEWHERE = (*ITERATORS, *OBJECTS, *GENERATORS)  # carried as the script's own values are
PLAIN = {name: kind for name, kind in KINDS.items() if name not in ELSEWHERE}


class Layer(nn.Module):
    """Reads its value, then changes it."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.held = kind.start()

    def update(self) -> None:
        """Give it its next values until one differs."""
        before = self.shown()
        for number in range(1, 20):
            self.held = self.kind.update(self.held, 0.113 * number)
            if self.shown() != before:
                return
        raise AssertionError(f"it stays {before}")

    def shown(self) -> tuple[float, str]:
        return self.kind.number(self.held), repr(self.held)


@contextmanager
def logged(layer: Layer) -> Iterator[AttributeLog]:
    log = AttributeLog({"net": layer})
    log.install()
    yield log
    log.remove()


def step(log: AttributeLog, layer: Layer, *, learning: bool, changes: bool = True) -> None:
    """Take one step that counts."""
    log.begin(learning=learning)
    if changes:
        layer.update()
    log.notice()
    log.commit()


@pytest.mark.parametrize("is_late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("name", PLAIN)
def test_a_kind(name: str, is_late: bool) -> None:
    layer = Layer(PLAIN[name])
    with logged(layer) as log:
        for _ in range(3):
            step(log, layer, learning=True, changes=not is_late)
        before, held = layer.shown(), layer.held
        log.begin(learning=False)
        layer.update()
        log.notice()
        log.roll_back()
        assert layer.shown() == before
        assert layer.held is held
        step(log, layer, learning=False)
        after, kept = layer.shown(), encode_tree(log.private(), "attributes")
    successor = Layer(PLAIN[name])
    mine = successor.held
    with logged(successor) as log:
        log.adopt(decode_tree(kept))
    assert successor.shown() == after
    assert type(successor.held) is type(layer.held)
    assert name not in IN_PLACE or successor.held is mine


def test_members_stay_the_objects_that_other_names_stand_for() -> None:
    layer = Layer(KINDS["nested in place"])
    inner = layer.held["a"][0]
    with logged(layer) as log:
        for _ in range(3):
            step(log, layer, learning=True)
        before = inner["b"]
        log.begin(learning=False)
        layer.update()
        log.roll_back()
    assert layer.held["a"][0] is inner
    assert inner["b"] == before


def test_a_view_of_a_parameter_is_put_back_with_the_parameter() -> None:
    layer = Layer(KINDS["tensor in place"])
    layer.weight = nn.Parameter(torch.ones(2))
    layer.held = {"view": layer.weight.detach(), "own": torch.ones(2)}
    with logged(layer) as log:
        log.begin(learning=True)
        with torch.no_grad():
            layer.weight.add_(1)
        layer.held["own"] += 1
        log.roll_back()
    assert layer.weight.tolist() == [2.0, 2.0]
    assert layer.held["own"].tolist() == [1.0, 1.0]
    assert layer.held["view"].data_ptr() == layer.weight.data_ptr()


def test_a_class_that_no_other_process_finds_is_not_kept() -> None:
    class Counted(list[Any]):
        """Lies in a function."""

    layer = Layer(Kind(Counted, lambda v, x: Counted([*v, x]), len))
    with logged(layer) as log:
        step(log, layer, learning=True)
        assert log.private() == {}
