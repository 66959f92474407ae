"""Layers and averages that hooks of a framework's Trainer make in a step, found before the first step."""

import copy
from types import MethodType
from typing import Any

import pytest
from torch import nn
from torch.optim.swa_utils import AveragedModel

from relight.training.carried.reading.hooks import made_in


class AttributeDict(dict):  # type: ignore[type-arg]
    """Stands for that of Lightning: settings by their names."""


class Model(nn.Module):
    """Settings that no hook changes, and one that a hook does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.teacher: nn.Module | None = None
        self.there = nn.Linear(2, 2)
        self.uses_teacher, self.decided, self.epoch = False, False, 0
        self._hparams = AttributeDict(uses_teacher=False, has_more=True)

    @property
    def hparams(self) -> Any:
        return self._hparams

    def without(self) -> None:
        self.teacher = None

    def by_condition(self) -> None:
        if self.teacher is None and self.now() == 3:
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def now(self) -> int:
        return int(input())

    def by_call(self) -> None:
        self.by_condition()

    def by_constant(self) -> None:
        if self.uses_teacher:
            self.teacher = copy.deepcopy(self.net)

    def by_hyperparameter(self) -> None:
        if self.hparams.uses_teacher:
            self.teacher = copy.deepcopy(self.net)

    def by_another(self) -> None:
        if self.hparams.has_more:
            self.teacher = nn.Linear(2, 2)

    def by_flag(self) -> None:
        if self.decided:
            self.teacher = copy.deepcopy(self.net)

    def decides(self) -> None:
        self.decided = True

    def again(self) -> None:
        self.there = copy.deepcopy(self.net)

    def without_tensors(self) -> None:
        self.teacher = nn.MSELoss()

    def beside(self) -> None:
        other = copy.deepcopy(self.net)
        other.eval()


class Callback:
    def on_step(self, trainer: Any, model: nn.Module) -> None:
        if self.is_time(trainer):
            model.head = nn.Linear(2, 2)

    def is_time(self, trainer: Any) -> bool:
        return bool(trainer.step == 6)


FOUND = {
    "by_condition": "self.teacher",
    "by_call": "self.teacher",
    "by_another": "self.teacher",
    "by_flag": "self.teacher",
}
NONE = ("without", "by_constant", "by_hyperparameter", "again", "without_tensors", "beside")


def layer_in(hook: Any, model: Model) -> str | None:
    assert isinstance(hook, MethodType)
    made = made_in([hook], {"model": model}, lambda thing: thing is model)
    return made.layer if made is not None else None


@pytest.mark.parametrize("hook", [*FOUND, *NONE])
def test_a_layer_that_a_hook_may_make(hook: str) -> None:
    model = Model()
    assert layer_in(getattr(model, hook), model) == FOUND.get(hook)


class Averages:
    def __init__(self, begins: int | None) -> None:
        self.begins = begins
        self.average: AveragedModel | None = None
        self.best: nn.Module | None = None

    def on_step(self, step: int, model: nn.Module) -> None:
        if self.begins is not None and step >= self.begins:
            if self.average is None:
                self.average = AveragedModel(model)
            self.average.update_parameters(model)
        if self.best is None:
            self.best = copy.deepcopy(model)

    def shows(self, model: nn.Module) -> None:
        average = AveragedModel(model)
        print(average)


def test_an_average_that_a_callback_makes_in_a_step() -> None:
    """A copy that is only exchanged, the best so far, say, is left to what is seen."""
    for callback, expected in ((Averages(6), AveragedModel), (Averages(None), None)):
        hooks: list[Any] = [callback.on_step, callback.shows]
        made = made_in(hooks, {"model": Model()}, lambda _: False)
        assert (made and made.kind) is expected


def test_a_layer_that_a_callback_puts_into_what_it_is_given() -> None:
    assert layer_in(Callback().on_step, Model()) == "model.head"
