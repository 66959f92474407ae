"""Features of torch that not every script uses: their private interfaces are looked for when one is handed over."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard, distribute_tensor

from relight.errors import MissingInterfaceError
from relight.training.state.tracked import TrackedState
from relight.training.torch_private import installed
from relight.training.torch_private.installed import FEATURES, refuse_missing_of


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    refuse_missing_of.cache_clear()
    yield
    refuse_missing_of.cache_clear()
    dist.destroy_process_group()


def hand_over(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, pipeline: object = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    TrackedState({"model": model}, {"optimizer": optimizer}, {}, {}, pipeline=pipeline).division.shard(1)


def hand_over_fsdp2() -> None:
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    hand_over(model)


def hand_over_a_pipeline() -> None:
    model = nn.Linear(2, 2)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    hand_over(model, pipeline=ScheduleGPipe(stage, 1, loss_fn=nn.MSELoss()))


def hand_over_zero() -> None:
    model = nn.Linear(2, 2)
    hand_over(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))


def hand_over_a_dtensor() -> None:
    model = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (1,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    hand_over(model)


HANDED: dict[str, Callable[[], None]] = {
    "FSDP2": hand_over_fsdp2,
    "pipelining": hand_over_a_pipeline,
    "ZeroRedundancyOptimizer": hand_over_zero,
    "DTensor": hand_over_a_dtensor,
}


def test_each_feature_is_tried_here() -> None:
    assert HANDED.keys() == FEATURES.keys()


@pytest.mark.parametrize("feature", HANDED)
def test_what_torch_lacks_of_a_feature_is_named_when_it_is_handed_over(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    HANDED[feature]()
    refuse_missing_of.cache_clear()
    home = next(iter(FEATURES[feature]))
    monkeypatch.setitem(installed.FEATURES, feature, {home: ("_no_such_name",)})
    with pytest.raises(MissingInterfaceError, match=f"lacks {home}._no_such_name, which relight, for {feature}, needs"):
        HANDED[feature]()
