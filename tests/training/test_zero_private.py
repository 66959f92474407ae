"""The private interfaces of ZeroRedundancyOptimizer that relight leans on, each tried against the installed version.

One process plays one of two ranks after the other; what they send each other goes nowhere.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - makes the backend "fake" known

from relight.errors import UsageError
from relight.training.shards import Cut
from relight.training.state.tracked import TrackedState
from relight.training.torch_private.distributed.zero import ZeroOptimizers, is_zero, state_of
from relight.transfer.io.codec import unflatten

WORLD = 2


@contextlib.contextmanager
def playing(rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=HashStore(), rank=rank, world_size=WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trained(steps: int, views: bool = False, **options: Any) -> tuple[nn.Module, Any, TrackedState]:
    """Alone: this rank writes its own parameters, and gets none from the other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=views, lr=0.1, **options
    )
    state = TrackedState({"model": model}, {"optimizer": optimizer}, {}, {})
    for step in range(steps):
        model(torch.full((2, 4), step + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, state


def test_a_rank_has_what_it_updates() -> None:
    parts = []
    for rank in range(WORLD):
        with playing(rank):
            model, optimizer, state = trained(1)
            assert list(state.zero.cuts()) == [Cut("zero", rank, WORLD)]
            assert state.division.shard(WORLD) == f"zero {rank + 1}/2"
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            paths = [path for path in state.replica.destination() if path.startswith("modules")]
            own = {names[id(parameter)] for group in optimizer.optim.param_groups for parameter in group["params"]}
            assert {name for name in names.values() if any(path.endswith(name) for path in paths)} == own
            assert len(paths) == len(own)
            assert len(state_of(optimizer)) == len(own)
            assert state.identities.name_of(optimizer.optim) == "optimizer"
            parts.append(own)
    assert parts[0] | parts[1] == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert not parts[0] & parts[1]


@pytest.mark.parametrize("views", [False, True])
def test_a_process_that_was_built_as_another_rank_takes_over(views: bool) -> None:
    with playing(0):
        _, _, source = trained(3, views)
        offered, digest = source.replica.flat(), source.replica.digest()
        tensors = [tensor.clone() for tensor in offered.tensors]
    with playing(1):
        model, optimizer, target = trained(1, views)  # the rehearsal
    with playing(0):
        optimizer.process_group = dist.group.WORLD
        target.division.rebind()
        assert target.division.shard(WORLD) == "zero 1/2"
        target.adopt(unflatten(offered.tree, tensors), {"private_buffers": []})
        assert target.replica.digest() == digest
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()  # it goes on with what it was given
        assert {float(kept["step"]) for kept in state_of(optimizer).values()} == {4.0}


def test_what_others_wrote_is_got_within_what_a_recovery_repeats() -> None:
    inside = 0

    @contextlib.contextmanager
    def gathering() -> Iterator[None]:
        nonlocal inside
        inside += 1
        yield

    with playing(0):
        _, optimizer, state = trained(0)
        state.zero.watch(gathering)
        state.zero.gather()
        assert inside == 1
        optimizer.step()
        assert inside == 2


def test_one_that_writes_in_the_backward_pass_is_refused() -> None:
    with playing(0), pytest.raises(UsageError, match="overlap_with_ddp=True"):
        trained(0, overlap_with_ddp=True)


def test_other_optimizers_are_none_of_these() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    assert not is_zero(optimizer)
    assert not ZeroOptimizers({"optimizer": optimizer})
