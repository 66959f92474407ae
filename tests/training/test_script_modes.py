"""Modes of the script see what the script calls, and nothing of what relight calls in between."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from relight.errors import UsageError
from relight.training.state.modules.modes import give_gradients, gradients_of
from relight.training.torch_private.script_modes import (
    default_device,
    hidden_from_modes,
    modes_now,
    names_of_modes,
    return_to,
    sees_calls,
    unseen,
)
from relight.training.transaction.data_access import DataAccess


class Functions(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def default_meta() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@unseen
def adds(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.sum() < 0:
        raise UsageError("negative")
    return tensor + tensor.abs()


def test_modes_see_nothing_of_it_and_are_there_again() -> None:
    tensor = torch.ones(3)
    with Functions() as functions, Operations() as operations:
        inside = modes_now()
        adds(tensor)
        with pytest.raises(UsageError):
            adds(torch.full((3,), -1.0))
        seen = functions.calls, operations.calls
        with hidden_from_modes():
            tensor.neg()
            assert not sees_calls()
        assert (functions.calls, operations.calls) == seen
        assert modes_now() == inside
        tensor.neg()
        assert (functions.calls, operations.calls) == (seen[0] + 1, seen[1] + 1)
    assert seen == (1, 1)  # of torch.full
    assert modes_now() == ((), ())


def test_a_default_device_stays(default_meta: None) -> None:
    assert not sees_calls()
    with Functions(), hidden_from_modes():
        assert torch.zeros(2).is_meta
        torch.set_default_device("cpu")
    assert str(default_device()) == "cpu"
    assert torch.zeros(2).device.type == "cpu"
    assert modes_now() == ((torch.device("cpu"),), ())


def test_a_step_that_is_undone_leaves_the_modes_that_it_has_entered() -> None:
    with Functions() as outer:
        before = modes_now()
        Functions().__enter__()  # type: ignore[no-untyped-call]
        operations = Operations()
        operations.__enter__()  # type: ignore[no-untyped-call]
        assert names_of_modes(modes_now(), before) == "Functions, Operations"
        return_to(before)
        assert modes_now() == ((outer,), ())
    assert modes_now() == ((), ())


def test_data_of_a_parameter_counts_as_without_relight() -> None:
    layer = nn.Linear(2, 2)

    def counted() -> int:
        with Functions() as functions:
            layer.weight.data.mul_(0.5)
            layer.weight.data.mul_(0.5)
            layer.weight.data = torch.ones(2, 2)
        return int(functions.calls)

    plain = counted()
    access = DataAccess()
    access.watch(layer.parameters())
    access.install(before_reach=unseen(lambda parameter: parameter.detach().clone()))
    try:
        assert counted() == plain
    finally:
        access.remove()


def test_the_same_parameters_have_gradients() -> None:
    one, other, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    one.grad, other.grad = torch.ones(2), torch.ones(2)
    sparse = nn.Parameter(torch.ones(2))
    sparse.grad = torch.zeros(2).to_sparse()
    assert gradients_of([one, other, third, sparse]) == [1, 1, 0, 2]
    sparse.grad = None
    give_gradients([sparse], [2])
    assert sparse.grad is None
    give_gradients([one, other, third], [1, 0, 1])
    assert one.grad is not None
    assert one.grad.tolist() == [1, 1]
    assert other.grad is None
    assert third.grad is not None
    assert third.grad.tolist() == [0, 0]
