"""Modules that trainers and callbacks hold when training begins, which are handed over with the model."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from relight.integrations.trainers.held import modules_held
from relight.training.state.handed.schedulers import missing_schedulers

MODEL = nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def held(**attributes: Any) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    return modules_held({"callback_0": SimpleNamespace(**attributes)}, (MODEL,))


def test_a_teacher_and_an_average_are_found_by_themselves() -> None:
    teacher, average = copy.deepcopy(MODEL), AveragedModel(MODEL)
    assert held(teacher=teacher, average=average, decay=0.9) == (
        {"callback_0_teacher": teacher},
        {"callback_0_average": average},
    )


def test_what_is_handed_over_anyway_is_not_taken_twice() -> None:
    teacher = copy.deepcopy(MODEL)
    modules, _ = held(model=MODEL, layer=MODEL[0], wrapped=nn.Sequential(MODEL), teacher=teacher, same=teacher)
    assert modules == {"callback_0_teacher": teacher}


def test_modules_without_parameters_have_no_state_of_all_ranks() -> None:
    """A metric keeps sums of its rank."""
    counting = nn.BatchNorm1d(2, affine=False)
    assert held(loss=nn.MSELoss(), counting=counting, none=None) == ({}, {})


def test_a_scheduler_of_a_callbacks_own_is_taken_and_the_trainers_is_not() -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), 0.1)
    plateau, theirs = ReduceLROnPlateau(optimizer), ExponentialLR(optimizer, 0.9)
    holders = {"callback_0": SimpleNamespace(plateau=plateau, theirs=theirs)}
    modules, others = modules_held(holders, (MODEL,), (theirs,))
    assert (modules, list(others)) == ({}, ["callback_0_plateau"])
    assert others["callback_0_plateau"].state_dict() == plateau.state_dict()
    assert missing_schedulers([optimizer], [theirs, *others.values()]) == []


class Own:
    """An object of the script's."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def state_dict(self) -> dict[str, Any]:
        """Say a part of it, perhaps: relight looks into it instead."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take nothing."""


def test_objects_of_the_scripts_and_containers_are_looked_into() -> None:
    teachers = [copy.deepcopy(MODEL), copy.deepcopy(MODEL)]
    modules, others = held(ema=Own(module=teachers[0], deeper=Own(by_name={"late": teachers[1]})))
    assert modules == {"callback_0_ema_module": teachers[0], "callback_0_ema_deeper_by_name_late": teachers[1]}
    assert others == {}


def test_an_average_of_a_library_is_handed_over_and_what_frameworks_keep_is_not() -> None:
    of_library = msgspec.Struct.__class__  # a class is no object with state
    methods = {name: vars(Own)[name] for name in ("state_dict", "load_state_dict")}
    average = type("Average", (), {"__module__": "msgspec", **methods})()
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    assert held(average=average, kind=of_library, optimizer=optimizer) == ({}, {"callback_0_average": average})


def test_circles_end() -> None:
    own = Own(model=MODEL)
    own.__dict__["again"] = own
    assert held(own=own) == ({}, {})


def test_what_callbacks_set_on_objects_of_the_library_goes_back_and_to_a_replacement(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from relight.integrations.transformers.settings import Settings

    def make() -> Any:
        config = transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)
        args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
        return transformers.Trainer(model=transformers.GPT2LMHeadModel(config), args=args)

    def seen(trainer: Any) -> list[Any]:
        state = vars(trainer.state)
        return [state.get("marks"), state.get("once"), trainer.args.max_grad_norm, trainer.model.config.attn_pdrop]

    trainer, other = make(), make()
    settings, theirs = Settings(trainer), Settings(other)
    first = settings.state_dict()
    assert first == {}
    trainer.state.marks, trainer.args.max_grad_norm, trainer.model.config.attn_pdrop = [np.int64(1)], 0.5, 0.3
    second = settings.state_dict()
    trainer.state.marks.append(2)
    trainer.state.once, trainer.args.max_grad_norm = 1, 1.0
    theirs.load_state_dict(second)
    assert seen(other) == [[1], None, 0.5, 0.3]
    settings.load_state_dict(second)
    assert seen(trainer) == seen(other)
    settings.load_state_dict(first)
    assert seen(trainer) == seen(make())
