"""Modules that trainers and callbacks hold when training begins, which are handed over with the model."""

import copy
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from relight.integrations.trainers.held import modules_held

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
