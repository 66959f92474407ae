"""Optimizers around others: what they write by themselves, without a hook, is undone with the step."""

from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer

from relight.training.transaction.images import OptimizerImages


class Averaged(Optimizer):
    """Keeps slow weights beside the optimizer inside, as Lookahead does; torch's constructor is not called."""

    def __init__(self, inside: Optimizer) -> None:
        self.inside, self.param_groups, self.defaults = inside, inside.param_groups, inside.defaults
        self.state: Any = {p: {"slow": torch.zeros_like(p)} for group in self.param_groups for p in group["params"]}

    def step(self, closure: Any = None) -> Any:
        self.inside.step()
        for parameter, own in self.state.items():
            own["slow"] += parameter.detach()
        return None


@pytest.mark.parametrize("order", [("outer", "inner"), ("inner", "outer")])
def test_state_of_an_optimizer_around_another_is_undone(order: tuple[str, str]) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    inner = SGD([parameter], lr=0.5, momentum=0.9)
    found: dict[str, Optimizer] = {"outer": Averaged(inner), "inner": inner}
    images = OptimizerImages({name: found[name] for name in order})
    images.begin()
    images.take("inner")  # only its write is announced
    found["outer"].step()
    images.put_back()
    assert found["outer"].state[parameter]["slow"].tolist() == [0, 0, 0]
    assert not inner.state[parameter]
