"""Parameters that were frozen when DDP wrapped them, and that a step unfreezes: refused before ranks train apart."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - makes the backend "fake" known

from relight.errors import UsageError
from relight.training.state.tracked import TrackedState
from relight.training.torch_private.distributed.ddp import unreduced, watch_wrappers
from tests.training.carried_loop import Loop, run_script


@pytest.fixture(autouse=True)
def rank_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(DDP, "__init__", DDP.__init__)  # put back afterwards
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=2)
    watch_wrappers()
    yield
    dist.destroy_process_group()


def make_net() -> Any:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    return net


def test_what_was_frozen_when_it_was_wrapped_is_known() -> None:
    net = make_net()
    first = DDP(net)
    assert set(unreduced().values()) == {"0.weight", "0.bias"}
    net.requires_grad_(True)
    second = DDP(net)  # reduces all
    assert not unreduced()
    del first, second


def test_an_optimizer_may_not_train_it() -> None:
    net = make_net()
    model, optimizer = DDP(net), torch.optim.SGD(net[1].parameters(), 0.1)
    state = TrackedState({"model": model}, {"optimizer": optimizer}, {}, {})
    state.members.see("optimizer")
    net[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(net[0].parameters())})
    state.members.see("optimizer")  # they have no gradients yet
    for parameter in net.parameters():  # as backward leaves them
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(UsageError, match=r"optimizer is about to train 0.weight.*was frozen when DDP wrapped"):
        state.members.see("optimizer")


SCRIPT = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
net[0].requires_grad_(False)
model = DDP(net)
optimizer = torch.optim.SGD(net[1].parameters(), 0.1)
hand_over(model, optimizer)
for step in steps():
    with step:
        if step.number == 500:
            net[{layer}].requires_grad_(True)
result = None
"""


def test_a_script_that_would_unfreeze_it_is_refused_before_its_first_step(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"script\d+.py:13: a step unfreezes net\[0\]. 0.weight was frozen when DDP"):
        run_script(SCRIPT.format(layer=0), Loop(), tmp_path)
    run_script(SCRIPT.format(layer=1), Loop(), tmp_path)
