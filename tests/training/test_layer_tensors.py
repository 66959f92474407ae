"""Tensors that layers keep in plain attributes from step to step."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from relight.errors import UsageError
from relight.training.state.modules.attributes import AttributeLog

Update = Callable[[torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    def __init__(self, first: torch.Tensor | None, update: Update) -> None:
        super().__init__()
        self.held, self.update = first, update

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held = self.update(x if self.held is None else self.held)
        return self.held


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None

    def forward(self, size: int) -> torch.Tensor:
        if self.table is None or len(self.table) < size:
            self.table = torch.ones(size)
        return self.table


def after_a_step(layer: Layer) -> AttributeLog:
    """Let a step run the layer, and count."""
    log = AttributeLog({"net": layer})
    log.install()
    try:
        log.begin(learning=True)
        layer(torch.ones(2, requires_grad=True))
        log.notice()
        log.commit()
    finally:
        log.remove()
    return log


UPDATES: dict[str, Update] = {
    "part of a graph": lambda held: held.detach().clone().requires_grad_() * 2,
    "without a graph": lambda held: held.detach() * 2,
    "requires a gradient": lambda held: (held.detach() * 2).requires_grad_(),
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_replacement_goes_on_with_the_values(name: str) -> None:
    first, other = Layer(None, UPDATES[name]), Layer(None, UPDATES[name])
    adopted = AttributeLog({"net": other})
    adopted.install()
    adopted.adopt(after_a_step(first).private())
    adopted.remove()
    assert first.held is not None
    assert other.held is not None
    assert other.held.tolist() == first.held.tolist()
    assert other.held.requires_grad == (name == "requires a gradient")


@pytest.mark.parametrize(
    ("first", "update"),
    [
        pytest.param(torch.ones(5_000_000), lambda held: held * 2, id="large"),
        pytest.param(torch.eye(2).to_sparse(), lambda held: held * 2, id="sparse"),
        pytest.param(torch.eye(2).to_sparse_csr(), lambda held: held * 2, id="sparse by rows"),
        pytest.param(torch.nested.nested_tensor([torch.ones(2)]), lambda held: held * 2, id="nested"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_is_not_kept_is_refused(first: torch.Tensor, update: Update) -> None:
    with pytest.raises(UsageError, match=r"^net\.held: .* self\.register_buffer\('held', \.\.\.\)"):
        after_a_step(Layer(first, update))


def test_a_large_tensor_that_is_first_made_in_a_step_is_refused_in_the_next() -> None:
    layer = Layer(None, lambda _: torch.ones(5_000_000))
    after_a_step(layer)
    with pytest.raises(UsageError, match="register_buffer"):
        after_a_step(layer)


def test_one_that_grows_too_large_late_is_told() -> None:
    layer = Layer(torch.ones(1), lambda held: torch.cat([held, held]))
    after_a_step(layer)
    log = AttributeLog({"net": layer})
    log.install()
    for doubled in range(1, 24):
        log.begin(learning=doubled < 3)
        layer(torch.ones(2))
        log.notice()
        log.commit()
        assert bool(log.private()) == (not log.risk())
    log.remove()
    assert "net.held: a step reads this attribute" in log.risk()


def test_one_that_is_large_late_is_told() -> None:
    layer = Layer(None, lambda _: torch.ones(5_000_000))
    log = AttributeLog({"net": layer})
    log.install()
    for number in range(5):
        log.begin(learning=False)
        layer(torch.ones(2))
        log.notice()
        log.commit()
        assert bool(log.risk()) == (number > 0)
    log.remove()


def test_a_large_cache_is_accepted() -> None:
    cache = Cache()
    log = AttributeLog({"net": cache})
    log.install()
    for size in (5_000_000, 100, 6_000_000):
        log.begin(learning=True)
        cache(size)
        log.notice()
        log.commit()
    log.remove()
    assert log.private() == {}
