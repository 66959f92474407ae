"""The private interfaces of FSDP2 that relight leans on, each tried against the installed version.

One process: a group of one goes through the same states as a group of many.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - makes the backend "fake" known

from relight.training.torch_private.distributed.fsdp import ShardedModules

WIDTH = 5


class StopHere(RuntimeError):
    pass


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one process, with both dimensions of HSDP."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


class Training:
    """Three layers, of which one may stop a pass in its middle."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        for layer in list(self.model)[:2]:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)  # the last one is the root's own: reduced at the end of a backward pass only
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.stop_at = ""
        self.model[1].register_forward_hook(self._stop_in_forward)
        # When the last layer has its gradient, which is not reduced yet.
        self.model[1].register_full_backward_pre_hook(self._stop_in_backward)

    def _stop_in_forward(self, *_: Any) -> None:
        if self.stop_at == "forward":
            raise StopHere

    def _stop_in_backward(self, *_: Any) -> None:
        if self.stop_at == "backward":
            raise StopHere

    def gradients(self, step: int, stop_at: str = "") -> None:
        self.stop_at = stop_at
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        self.model(batch).square().mean().backward()

    def write(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> list[list[float]]:
        found = []
        for parameter in self.model.parameters():
            assert isinstance(parameter, DTensor)
            found.append(parameter.to_local().flatten().tolist())
        return found


def undisturbed(mesh: DeviceMesh) -> list[list[float]]:
    training = Training(mesh)
    for step in range(3):
        training.gradients(step)
        training.write()
    return training.parameters()


@pytest.mark.parametrize("stop_at", ["forward", "backward"])
@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_step_after_an_aborted_one_has_the_same_bits(mesh: DeviceMesh, stop_at: str, stopped: int) -> None:
    training = Training(mesh)
    sharded = ShardedModules([training.model])
    for step in range(3):
        if step == stopped:
            with pytest.raises(StopHere):
                training.gradients(step, stop_at)
            sharded.reset()
            training.optimizer.zero_grad()
            assert all(isinstance(parameter, DTensor) for parameter in training.model.parameters())
        training.gradients(step)
        training.write()
    assert training.parameters() == undisturbed(mesh)


def test_gradients_that_were_never_reduced_are_forgotten(mesh: DeviceMesh) -> None:
    """A micro-batch without synchronization leaves them with the gathered parameters."""
    training = Training(mesh)
    sharded = ShardedModules([training.model])
    root = training.model
    assert isinstance(root, FSDPModule)
    for step in range(3):
        if step == 1:
            root.set_requires_gradient_sync(False)
            training.gradients(7)
            root.set_requires_gradient_sync(True)
            with pytest.raises(StopHere):
                training.gradients(8, "backward")
            sharded.reset()
            training.optimizer.zero_grad()
        training.gradients(step)
        training.write()
    assert training.parameters() == undisturbed(mesh)


def test_parameters_that_an_evaluation_gathered_are_put_back(mesh: DeviceMesh) -> None:
    """FSDP2 leaves those of the root gathered after a forward pass without backward."""
    torch.manual_seed(0)
    root = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh)
    sharded = ShardedModules([root])  # type: ignore[list-item]
    with torch.no_grad():
        root(torch.ones(1, WIDTH))  # type: ignore[operator]
    assert not any(isinstance(parameter, DTensor) for parameter in root.parameters())  # type: ignore[attr-defined]
    sharded.reshard()
    assert all(isinstance(parameter, DTensor) for parameter in root.parameters())  # type: ignore[attr-defined]


def test_modules_without_fsdp_are_left_alone() -> None:
    sharded = ShardedModules([nn.Linear(2, 2)])
    assert not sharded
    sharded.reset()
    sharded.rebind()


def test_a_process_that_takes_another_rank_holds_parts_of_that_ranks_size() -> None:
    """Five rows over three ranks: two, two and one. Built as the last rank, then placed as each."""
    dist.init_process_group("fake", store=HashStore(), rank=2, world_size=3)
    try:
        model = nn.Linear(WIDTH, WIDTH)
        whole = model.weight.detach().clone()
        fully_shard(model, mesh=init_device_mesh("cpu", (3,), mesh_dim_names=("shard",)))
        weight = model.weight
        assert isinstance(weight, DTensor)
        assert torch.equal(weight.to_local(), whole[4:])
        sharded = ShardedModules([model])
        for rank, rows in ((0, 2), (1, 2), (2, 1)):
            for group in sharded._groups():
                group.mesh_info.shard_process_group = _Placed(rank)
            sharded.rebind()
            assert model.weight is weight
            assert weight.to_local().shape == (rows, WIDTH)
            with torch.no_grad():
                weight.to_local().fill_(float(rank))
            held = sharded._groups()[0].fsdp_params[0]._sharded_param_data
            assert held[: rows * WIDTH].tolist() == [float(rank)] * rows * WIDTH  # what is gathered is what was written
    finally:
        dist.destroy_process_group()


class _Placed:
    """A group in which this process has another place."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 3
