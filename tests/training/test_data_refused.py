"""Data that a replacement could not read again is refused before anything is written, in words that say what to do."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from relight.errors import UsageError
from relight.training.connection.page import PositionPage
from relight.training.data.batches import Batches
from relight.training.data.strays import watch

ITEMS = TensorDataset(torch.arange(40.0))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(ITEMS, batch_size=4, **options)


class Once(IterableDataset[torch.Tensor]):
    def __init__(self) -> None:
        self.items: Iterator[torch.Tensor] = iter(torch.arange(400.0))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.items


class Entropy:
    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = numpy.random.default_rng()
        while True:
            yield torch.tensor(generator.random(3))


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3) + index


class Drawing(Noisy):
    """Has a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3, generator=self.generator) + index


class Reversed(DataLoader[Any]):
    """Has an iteration of its own."""

    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[::-1])


def in_turns() -> tuple[DataLoader[Any], DataLoader[Any]]:
    dataset = Drawing()
    return DataLoader(dataset, batch_size=4), Reversed(dataset, batch_size=4)


class Background(DataLoader[Any]):
    """Loads in a thread, a few batches ahead."""

    def __iter__(self) -> Any:
        ready: queue.Queue[Any] = queue.Queue(2)
        batches = super().__iter__()

        def load() -> None:
            for batch in batches:
                ready.put(batch)
            ready.put(None)

        threading.Thread(target=load, daemon=True).start()
        return iter(ready.get, None)


def reading_on() -> Callable[[int], Any]:
    batches = iter(list(loader()))
    return lambda number: next(batches)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "iterator": (lambda: iter(loader()), r"got an iterator.*hand over the loader"),
    "zip": (lambda: zip(loader(), loader(), strict=True), r"instead of zip\(loader, other\) a tuple"),
    "generator": (lambda: (batch for batch in loader()), "got an iterator"),
    "order": (lambda: loader(num_workers=2, in_order=False), "in_order=False"),
    "sampler": (lambda: loader(sampler=iter(range(40))), "sampler is an iterator"),
    "once": (lambda: DataLoader(Once(), batch_size=4), "an iterator that is used up"),
    "entropy": (Entropy, "a generator that nothing seeds"),
    "thread": (lambda: Background(Noisy(), batch_size=4), "loads items in a thread"),
    "in turns": (in_turns, "draw random numbers from one generator in turns"),
    "function that reads on": (reading_on, "called twice with the same number"),
}


@pytest.fixture(autouse=True)
def _no_other_loop() -> Iterator[None]:
    watch.end()
    yield
    watch.end()


def make_batches(data: Any) -> Batches:
    return Batches(data, 1, 7, "step", PositionPage(-1))


def begin(data: Any) -> None:
    batches = make_batches(data)
    batches.start(0, 1)
    batches.get(0, 1)


@pytest.mark.parametrize("kind", REFUSED)
def test_data_that_cannot_be_read_again_is_refused(kind: str) -> None:
    make, message = REFUSED[kind]
    data = make()
    with pytest.raises(UsageError, match=message):
        begin(data)


def test_a_generator_that_the_script_uses_too_is_refused() -> None:
    generator = torch.Generator().manual_seed(1)
    batches = make_batches(loader(shuffle=True, generator=generator))
    batches.start(0, 1)
    batches.get(0, 1)
    torch.rand(3, generator=generator)
    batches.done()
    with pytest.raises(UsageError, match="something else drew from a generator"):
        batches.get(1, 1)


@pytest.fixture
def loop() -> Iterator[Batches]:
    batches = make_batches(lambda number: torch.full((2,), number))
    yield batches
    batches.close(1, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_the_script_reads_on_is_refused_in_the_first_step(loop: Batches, workers: int) -> None:
    iterator = iter(loader(num_workers=workers))
    next(iterator)
    loop.start(0, 0)
    loop.get(0, 0)
    with pytest.raises(UsageError, match=r"does not know.*Hand the DataLoader over"):
        next(iterator)


def test_a_loader_that_is_first_read_in_a_step_is_refused_in_the_next(loop: Batches) -> None:
    loop.start(0, 0)
    loop.get(0, 0)
    iterator = iter(loader())
    next(iterator)
    loop.done()
    with pytest.raises(UsageError, match="does not know"):
        next(iterator)


def test_a_rehearsal_refuses_it_too(loop: Batches) -> None:
    iterator = iter(loader())
    loop.rehearse(0)
    with pytest.raises(UsageError, match="does not know"):
        next(iterator)


def test_evaluation_is_nobodys_business(loop: Batches) -> None:
    kept = loader(num_workers=1, persistent_workers=True)
    list(kept)
    loop.start(0, 0)
    for step in range(5):
        assert len(list(kept)) == 10
        loop.get(step, 0)
        assert len(list(loader())) == 10
        loop.get(step, 0)  # repeated
        next(iter(loader()))
        loop.done()
        assert len(list(kept)) == 10


def test_after_the_loop_the_script_reads_what_it_likes(loop: Batches) -> None:
    iterator = iter(loader())
    loop.start(0, 0)
    loop.get(0, 0)
    loop.done()
    loop.close(1, 0)
    assert len(list(iterator)) == 10


def test_the_loader_of_the_training_may_be_read_by_the_script_too() -> None:
    """For an evaluation: its iterators are no concern of the training's."""
    data = loader()
    batches = make_batches(data)
    batches.start(0, 0)
    for step in range(12):
        first = batches.get(step, 0)[0].tolist()
        assert first == list(range(4 * (step % 10), 4 * (step % 10) + 4))
        assert len(list(data)) == 10
        batches.done()
    batches.close(1, 0)


class Counted(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, *, matters: bool) -> None:
        self.count = 0
        self.matters = matters

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += 1
        return torch.tensor([index, float(torch.rand(())), self.count * self.matters])


def test_a_counter_in_worker_processes_that_data_depend_on_is_refused() -> None:
    batches = make_batches(DataLoader(Counted(matters=True), batch_size=4, num_workers=1))
    batches.start(0, 1)
    batches.get(0, 1)
    batches.done()
    with pytest.raises(UsageError, match=r"dataset.count changes.*or use num_workers=0"):
        batches.get(1, 1)


def test_any_other_counter_in_worker_processes_is_not() -> None:
    batches = make_batches(DataLoader(Counted(matters=False), batch_size=4, num_workers=1))
    batches.start(0, 1)
    for step in range(10):
        batches.get(step, 1)
        batches.done()


def test_a_thread_that_loads_without_chance_is_fine() -> None:
    for data in (Background(ITEMS, batch_size=4, shuffle=True), Background(Noisy(), batch_size=4, num_workers=1)):
        batches = make_batches(data)
        batches.start(0, 1)
        batches.get(0, 1)
