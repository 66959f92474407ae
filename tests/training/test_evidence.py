"""A script as `relight prove` sees it: its variables, and each operation with its line."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from relight.training.worker.proof.evidence import _digest, _named, names_of
from relight.training.worker.proof.tracing import OperationTrace


class Meter:
    best = 1.5

    def __init__(self) -> None:
        self.total = 0.25
        self.model = torch.nn.Linear(1, 1)


def closing_over() -> Callable[[], float]:
    hidden = 0.125

    def read() -> float:
        return hidden

    return read


def with_default(loss: float, kept: list[float] = [0.5]) -> float:  # noqa: B006
    return loss + kept[0]


def test_variables_with_plain_values() -> None:
    count, window, hidden = 3, [1.0, 2.0], torch.tensor([1.0, 2.0])
    found = names_of(sys._getframe())
    assert (found["count"], found["window"]) == (str(count), f"list{window}")
    assert found["hidden"] == f"tensor {_digest(hidden)}"


def named(name: str, value: Any) -> dict[str, str]:
    return dict(_named(name, value))


def test_what_objects_functions_and_classes_keep() -> None:
    assert named("meter", Meter()) == {"meter.total": "0.25"}
    assert named("Meter", Meter) == {"Meter.best": "1.5"}
    assert named("read", closing_over()) == {"hidden (of read)": "0.125"}
    assert named("with_default", with_default) == {"kept (of with_default)": "list[0.5]"}
    assert named("model", torch.nn.Linear(1, 1)) == {}


def test_equal_bits_have_equal_digests_and_others_have_not() -> None:
    one = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert _digest(one) == _digest(one.clone())
    assert _digest(one) == _digest(torch.stack([one, one], dim=1)[:, 0])  # however it lies in memory
    assert _digest(one) != _digest(one.reshape(2, 2))
    assert _digest(torch.tensor(0.0)) != _digest(torch.tensor(-0.0))


def traced(scale: float) -> OperationTrace:
    torch.manual_seed(0)
    weight = torch.randn(3, 3, requires_grad=True)
    trace = OperationTrace(_digest, "/nowhere")
    with trace:
        loss = F.relu(torch.ones(3) @ weight).sum()
        loss = loss * scale
        loss.backward()
    return trace


def test_operations_have_their_line_and_what_they_were_given() -> None:
    before, now = traced(0.5).operations, traced(0.25).operations
    assert traced(0.5).operations == before
    assert [call.name for call in before[-3:]] == ["Tensor.sum", "Tensor.mul", "Tensor.backward"]
    differ = [(a, b) for a, b in zip(before, now, strict=True) if a != b]
    first = differ[0][1]
    assert (first.name, first.given[1]) == ("Tensor.mul", "0.25")
    assert first.place.startswith("test_evidence.py:")
