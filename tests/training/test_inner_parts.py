"""Schedulers and scalers inside objects that were handed over, and the names of what differs in such objects."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from relight.training.state.handed.schedulers import own_state_dict
from relight.training.state.tracked import TrackedState
from relight.transfer.io.codec import decode_tree, encode_tree, unflatten


class WarmUp(LRScheduler):
    """Has the scheduler that comes after it as an attribute, and so in its state_dict."""

    def __init__(self, optimizer: Optimizer, after: LRScheduler) -> None:
        self.after = after
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [rate * min(1, self.last_epoch / 3) for rate in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch > 3:
            self.after.step(epoch)
        else:
            super().step(epoch)


class Scaler:
    """Hands on the state of the scaler inside."""

    def __init__(self) -> None:
        self.inner = torch.amp.GradScaler("cpu", init_scale=4.0)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def make() -> tuple[WarmUp, Scaler, TrackedState]:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    warm, scaler = WarmUp(optimizer, CosineAnnealingLR(optimizer, 10)), Scaler()
    state = TrackedState({"model": net}, {"optimizer": optimizer}, {"scheduler": warm, "scaler": scaler}, {})
    return warm, scaler, state


def transfer(source: TrackedState, target: TrackedState) -> None:
    flat = source.replica.flat()
    tree = decode_tree(encode_tree({"t": unflatten(flat.tree, [t.clone() for t in flat.tensors])}, "state"))["t"]
    target.replica.adopt(tree, [])


def test_they_are_known_and_travel() -> None:
    warm, scaler, source = make()
    assert source.identities.name_of(warm.after) == "scheduler.after"
    assert source.identities.name_of(scaler.inner) == "scaler.inner"
    warm.optimizer.step()
    for _ in range(6):
        warm.step()
    scaler.inner.scale(torch.ones(()))
    scaler.inner.update(2.0)
    other, other_scaler, target = make()
    after = other.after
    transfer(source, target)
    assert other.after is after
    assert after.last_epoch == warm.after.last_epoch == 2
    assert other_scaler.inner.get_scale() == 2.0
    assert own_state_dict(other) == own_state_dict(warm)


def test_what_differs_in_an_object_is_named() -> None:
    warm, _, state = make()
    before = state.replica.digests_by_tensor()
    warm.metric = 0.5  # type: ignore[attr-defined]
    warm.last_epoch += 1
    after = state.replica.digests_by_tensor()
    assert {path for path in after if before.get(path) != after[path]} == {
        "objects.scheduler.last_epoch",
        "objects.scheduler.metric",
    }


def with_temperature(steps: int) -> tuple[torch.Tensor, TrackedState]:
    net, log_alpha = nn.Linear(2, 2), torch.zeros(1, requires_grad=True)
    optimizers: dict[str, Optimizer] = {
        "policy": torch.optim.SGD(net.parameters(), lr=0.1),
        "alpha": torch.optim.Adam([log_alpha], lr=0.1),
    }
    state = TrackedState({"model": net}, optimizers, {}, {})
    for _ in range(steps):
        log_alpha.grad = torch.ones(1)
        optimizers["alpha"].step()
    return log_alpha, state


def test_tensors_of_no_module_that_an_optimizer_trains_are_part_of_the_state() -> None:
    log_alpha, source = with_temperature(3)
    other, target = with_temperature(0)
    transfer(source, target)
    assert target.identities.keeps(other)
    assert torch.equal(other, log_alpha)
    assert other.requires_grad
    assert source.replica.digest() == target.replica.digest()
