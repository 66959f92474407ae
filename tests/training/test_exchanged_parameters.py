"""A parameter in whose place the script puts another one: told, as optimizers go on with the old one."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from relight.training.state.modules.attributes import AttributeLog


class Net(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def log(net: Net) -> Iterator[AttributeLog]:
    log = AttributeLog({"net": net})
    log.install()
    log.begin(learning=False)
    yield log
    log.remove()


def exchange(net: Net) -> None:
    net.first.weight = nn.Parameter(net.first.weight.detach() * 0.5)


def lend(net: Net) -> None:
    own = net.first.weight
    net.first.weight = nn.Parameter(own.detach() * 0.5)
    net.first.weight = own


def assign_itself(net: Net) -> None:
    net.first.weight = net.first.weight


def write(net: Net) -> None:
    with torch.no_grad():
        net.first.weight.mul_(0.5)


def pruned(net: Net) -> None:
    prune.random_unstructured(net.first, "weight", amount=1)


def test_one_that_is_exchanged_in_a_step_is_told(net: Net, log: AttributeLog) -> None:
    exchange(net)
    log.commit()

    assert "net/first/weight" in log.risk()


def test_one_that_is_exchanged_between_steps_is_told(net: Net, log: AttributeLog) -> None:
    log.commit()
    exchange(net)
    log.begin(learning=False)

    assert "net/first/weight" in log.risk()


def test_one_that_a_step_exchanged_which_was_undone_is_not(net: Net, log: AttributeLog) -> None:
    before = net.first.weight
    exchange(net)
    log.roll_back()
    log.begin(learning=False)
    log.commit()

    assert net.first.weight is before
    assert not log.risk()


@pytest.mark.parametrize("change", [lend, assign_itself, write, pruned])
def test_one_that_stays_is_not(change: Callable[[Net], None], net: Net, log: AttributeLog) -> None:
    change(net)
    log.commit()

    assert not log.risk()


@pytest.mark.parametrize("change", [exchange, lend, assign_itself])
def test_one_that_is_assigned_between_steps_is_no_attribute(
    change: Callable[[Net], None], net: Net, log: AttributeLog
) -> None:
    log.commit()
    change(net)
    log.begin(learning=False)

    assert not log.private()
