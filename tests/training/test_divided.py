"""DTensors that are no parameters: in the state of an object, and carried by the script."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - makes the backend "fake" known

from relight.training.carried.values.homes import Homes
from relight.training.carried.values.parts import NoParts
from relight.training.carried.values.trees.reader import Reader
from relight.training.carried.values.trees.words import Unsupported
from relight.training.carried.values.trees.writer import Writer
from relight.training.state.handed import objects
from relight.training.state.handed.handed import Handed
from relight.training.state.values.marks import changed, put_back, remember
from relight.transfer.io.codec import decode_tree, encode_tree

RANK = 3
PLACEMENTS: list[Sequence[Placement]] = [
    (Replicate(), Shard(0)),
    (Shard(1), Shard(0)),
    (Replicate(), Replicate()),
    (Replicate(), Partial("sum")),
]


class Parameters(NoParts):
    """Parameters of a model that was handed over."""

    def __init__(self, *parameters: Any) -> None:
        self._parameters = parameters

    def owners(self) -> Iterator[tuple[Sequence[str], Any]]:
        return ((("slot", "model", str(index)), one) for index, one in enumerate(self._parameters))


class Average:
    """Averages of parameters, by name."""

    def __init__(self, **shadow: torch.Tensor) -> None:
        self.shadow: dict[str, torch.Tensor] = shadow

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


@pytest.fixture(autouse=True)
def rank_of_four() -> Iterator[None]:
    dist.init_process_group("fake", store=HashStore(), rank=RANK, world_size=4)
    yield
    dist.destroy_process_group()


def divided(*placements: Placement) -> DTensor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard"))
    whole = torch.arange(24.0).view(4, 6)
    if any(one.is_partial() for one in placements):
        return DTensor.from_local(whole, mesh, placements)
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_one_is_carried_as_the_part_of_its_rank(placements: Sequence[Placement]) -> None:
    value = {"average": divided(*placements)}
    parts = Parameters(divided(Replicate(), Shard(0)))
    tree = decode_tree(encode_tree(Writer(Homes(), parts).write("shadow", value), ""))
    read = Reader(Homes(), parts).read("shadow", tree)["average"]
    assert (read.placements, read.shape, read.stride()) == (tuple(placements), (4, 6), (6, 1))
    assert torch.equal(read.to_local(), value["average"].to_local())


def test_one_on_a_mesh_that_no_parameter_is_on_cannot_be_carried() -> None:
    with pytest.raises(Unsupported, match="on another mesh"):
        Writer(Homes(), Parameters(nn.Parameter(torch.ones(2)))).write("shadow", divided(Replicate(), Shard(0)))


def test_one_is_put_back_without_a_collective() -> None:
    value = divided(Replicate(), Shard(0))
    before = value.to_local().clone()
    mark = remember(value)
    assert not changed(mark, value)
    value.to_local().add_(1)
    assert changed(mark, value)
    assert put_back(mark) is value
    assert torch.equal(value.to_local(), before)


def test_an_object_loads_what_it_had() -> None:
    """A replacement: its average is empty, and a plain tensor stays one."""
    source = Average(weight=divided(Replicate(), Shard(0)), bias=torch.ones(2))
    handed = Handed({"model": nn.ParameterList([nn.Parameter(divided(Replicate(), Shard(0)))])}, {}, {}, {})
    tree = decode_tree(encode_tree(objects.trees_of({"ema": source}, handed), ""))
    target = Average()
    objects.load({"ema": target}, tree, handed)
    weight = target.shadow["weight"]
    assert isinstance(weight, DTensor)
    assert weight.placements == (Replicate(), Shard(0))
    assert torch.equal(weight.to_local(), source.shadow["weight"].to_local())  # type: ignore[attr-defined]
    assert torch.equal(target.shadow["bias"], torch.ones(2))
