"""Attributes that a method reads before it assigns them on some way through it: state, and no mere result."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch

from relight.training.state.modules.attribute_uses import reads_first


def first_call_is_special(self: Any, x: Any) -> Any:
    if self.count == 0:
        self.mean = x
    else:
        self.mean = 0.5 * self.mean + x
    return self.mean


def assigned_in_a_branch(self: Any, x: Any) -> Any:
    if x:
        self.mean = x
    return self.mean


def assigned_in_a_loop(self: Any, x: Any) -> Any:
    for one in x:
        self.mean = one
    return self.mean


def read_in_a_loop(self: Any, x: Any) -> None:
    while x:
        x = x - self.mean
        self.mean = x


def augmented(self: Any, x: Any) -> None:
    self.mean += x


def in_a_comprehension(self: Any, x: Any) -> Any:
    return [self.mean + one for one in x]


def result_of_a_branch(self: Any, x: Any) -> Any:
    if self.training:
        self.mean = x
        return self.mean * 2
    return x


def result(self: Any, x: Any) -> Any:
    self.mean = x
    for one in range(3):
        self.mean = self.mean + one
    return [self.mean + one for one in range(3)]


def result_inside_a_context(self: Any, x: Any) -> Any:
    if x is None:
        return None
    with torch.no_grad():
        self.mean = x
    return self.mean


STATE = (
    first_call_is_special,
    assigned_in_a_branch,
    assigned_in_a_loop,
    read_in_a_loop,
    augmented,
    in_a_comprehension,
)
RESULTS = (result_of_a_branch, result, result_inside_a_context)


@pytest.mark.parametrize("method", [*STATE, *RESULTS], ids=lambda method: method.__name__)
def test_every_way_through_a_method_counts(method: Callable[..., Any]) -> None:
    assert isinstance(method, FunctionType)
    assert reads_first(method, "mean") is (method in STATE)
