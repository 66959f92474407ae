"""Objects of a script's own classes in an optimizer's state: undone with a step, and made again in a replacement."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from relight.errors import UsageError
from relight.training.state.optimizers.own_objects import ObjectReader, ObjectWriter
from relight.training.state.tracked import TrackedState
from relight.training.transaction.images import OptimizerImages
from relight.transfer.io.codec import Flat, decode_tree, encode_tree, unflatten


class Projector:
    """As GaLore's: nothing of it is in `state_dict()`'s own words."""

    def __init__(self, matrix: torch.Tensor | None, scale: float = 1.0) -> None:
        self.matrix: Any = matrix
        self.scale, self.kind = scale, torch.float32
        self.calls = [0]
        self.other: Any = None


class Slotted:
    __slots__ = ("a",)


def through_bytes(value: Any, own: Any = None) -> Any:
    tree = decode_tree(encode_tree(ObjectWriter().write(value, "state"), "state"))
    return ObjectReader(torch.device("cpu")).read(tree, own)


def optimizer_with(*objects: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    for parameter, value in zip(optimizer.param_groups[0]["params"], objects, strict=False):
        optimizer.state[parameter]["projector"] = value
    return optimizer


def test_an_object_is_made_again_with_its_attributes() -> None:
    made = through_bytes({"projector": Projector(torch.arange(4.0), 0.5)})["projector"]
    assert type(made) is Projector
    assert torch.equal(made.matrix, torch.arange(4.0))
    assert (made.scale, made.kind, made.calls, made.other) == (0.5, torch.float32, [0], None)


def is_vector(parameter: torch.Tensor) -> bool:
    return parameter.ndim == 1


def test_functions_and_classes_are_found_by_their_names() -> None:
    settings = {"filter": is_vector, "norm": torch.linalg.vector_norm, "kind": Projector}
    assert through_bytes([settings]) == [settings]
    with pytest.raises(UsageError, match=r"filter is a .*<lambda>, a function that another process does not find"):
        through_bytes({"filter": lambda p: p.ndim == 1})


def test_an_object_that_is_there_stays_the_same_one() -> None:
    own = Projector(torch.zeros(4))
    matrix = own.matrix
    own.left_over = 1  # type: ignore[attr-defined]
    made = through_bytes([Projector(torch.arange(4.0), 0.5)], [own])[0]
    assert made is own
    assert made.matrix is matrix
    assert torch.equal(made.matrix, torch.arange(4.0))
    assert not hasattr(made, "left_over")


def test_objects_that_are_shared_or_hold_themselves_are_so_again() -> None:
    one, two = Projector(torch.ones(1)), Projector(None)
    one.other, two.other = two, one
    first, second, again = through_bytes([one, two, one])
    assert first is again
    assert first.other is second
    assert second.other is first


@pytest.mark.parametrize(
    "value", [lambda: 1, Slotted(), nn.Linear(1, 1), iter([1])], ids=("lambda", "slots", "module", "c")
)
def test_what_holds_more_than_attributes_is_refused_by_its_path(value: Any) -> None:
    held = Projector(None)
    held.other = value
    with pytest.raises(UsageError, match=r"state.0.projector(.attributes)?.other is a"):
        Flat(ObjectWriter().write({0: {"projector": held}}, "state"), "state")


def test_a_class_that_another_process_does_not_find_is_refused() -> None:
    class Local:
        pass

    with pytest.raises(UsageError, match=r"state\.projector is a .*Local, .* define it at the top of a module"):
        ObjectWriter().write({"projector": Local()}, "state")


def test_a_step_that_is_undone_leaves_no_trace_in_objects() -> None:
    shared = Projector(torch.arange(3.0))
    shared.other = shared
    optimizer = optimizer_with(shared, shared)
    images = OptimizerImages({"opt": optimizer})
    images.begin()
    images.take("opt")
    shared.matrix.add_(1)
    shared.scale, shared.calls, shared.new = 3.0, [7, 8], 1  # type: ignore[attr-defined]
    images.put_back()
    first, second = (state["projector"] for state in optimizer.state.values())
    assert first is second is shared is shared.other
    assert torch.equal(shared.matrix, torch.arange(3.0))
    assert (shared.scale, shared.calls) == (1.0, [0])
    assert not hasattr(shared, "new")


def test_an_object_that_a_step_replaced_is_put_back() -> None:
    optimizer = optimizer_with(Projector(torch.arange(3.0)))
    images = OptimizerImages({"opt": optimizer})
    images.begin()
    images.take("opt")
    (state,) = optimizer.state.values()
    state["projector"] = Projector(torch.zeros(5), 9.0)
    images.put_back()
    (state,) = optimizer.state.values()
    assert torch.equal(state["projector"].matrix, torch.arange(3.0))
    assert state["projector"].scale == 1.0


def test_a_replacement_has_the_objects_of_its_source() -> None:
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        states.append(TrackedState({"net": net}, {"opt": optimizer}, {}, {}))
    source, target = states
    shared = Projector(torch.randn(2, 3))
    for parameter in source.parameters:
        source.optimizers["opt"].state[parameter] = {"projector": shared, "step": 3}
    assert source.replica.digest() != target.replica.digest()
    flat = source.replica.flat()
    tree = unflatten(copy.deepcopy(flat.tree), [tensor.clone() for tensor in flat.tensors])
    target.replica.adopt(tree, [], None)
    assert source.replica.digest() == target.replica.digest()
    first, second = (state["projector"] for state in target.optimizers["opt"].state.values())
    assert type(first) is Projector
    assert first is second
    assert first is not shared
