"""Digests of values: any value has one, the same as long as nothing changes, and another one after each change."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from relight.training.state.values.contents import Digests


def digest(value: Any) -> int:
    return Digests(lambda _: False).of(value)


def deep(depth: int) -> list[Any]:
    value: list[Any] = [0]
    for _ in range(depth):
        value = [value]
    return value


def innermost(value: list[Any]) -> list[Any]:
    while isinstance(value[0], list):
        value = value[0]
    return value


CASES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "array without dimensions": (np.array(1.0), lambda v: v.fill(2.0)),
    "array of an object": (np.array([None], dtype=object).reshape(()), lambda v: v.fill("a")),
    "array of text": (np.array("abc"), lambda v: v.fill("abd")),
    "array in columns": (np.asfortranarray(np.zeros((2, 3))), lambda v: v.fill(1)),
    "array of every other element": (np.zeros(8)[::2], lambda v: v.fill(1)),
    "array of times": (np.zeros(3, dtype="M8[s]"), lambda v: v.fill(7)),
    "tensor without dimensions": (torch.zeros(()), lambda v: v.data.add_(1)),
    "torch generator": (torch.Generator(), lambda v: torch.rand(1, generator=v)),
    "NumPy generator": (np.random.default_rng(1), lambda v: v.random()),
    "deep list": (deep(5000), lambda v: innermost(v).append(1)),
    "text in a list": (["a" * 5000], lambda v: v.append(v.pop() + "b")),
    "long text": ({"text": "a" * 10**6}, lambda v: v.update(text="a" * (10**6 - 1) + "b")),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_change_is_seen_and_nothing_else(case: tuple[Any, Callable[[Any], Any]]) -> None:
    value, change = case
    before = digest(value)
    assert digest(value) == before
    change(value)
    assert digest(value) != before


def test_draws_from_a_generator_are_seen_one_by_one() -> None:
    generator = torch.Generator()
    seen = [digest(generator)]
    for _ in range(700):  # more than its memory has numbers
        torch.rand(1, generator=generator)
        seen.append(digest(generator))
    assert len(set(seen)) == len(seen)
