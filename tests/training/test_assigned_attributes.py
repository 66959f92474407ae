"""Attributes and buffers of modules that steps and code between them assign or delete."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from relight.training.state.modules.attributes import AttributeLog


class Net(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.scale = 1.0
        self.body = nn.Linear(2, 2)


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def log(net: Net) -> Iterator[AttributeLog]:
    log = AttributeLog({"net": net})
    log.install()
    yield log
    log.remove()


def copied(log: AttributeLog, net: Net) -> Net:
    """A replacement's module, with what `log` has kept of the attributes."""
    adopted = AttributeLog({"net": net})
    adopted.install()
    adopted.adopt(log.private())
    adopted.remove()
    return net


def test_one_that_was_deleted_is_gone_in_a_replacement(net: Net, log: AttributeLog) -> None:
    log.begin(learning=True)
    net.scale = 0.5
    log.notice()
    log.commit()
    assert copied(log, Net()).scale == 0.5
    log.begin(learning=False)
    del net.scale
    log.notice()
    log.commit()
    assert not hasattr(copied(log, Net()), "scale")


def test_ones_that_code_above_the_block_changes_are_state_before_the_block_ends(net: Net, log: AttributeLog) -> None:
    """A comparison of ranks at the block's beginning leaves them alone: a replacement runs that code itself."""
    own, seen = vars(net), list[int]()
    own["seen"] = seen
    log.begin(learning=True)
    setattr(net, "turns", 1)  # noqa: B010
    seen.append(0)
    assert not log.is_state("net", "", "turns")
    log.notice()
    assert [log.is_state("net", "", name) for name in ("turns", "seen", "scale")] == [True, True, False]
    log.roll_back()
    assert "turns" not in own
    assert not seen


def test_one_that_became_a_parameter_again_does_not_hide_it_in_a_replacement(net: Net, log: AttributeLog) -> None:
    prune.l1_unstructured(net.body, "weight", 0.5)  # between two steps: `weight` is a mere attribute
    assert sorted(log.private()) == ["net/body/weight"]
    prune.remove(net.body, "weight")
    other = copied(log, Net())
    assert "weight" not in vars(other.body)
    assert other.body(torch.ones(1, 2)).shape == (1, 2)


def test_a_buffer_that_is_written_in_place_is_not_assigned(net: Net, log: AttributeLog) -> None:
    """As `torch.optim.swa_utils.AveragedModel` counts."""
    log.begin(learning=False)
    before, tensor = log.assigned_buffers, net.count
    net.count += 1
    assert log.assigned_buffers == before
    net.count = net.count + 1
    assert log.assigned_buffers == before + 1
    log.roll_back()
    assert net.count is tensor
    assert tensor.item() == 1  # copies of tensors undo what was written in place


@pytest.mark.parametrize("owner", ["net", "net.body"])
def test_containers_that_only_code_between_steps_changes_are_state(net: Net, log: AttributeLog, owner: str) -> None:
    """Also those that a script gives a layer of torch."""
    module: Any = net if owner == "net" else net.body
    module.history = []
    log.begin(learning=True)
    log.notice()
    log.commit()
    module.history.append(1)
    log.see_between()
    log.begin(learning=False)
    module.history.append(2)
    log.roll_back()
    assert module.history == [1]
    replacement = Net()
    of_replacement: Any = replacement if owner == "net" else replacement.body
    of_replacement.history = []
    copied(log, replacement)
    assert of_replacement.history == [1]
