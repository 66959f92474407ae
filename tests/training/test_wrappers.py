"""Wrappers of the shapes that libraries use: what is tracked is inside them."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import DataLoader, TensorDataset

from relight.training.connection.page import PositionPage
from relight.training.data.batches import Batches
from relight.training.data.loaders import bind_rank
from relight.training.state.handed.handed import sort_by_kind
from relight.training.state.tracked import TrackedState
from relight.training.worker.step.left_gradients import LeftGradients
from relight.training.worker.step.writes import WriteWatch
from relight.training.wrappers import is_container, unwrapped_data, unwrapped_objects, unwrapped_optimizers

Named = dict[str, Any]


@pytest.fixture
def inner() -> SGD:
    return SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)


def test_an_optimizer_is_one_by_whichever_keyword_it_came(inner: SGD) -> None:
    head = SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    schedule = StepLR(head, 1)
    handed = sort_by_kind({}, {"optimizer": inner}, {"head": head, "schedule": schedule}, {})
    assert (handed.optimizers, handed.objects) == ({"optimizer": inner, "head": head}, {"schedule": schedule})


class FabricShaped:
    """Becomes a subclass of the optimizer's own class, with its attributes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.__dict__ = {key: value for key, value in vars(optimizer).items() if key not in ("step", "zero_grad")}
        self.__class__ = type("Fabric" + type(optimizer).__name__, (type(self), type(optimizer)), {})
        self._optimizer = optimizer

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer


class AcceleratedShaped(Optimizer):
    """An optimizer by name, that never was made as one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups


class ContainerShaped(Optimizer):
    """As torchtitan's: an optimizer of all parameters, whose step is that of those in its list."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([p for each in optimizers for g in each.param_groups for p in g["params"]], {"lr": 1.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for optimizer in self.optimizers:
            optimizer.step()


class Lookahead(Optimizer):
    """A script's own: it has state beside that of the one inside."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = defaultdict(dict)


class AcceleratedSchedulerShaped:
    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler, self.step_with_optimizer = scheduler, True


class SchedulersShaped:
    def __init__(self, schedulers: list[LRScheduler]) -> None:
        self.schedulers = schedulers


@pytest.mark.parametrize("wrapper", [FabricShaped, AcceleratedShaped])
def test_an_optimizer_is_taken_out_of_its_wrapper(inner: SGD, wrapper: Any) -> None:
    wrapped = wrapper(inner)
    assert isinstance(wrapped, Optimizer)
    assert unwrapped_optimizers({"main": wrapped})["main"] is inner
    assert unwrapped_optimizers({"main": AcceleratedShaped(wrapped)})["main"] is inner


def test_optimizers_are_taken_out_of_their_container(inner: SGD) -> None:
    other = SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    container = ContainerShaped([inner, other])
    found: Named = unwrapped_optimizers({"optimizer": container})
    assert list(found) == ["optimizer.0", "optimizer.1"]
    assert list(found.values()) == [inner, other]
    assert is_container(container)


def test_an_optimizer_with_state_of_its_own_is_tracked_itself(inner: SGD) -> None:
    lookahead = Lookahead(inner)
    assert unwrapped_optimizers({"main": lookahead, "plain": inner}) == {"main": lookahead, "plain": inner}
    assert not is_container(lookahead)


def test_an_optimizer_that_names_itself_is_no_wrapper(inner: SGD) -> None:
    inner.optimizer = inner  # type: ignore[attr-defined]
    assert unwrapped_optimizers({"opt": inner}) == {"opt": inner}


def test_the_writes_of_a_container_are_those_of_its_optimizers(inner: SGD) -> None:
    written: list[str] = []
    watch = WriteWatch(
        lambda thing: "inner" if thing is inner else None,
        lambda _: True,
        lambda name, _: written.append(name),
        lambda _: None,
        lambda: True,
        LeftGradients({}, written.append, TrackedState({}, {}, {}, {}).gradients, str),
    )
    watch.install()
    try:
        ContainerShaped([inner]).step()
    finally:
        watch.remove()
    assert written == ["inner"]
    assert not watch.is_optimizer_at_work


def test_the_write_of_an_optimizer_that_differs_between_ranks_is_no_replicated_one(inner: SGD) -> None:
    written: list[tuple[str, str | None]] = []
    left = LeftGradients({}, lambda _: None, TrackedState({}, {}, {}, {}).gradients, str)
    watch = WriteWatch(
        lambda _: "own", lambda _: False, lambda *write: written.append(write), lambda _: None, lambda: True, left
    )
    watch.install()
    try:
        inner.step()
    finally:
        watch.remove()
    assert written == [("own", None)]


def test_schedulers_are_taken_out(inner: SGD) -> None:
    one, two = StepLR(inner, 1), StepLR(inner, 2)
    stateful = nn.Linear(1, 1)
    given: Named = {
        "scheduler": AcceleratedSchedulerShaped(one),
        "other": SchedulersShaped([one, two]),
        "ema": stateful,
    }
    assert unwrapped_objects(given) == {"scheduler": one, "other.0": one, "other.1": two, "ema": stateful}
    sequential = torch.optim.lr_scheduler.ChainedScheduler([one, two])
    assert unwrapped_objects({"scheduler": sequential}) == {"scheduler": sequential}


class FabricLoaderShaped:
    def __init__(self, loader: Any, device: torch.device | None = None) -> None:
        self._dataloader, self._device = loader, device

    def __iter__(self) -> Any:
        raise AssertionError("it counts how often it is iterated: a replacement would count otherwise")


class ShardShaped:
    """Says that it is a DataLoader, and hands on what it does not know."""

    def __init__(self, loader: Any) -> None:
        self.base_dataloader, self.device = loader, None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return DataLoader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base_dataloader, name)

    def __iter__(self) -> Any:
        raise AssertionError("it synchronizes random streams with other ranks, which a replacement is without")


@pytest.mark.parametrize("wrapper", [FabricLoaderShaped, ShardShaped, lambda one: FabricLoaderShaped(ShardShaped(one))])
def test_a_loader_is_read_inside_its_wrapper(wrapper: Any) -> None:
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2)
    assert unwrapped_data(wrapper(loader)) == (loader, None)
    batches = Batches(wrapper(loader), 1, 7, "step", PositionPage(-1))
    batches.start(2, 0)
    assert batches.get(2, 0)[0].tolist() == [4.0, 5.0]


@pytest.mark.parametrize("wrapper", [FabricLoaderShaped, ShardShaped])
@pytest.mark.parametrize("make", [tuple, list, lambda several: dict(zip("ab", several, strict=True))])
def test_several_loaders_are_read_inside_their_wrappers(wrapper: Any, make: Any) -> None:
    """One of them may have none."""
    data = TensorDataset(torch.arange(8.0))
    loaders: list[DataLoader[Any]] = [DataLoader(data, batch_size=2), DataLoader(data, batch_size=4)]
    batches = Batches(make([loaders[0], wrapper(loaders[1])]), 1, 7, "step", PositionPage(-1))
    batches.start(1, 0)
    drawn = batches.get(1, 0)
    one, other = drawn.values() if isinstance(drawn, dict) else drawn
    assert one[0].tolist() == [2.0, 3.0]
    assert other[0].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_a_sequence_of_batches_is_none_of_loaders() -> None:
    data = [torch.zeros(2), torch.ones(2)]
    assert unwrapped_data(data)[0] is data


def test_batches_go_where_the_wrapper_moves_them() -> None:
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2)
    batches = Batches(FabricLoaderShaped(loader, torch.device("meta")), 1, 7, "step", PositionPage(-1))
    batches.start(0, 0)
    assert batches._draw(0)[0].device.type == "meta"


class BatchSamplerShardShaped:
    num_processes = 4
    process_index = 3

    def __iter__(self) -> Any:
        yield from ([2 * self.process_index, 2 * self.process_index + 1] for _ in range(3))

    def __len__(self) -> int:
        return 3


def test_a_shard_of_a_sampler_follows_the_rank() -> None:
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(8.0)), batch_sampler=BatchSamplerShardShaped())
    bind_rank(loader, 1)
    assert next(iter(loader))[0].tolist() == [2.0, 3.0]
