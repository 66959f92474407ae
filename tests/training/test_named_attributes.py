"""Attributes of an object that was handed over: those which its `state_dict` does not name are carried."""

import copy
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from relight.training.state.handed.handed import sort_by_kind
from relight.training.state.handed.named import attributes_of_state
from relight.transfer.io.codec import decode_tree
from tests.training.carried_loop import Loop, run_script


class Average:
    def __init__(self) -> None:
        self.value, self.calls, self._decay, self.parts, self.since = 0.0, 0, 0.9, [0], 0

    @property
    def decay(self) -> float:
        return self._decay

    def inner(self) -> dict[str, Any]:
        return {str(number): self.parts[number] for number in range(len(self.parts))}

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "decay": self.decay, **self.inner()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._decay, self.since = state["value"], state["decay"], 0


class OfAll(Average):
    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class OfOnesAbove(Average):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}


class ByName(Average):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class InMemory(Average):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class OfBoth(Average):
    def state_dict(self) -> dict[str, Any]:
        own = self
        return {"value": own.value}


class InSlots:
    __slots__ = ("calls", "value")

    def __init__(self) -> None:
        self.value, self.calls = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_attributes_that_these_methods_name_are_found_in_their_code() -> None:
    assert attributes_of_state(Average()) == frozenset({"value", "_decay", "parts", "since"})
    assert attributes_of_state(InSlots()) == frozenset({"value"})


@pytest.mark.parametrize("kind", [OfAll, OfOnesAbove, ByName, InMemory, OfBoth])
def test_methods_that_may_use_any_attribute_tell_nothing(kind: type) -> None:
    assert attributes_of_state(kind()) is None


SCRIPT = """
class Average:
    def __init__(self):
        self.value, self.calls, self.history, self.mean = 0.0, 0, [], 0.0
    def update(self, x):
        self.calls += 1
        self.mean += (x - self.mean) / self.calls
        self.history.append(x)
        if self.calls % 2 == 0:
            self.value = 0.5 * self.value + x
    def state_dict(self):
        return {"value": self.value}
    def load_state_dict(self, state):
        self.value = state["value"]

def run():
    average = Average()
    steps.hand_over_object(average)
    for step in steps():
        with step as x:
            UPDATE
            step.end()
    return average.calls, average.history, average.mean
result = run()
"""


@pytest.mark.parametrize("update", ["average.update(x)", 'eval("average.update(x)", {"average": average, "x": x})'])
def test_other_attributes_are_undone_and_reach_a_replacement(update: str, tmp_path: Path) -> None:
    source = SCRIPT.replace("UPDATE", update)
    first, undone = Loop(), Loop(fails_at=2)
    whole = run_script(source, first, tmp_path)
    assert whole[0] == 6
    assert run_script(source, undone, tmp_path) == whole
    assert run_script(source, Loop(begins_at=4, tree=decode_tree(first.kept[4])), tmp_path) == whole


class OfModule:
    def __init__(self, module: nn.Module) -> None:
        self.module, self.updates, self.other = module, 0, [0]

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.module.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.updates = state["updates"]


def test_a_module_with_buffers_that_an_object_has_for_its_state_is_handed_over_itself() -> None:
    model, plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 2)
    own, average = OfModule(model), OfModule(copy.deepcopy(model))
    found = sort_by_kind({"model": model}, {}, {"trainer": own, "ema": average, "linear": OfModule(plain)}, {})
    assert found.modules == {"model": model, "ema": average.module}
    assert found.objects.keys() == {"trainer", "linear"}
