"""State of a Lightning callback: put back in the process itself, and made anew in one whose callback is blank."""

import copy
from typing import Any

import pytest

pytest.importorskip("lightning", exc_type=ImportError)

import torch
from lightning.pytorch.callbacks import Callback

from relight.errors import UsageError
from relight.integrations.lightning import callbacks
from relight.integrations.lightning.values import compact, expand


class Found:
    def __init__(self, number: int) -> None:
        self.number, self.mean = number, torch.full((2,), float(number))


class Table(dict[str, int]):
    """An object whose contents are not its attributes."""


class Net(torch.nn.Linear):
    """A module of the script's own."""


class Holder(Callback):
    def __init__(self) -> None:
        self.found: list[Any] = []
        self.best: Any = None
        self.named: dict[str, Any] = {}


def saved(holder: Holder) -> Any:
    return expand(compact({"state": copy.deepcopy(callbacks.state_of(holder))}))["state"]


def test_objects_that_steps_made_are_made_in_a_replacement_and_undone_in_a_survivor() -> None:
    holder = Holder()
    holder.found = [Found(0), [Found(1)], 2]
    holder.best, holder.named = holder.found[0], {"last": Found(3)}
    state, first = saved(holder), holder.found[0]

    replacement = Holder()
    callbacks.load(replacement, state)
    assert [replacement.found[0].number, replacement.found[1][0].number, replacement.found[2]] == [0, 1, 2]
    assert replacement.best is replacement.found[0]
    assert replacement.named["last"].mean.tolist() == [3, 3]

    first.number = 7
    holder.found.append(Found(8))
    holder.best = holder.found[-1]
    callbacks.load(holder, state)
    assert (len(holder.found), first.number, holder.best) == (3, 0, first)
    assert holder.found[0] is first


@pytest.mark.parametrize("thing", [Table(a=1), (Found(0),), torch.nn.Linear(1, 1), Net(1, 1)])
def test_a_replacement_without_an_object_that_cannot_be_made_says_so(thing: Any) -> None:
    holder = Holder()
    holder.found = [thing]
    callbacks.load(holder, saved(holder))
    with pytest.raises(UsageError, match=r"callback Holder: found.* has objects that steps made"):
        callbacks.load(Holder(), saved(holder))


def test_modules_are_found_wherever_a_callback_holds_them_less_those_around_known_ones() -> None:
    holder, known = Holder(), torch.nn.Linear(1, 1)
    holder.best, holder.named = Found(0), {"one": [Net(1, 1)], "gelu": torch.nn.GELU()}
    holder.best.average = torch.nn.Linear(1, 1)
    holder.found = [known, torch.nn.Sequential(known)]
    assert [way for way, _ in callbacks.modules_of(holder, {known})] == [("best", "average"), ("named", "one", 0)]


class Saver(Holder):
    """Its state_dict says one of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.ema: Any = None
        self.other: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"ema": self._ema()}

    def _ema(self) -> Any:
        return self.ema and self.ema.state_dict()


class SavesAll(Holder):
    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def test_a_state_dict_says_the_modules_that_its_code_names_and_nothing_that_is_carried() -> None:
    averages, found = [Net(1, 1)], Found(0)
    found.average = Net(1, 1)  # type: ignore[attr-defined]
    for value in (Net(1, 1), averages, {"a": averages}, found):
        assert callbacks.says_itself(Saver(), "ema", value)
        assert not callbacks.says_itself(Saver(), "other", value)
        assert not callbacks.says_itself(Holder(), "ema", value)
        assert callbacks.says_itself(SavesAll(), "other", value)
    for other in (None, Found(0), [1.0], torch.Generator()):
        assert not callbacks.says_itself(Saver(), "ema", other)
