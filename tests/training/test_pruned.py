"""Layers that steps prune: a replacement, built as before the loop, is pruned alike, with equal contents and order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from relight.training.state import pruned
from relight.training.state.tracked import TrackedState
from relight.transfer.io.codec import unflatten


def _built(seed: int) -> tuple[Any, TrackedState]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, TrackedState({"net": net}, {"opt": optimizer}, {}, {})


def _train(net: nn.Module, state: TrackedState) -> None:
    net(torch.ones(1, 3)).sum().backward()
    state.optimizers["opt"].step()
    state.optimizers["opt"].zero_grad()
    state.slots.refresh()


def _copied(source: TrackedState, target: TrackedState) -> str:
    flat = source.replica.flat()
    return target.adopt(unflatten(flat.tree, [tensor.clone() for tensor in flat.tensors]), source.describe("", 1))


def _prune_twice(net: Any) -> None:
    prune.l1_unstructured(net[0], "weight", 0.3)
    net(torch.ones(1, 3))
    prune.l1_unstructured(net[0], "weight", 0.3)


def _prune_two_and_take_one_back(net: Any) -> None:
    prune.l1_unstructured(net[0], "weight", 0.3)
    prune.l1_unstructured(net[0], "bias", 0.5)
    prune.remove(net[0], "weight")


@pytest.mark.parametrize("act", [_prune_twice, _prune_two_and_take_one_back])
def test_a_replacement_is_pruned_as_the_source_was(act: Callable[[Any], None]) -> None:
    (net, source), (other, target) = _built(0), _built(1)
    _train(net, source)
    act(net)
    _train(net, source)

    assert _copied(source, target) == ""

    assert target.replica.digest() == source.replica.digest()
    assert target.replica.layout() == source.replica.layout()
    assert target.structure.differs(source.structure.described()) == ""
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in net.named_parameters()]
    for layer, own in ((net[0], other[0]), (net[1], other[1])):  # also what the next pruning reads
        assert torch.equal(own.weight, layer.weight)
        assert torch.equal(own.bias, layer.bias)
    for one in (net, other):
        prune.l1_unstructured(one[0], "weight", 0.5)
    _train(net, source)
    _train(other, target)
    assert target.replica.digest() == source.replica.digest()


def test_what_was_pruned_is_given_back_where_the_source_is_no_longer_pruned() -> None:
    (net, source), (other, target) = _built(0), _built(1)
    prune.l1_unstructured(other[0], "weight", 0.3)
    target.slots.refresh()
    _train(net, source)

    assert _copied(source, target) == ""

    assert target.replica.digest() == source.replica.digest()
    assert isinstance(other[0].weight, nn.Parameter)
    assert torch.equal(other(torch.ones(1, 3)), net(torch.ones(1, 3)))


def test_a_layer_too_large_for_its_description_is_told(monkeypatch: Any) -> None:
    (net, source), (_, target) = _built(0), _built(1)
    _prune_twice(net)
    monkeypatch.setattr(pruned, "_MOST_BYTES", 8)

    assert "net/0/weight: pruned while it was trained" in _copied(source, target)


def test_a_buffer_that_steps_registered_is_registered_in_the_replacement() -> None:
    (net, source), (other, target) = _built(0), _built(1)
    net[1].register_buffer("mask", torch.tensor([1.0, 0.0]))
    source.slots.refresh()

    assert _copied(source, target) == ""

    assert torch.equal(other[1].mask, torch.tensor([1.0, 0.0]))
    assert target.replica.digest() == source.replica.digest()
