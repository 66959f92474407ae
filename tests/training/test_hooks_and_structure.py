"""Hooks that an interrupted step registered or removed, and modules that steps build otherwise than the script did."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from relight.training.state.modules.hooks import HookLog
from relight.training.state.modules.structure import Structure


@pytest.fixture
def log() -> Iterator[HookLog]:
    made = HookLog(lambda _: None)
    made.install()
    yield made
    made.remove()


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def halve(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output / 2


def test_what_a_step_registered_is_gone(log: HookLog) -> None:
    net, x = make_net(), torch.ones(1, 2)
    before = net(x)
    log.begin()
    net[0].register_forward_hook(halve)
    gradient = net.get_parameter("2.weight").register_hook(lambda gradient: gradient * 3)
    net[1].register_full_backward_hook(lambda module, inputs, outputs: None)
    assert not torch.equal(net(x), before)
    log.roll_back()
    assert torch.equal(net(x), before)
    assert not net[1]._backward_hooks
    assert gradient.id not in (net.get_parameter("2.weight")._backward_hooks or {})


def test_what_a_step_removed_is_back_in_its_place(log: HookLog) -> None:
    net, x = make_net(), torch.ones(1, 2)
    handles = [
        net[0].register_forward_hook(halve),
        net[0].register_forward_hook(lambda m, i, o: o + 1),
        net[0].register_forward_hook(lambda m, i, k, o: o * 2, with_kwargs=True),
    ]
    before, order = net(x), list(net[0]._forward_hooks)
    log.begin()
    handles[0].remove()
    handles[2].remove()
    net[0].register_forward_hook(halve)
    assert not torch.equal(net(x), before)
    log.roll_back()
    assert torch.equal(net(x), before)
    assert list(net[0]._forward_hooks) == order


def test_what_a_step_that_counts_did_stays(log: HookLog) -> None:
    net, x = make_net(), torch.ones(1, 2)
    log.begin()
    net[2].register_forward_hook(halve)
    log.commit()
    halved = net(x)
    log.begin()
    log.roll_back()
    assert torch.equal(net(x), halved)


def test_a_hook_that_was_registered_and_removed_in_one_step(log: HookLog) -> None:
    net = make_net()
    log.begin()
    net[0].register_forward_hook(halve).remove()
    log.roll_back()
    assert not net[0]._forward_hooks


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "hook": lambda net: net[0].register_forward_hook(halve),
    "pre-hook": lambda net: net[0].register_forward_pre_hook(lambda module, inputs: None),
    "activation": lambda net: net.__setitem__(1, nn.ReLU()),
    "forward": lambda net: setattr(net[1], "forward", torch.relu),
    "pruned": lambda net: prune.l1_unstructured(net[2], "weight", 0.5),
    "appended": lambda net: net.append(nn.Identity()),
    "gradient hook": lambda net: net.get_parameter("2.weight").register_hook(lambda gradient: None),
    "accumulate hook": lambda net: net.get_parameter("2.weight").register_post_accumulate_grad_hook(print),
    "layers change places": lambda net: net._modules.update({"0": net[2], "2": net[0]}),
    "another layer": lambda net: net.__setitem__(0, nn.Linear(2, 2)),
    "buffer": lambda net: net[1].register_buffer("mean", torch.zeros(1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_modules_is_seen(name: str) -> None:
    net, other = make_net(), make_net()
    net[2].register_forward_hook(halve)
    other[2].register_forward_hook(halve)
    first, second = Structure({"net": net}, {}), Structure({"net": other}, {})
    assert not first.differs(second.described())
    CHANGES[name](other)
    assert "net" in first.differs(second.described())


def test_values_and_modes_are_no_structure() -> None:
    net, other = make_net(), make_net()
    first, second = Structure({"net": net}, {}), Structure({"net": other}, {})
    other.eval().requires_grad_(False)
    other.get_parameter("0.weight").data.zero_()
    vars(other[1])["seen"] = 3
    assert not first.differs(second.described())


def test_a_method_that_a_wrapper_puts_back_is_no_change() -> None:
    """Lightning's Fabric exchanges `forward` for a call, and puts the bound method there afterwards."""
    net, other = make_net(), make_net()
    first, second = Structure({"net": net}, {}), Structure({"net": other}, {})
    other[0].forward = other[0].forward
    assert not first.differs(second.described())
    other[0].forward = other[1].forward
    assert first.differs(second.described()) == "net.0"
