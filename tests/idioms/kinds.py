"""Kinds of values that scripts keep from step to step, each with a rule for its next value.

A script makes a table of them: one row for each kind, wherever it keeps values (attributes of layers, an optimizer's
state, hooks, datasets), so that a kind that gets lost shows as a number of its own in the digest.
"""

import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch


class Pair(NamedTuple):
    """Holds two values."""

    a: Any
    b: Any


class Mode(enum.Enum):
    """Names two ways to go on."""

    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Record:
    """Holds a tensor and a count."""

    h: torch.Tensor
    n: int = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Holds a number that cannot be assigned."""

    v: float


class Plain:
    """Holds one value in its `__dict__`."""

    def __init__(self, v: Any) -> None:
        self.v = v


class Slots:
    """Holds one value in a slot."""

    __slots__ = ("v",)

    def __init__(self, v: Any) -> None:
        self.v = v


class Kind:
    """Describes a kind of value.

    Args:
        start: returns the first value.
        update: (value, float) -> the next value; a kind that is changed in place returns the value it was given.
        number: value -> float, by which the value shows.
    """

    def __init__(
        self, start: Callable[[], Any], update: Callable[[Any, float], Any], number: Callable[[Any], float]
    ) -> None:
        self.start, self.update, self.number = start, update, number


def small(x: float, below: int) -> int:
    """Return a whole number of 0 to `below` - 1 that depends on `x`."""
    return int(abs(x) * 1000) % below


def _append(v: Any, x: float) -> Any:
    v.append(x)
    if len(v) > 3:
        del v[0]
    return v


def _put(v: Any, x: float) -> Any:
    v["a"] = v["a"] * 0.9 + x
    return v


def _nested(v: Any, x: float) -> Any:
    v["a"][0]["b"] = v["a"][0]["b"] * 0.9 + x
    v["a"].append({"b": x})
    del v["a"][1:-1]
    return v


def _set_attribute(v: Any, x: float) -> Any:
    v.v = v.v * 0.9 + x
    return v


def _write(v: Any, x: float) -> Any:
    v *= 0.9
    v += x
    return v


def _add(v: Any, x: float) -> Any:
    v.add(small(x, 7))
    if len(v) > 4:
        v.discard(min(v))
    return v


def _draw(v: Any, x: float) -> Any:
    for _ in range(1 + small(x, 3)):
        v.random()
    return v


def _draw_torch(v: torch.Generator, x: float) -> torch.Generator:
    torch.rand(1 + small(x, 3), generator=v)
    return v


def _peek(v: Any) -> float:
    return float(copy.deepcopy(v).random())


def _peek_torch(v: torch.Generator) -> float:
    return torch.rand(1, generator=v.clone_state()).item()


def _advance(v: Iterator[Any], x: float) -> Iterator[Any]:
    for _ in range(1 + small(x, 3)):
        next(v)
    return v


def _peek_iterator(v: Iterator[Any]) -> float:
    return float(next(copy.deepcopy(v)))


NEW = {  # assigned anew
    "float": Kind(lambda: 1.0, lambda v, x: v * 0.9 + x, float),
    "int": Kind(lambda: 1, lambda v, x: (v * 3 + small(x, 5)) % 11, float),
    "bool": Kind(lambda: True, lambda v, x: v != (x > 0), float),
    "none": Kind(lambda: None, lambda v, x: x if v is None else None, lambda v: 0.0 if v is None else v),
    "text": Kind(lambda: "a", lambda v, x: (v + "abcdefg"[small(x, 7)])[-4:], lambda v: sum(map(ord, v)) % 13),
    "bytes": Kind(lambda: b"a", lambda v, x: (v + bytes([small(x, 250)]))[-4:], lambda v: sum(v) % 13),
    "complex": Kind(lambda: 1 + 1j, lambda v, x: v * 0.9 + complex(x, -x), lambda v: v.real + v.imag),
    "big int": Kind(lambda: 3**80, lambda v, x: (v * 3 + small(x, 9)) % 7**60, lambda v: float(v % 17)),
    "decimal": Kind(lambda: decimal.Decimal(1), lambda v, x: (v * 3 + decimal.Decimal(small(x, 9)) / 10) % 7, float),
    "fraction": Kind(
        lambda: fractions.Fraction(1, 2), lambda v, x: (v + fractions.Fraction(1, 3 + small(x, 5))) % 2, float
    ),
    "date": Kind(
        lambda: datetime.date(2024, 1, 1),
        lambda v, x: v + datetime.timedelta(days=1 + small(x, 5)),
        lambda v: v.toordinal() % 9,
    ),
    "enum": Kind(
        lambda: Mode.LOW, lambda v, x: Mode.HIGH if (v is Mode.LOW) == (x > 0) else Mode.LOW, lambda v: v.value
    ),
    "dtype": Kind(
        lambda: torch.float32,
        lambda v, x: torch.float64 if (v is torch.float32) == (x > 0) else torch.float32,
        lambda v: v.itemsize,
    ),
    "size": Kind(lambda: torch.Size([2]), lambda v, x: torch.Size([1 + (v[0] + small(x, 9)) % 5]), lambda v: v[0]),
    "range": Kind(lambda: range(3), lambda v, x: range((v.start + 1 + small(x, 9)) % 5, 9), lambda v: v.start),
    "slice": Kind(lambda: slice(1, 9), lambda v, x: slice((v.start + 1 + small(x, 9)) % 5, 9), lambda v: v.start),
    "tensor": Kind(lambda: torch.ones(2), lambda v, x: v * 0.9 + x, lambda v: v.sum().item()),
    "array": Kind(lambda: np.ones(2), lambda v, x: v * 0.9 + x, lambda v: float(v.sum())),
    "numpy number": Kind(lambda: np.float32(1), lambda v, x: np.float32(v * np.float32(0.9) + np.float32(x)), float),
    "tuple": Kind(lambda: (1.0, 2.0), lambda v, x: (v[1] * 0.9, v[0] * 0.9 + x), lambda v: v[0]),
    "tuple of tensors": Kind(
        lambda: (torch.ones(1), torch.ones(1)), lambda v, x: (v[1], v[0] * 0.9 + x), lambda v: v[0].item()
    ),
    "list": Kind(lambda: [1.0], lambda v, x: [*v[-2:], v[-1] * 0.9 + x], sum),
    "dict": Kind(lambda: {"a": 1.0}, lambda v, x: {"a": v["a"] * 0.9 + x}, lambda v: v["a"]),
    "frozen set": Kind(lambda: frozenset({1}), lambda v, x: frozenset({*list(v)[-2:], small(x, 7)}), sum),
    "named": Kind(lambda: Pair(1.0, 2.0), lambda v, x: Pair(v.b * 0.5, v.a * 0.9 + x), lambda v: v.a + v.b),
    "named tensors": Kind(
        lambda: Pair(torch.ones(2), 1), lambda v, x: Pair(v.a * 0.9 + x, v.b + 1), lambda v: v.a.sum().item() + v.b
    ),
    "record": Kind(
        lambda: Record(torch.ones(2)), lambda v, x: Record(v.h * 0.9 + x, v.n + 1), lambda v: v.h.sum().item() + v.n
    ),
    "frozen record": Kind(lambda: Frozen(1.0), lambda v, x: Frozen(v.v * 0.9 + x), lambda v: v.v),
    "plain object": Kind(lambda: Plain(1.0), lambda v, x: Plain(v.v * 0.9 + x), lambda v: v.v),
    "slots": Kind(lambda: Slots(1.0), lambda v, x: Slots(v.v * 0.9 + x), lambda v: v.v),
    "objects in a list": Kind(
        lambda: [Slots(1.0)], lambda v, x: [*v[-2:], Slots(v[-1].v * 0.9 + x)], lambda v: sum(s.v for s in v)
    ),
    "counter": Kind(
        lambda: collections.Counter(a=1),
        lambda v, x: collections.Counter(a=(v["a"] * 3 + small(x, 3)) % 11),
        lambda v: v["a"],
    ),
    "generator": Kind(
        lambda: torch.Generator().manual_seed(1),
        lambda v, x: torch.Generator().manual_seed(v.initial_seed() + 1 + small(x, 5)),
        lambda v: v.initial_seed() % 7,
    ),
}

IN_PLACE = {  # changed where they are
    "list in place": Kind(lambda: [1.0], _append, sum),
    "dict in place": Kind(lambda: {"a": 1.0}, _put, lambda v: v["a"]),
    "default dict in place": Kind(lambda: collections.defaultdict(float), _put, lambda v: v["a"]),
    "deque in place": Kind(lambda: collections.deque([1.0]), _append, sum),
    "set in place": Kind(lambda: {1}, _add, sum),
    "nested in place": Kind(
        lambda: {"a": [{"b": 1.0}, {"b": 0.0}]}, _nested, lambda v: v["a"][0]["b"] + v["a"][-1]["b"]
    ),
    "object in place": Kind(lambda: Plain(1.0), _set_attribute, lambda v: v.v),
    "slots in place": Kind(lambda: Slots(1.0), _set_attribute, lambda v: v.v),
    "tensor in place": Kind(lambda: torch.ones(2), _write, lambda v: v.sum().item()),
    "array in place": Kind(lambda: np.ones(2), _write, lambda v: float(v.sum())),
    "random": Kind(lambda: random.Random(1), _draw, _peek),
    "numpy generator": Kind(lambda: np.random.default_rng(1), _draw, _peek),
    "numpy random state": Kind(lambda: np.random.RandomState(1), _draw, _peek),
    "torch generator": Kind(lambda: torch.Generator().manual_seed(1), _draw_torch, _peek_torch),
    "count": Kind(itertools.count, _advance, _peek_iterator),
    "cycle": Kind(lambda: itertools.cycle([0.1, 0.5, 0.2, 0.9, 0.4]), _advance, _peek_iterator),
    "iterator": Kind(lambda: iter([i * 0.01 for i in range(300)]), _advance, _peek_iterator),
}

KINDS = {**NEW, **IN_PLACE}
ITERATORS = ("count", "cycle", "iterator")
OBJECTS = ("plain object", "slots", "objects in a list", "object in place", "slots in place")
GENERATORS = ("generator", "random", "numpy generator", "numpy random state", "torch generator")


def word(kind: str) -> str:
    """Return a name for a kind that may stand in Python."""
    return "kind_" + kind.replace(" ", "_")


def chosen(kinds: dict[str, Kind] = KINDS, leave_out: tuple[str, ...] = ()) -> dict[str, Kind]:
    """Return the kinds of a table, or those of them that the environment variable KINDS names, divided by commas."""
    asked = [name for name in os.environ.get("KINDS", "").split(",") if name]
    return {name: kind for name, kind in kinds.items() if name not in leave_out and (not asked or name in asked)}
