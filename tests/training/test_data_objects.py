"""The user's own objects are iterated, and a replacement gets the same batches out of them, from any step on."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from relight.training.connection.page import PositionPage
from relight.training.data.batches import Batches
from relight.transfer.io.codec import decode_tree, encode_tree

ITEMS = TensorDataset(torch.arange(40.0))
STEPS = 13


class Augmented(Dataset[torch.Tensor]):
    """Draws from every global stream for each item."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, float(torch.rand(())), random.random(), numpy.random.rand()])


class Own(Dataset[torch.Tensor]):
    """Draws from generators of its own, one of which is made when the first item is read."""

    def __init__(self) -> None:
        self.torch = torch.Generator().manual_seed(3)
        self.python = random.Random(4)
        self.numpy = numpy.random.default_rng(5)
        self.late: Any = None

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.late is None:
            self.late = numpy.random.RandomState(torch.initial_seed() % 2**31)
        draws = [float(torch.rand((), generator=self.torch)), self.python.random(), self.numpy.random()]
        return torch.tensor([index, *draws, self.late.rand()])


class Exchanging(Dataset[torch.Tensor]):
    """Puts another generator in the place of each of its own with each item."""

    def __init__(self) -> None:
        self.held = {"torch": torch.Generator().manual_seed(3)}
        self.python = random.Random(4)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = [float(torch.rand((), generator=self.held["torch"])), self.python.random()]
        self.held["torch"] = torch.Generator().manual_seed(self.held["torch"].initial_seed() + 1)
        self.python = random.Random(draws[1])
        return torch.tensor([index, *draws])


class Counting(Dataset[torch.Tensor]):
    """A dataset whose items depend on how many it gave before."""

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += 1
        return torch.tensor([float(index), self.count])


class Stream(IterableDataset[torch.Tensor]):
    """Without a length; shares its items among worker processes, and shuffles and augments them."""

    def __init__(self, items: int = 42) -> None:
        self.items = items

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        own = range(self.items) if info is None else range(info.id, self.items, info.num_workers)
        for index in random.sample(own, len(own)):
            yield torch.tensor([float(index), float(torch.rand(()))])


class Epochs(Stream):
    """Other items in each epoch. `set_epoch` does not reach persistent workers once they run."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (item + self.epoch for item in super().__iter__())


class Measured(Stream):
    """Says another length than it has."""

    def __len__(self) -> int:
        return 33


class Doubling(DataLoader[Any]):
    """An __iter__ of its own, which reads one batch ahead."""

    def __iter__(self) -> Any:
        ahead = None
        for batch in super().__iter__():
            if ahead is not None:
                yield ahead
            ahead = [2 * tensor for tensor in batch] if isinstance(batch, list) else 2 * batch
        yield ahead


class Partial(DataLoader[Any]):
    """As long as it pleases: the first half of the batches in each second epoch."""

    epochs = 0

    def __iter__(self) -> Any:
        self.epochs += 1
        for number, batch in enumerate(super().__iter__()):
            if self.epochs % 2 or number < 5:
                yield batch


class Wrapper:
    """No DataLoader, but made of one."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return ((batch, 1.0) for batch in self.loader)


class Chunks(Sampler[int]):
    """Draws from the global streams as it goes, and counts its epochs by itself."""

    def __init__(self) -> None:
        self.turns = 0

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        self.turns += 1
        for start in range(0, 40, 10):
            chunk = list(range(start, start + 10))
            random.shuffle(chunk)
            yield from (chunk if self.turns % 2 else reversed(chunk))


class Varying(Sampler[list[int]]):
    """Batches of indices, of which each epoch has another number."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4 + self.epoch % 3

    def __iter__(self) -> Iterator[list[int]]:
        return ([number, number + 1] for number in range(len(self)))


def note_collated(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.stack(items).flatten(), torch.rand(1)])


class Mixing:
    """A collate_fn with a counter and a generator."""

    def __init__(self) -> None:
        self.calls = 0
        self.generator = torch.Generator().manual_seed(2)

    def __call__(self, items: list[torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        return torch.stack(items) * torch.rand((), generator=self.generator) + self.calls


RNG = numpy.random.default_rng(11)


def draw_globally(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(items) + RNG.random()


def generator(seed: int = 9) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shared() -> DataLoader[Any]:
    """One generator for a sampler that draws as it goes, and for the dataset."""
    dataset = Own()
    sampler = RandomSampler(dataset, replacement=True, num_samples=40, generator=dataset.torch)
    return DataLoader(dataset, batch_size=4, batch_sampler=None, sampler=Drawing(sampler))


def two_of(dataset: Any, kind: type[DataLoader[Any]]) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders that read one dataset in turns, with epochs of different lengths."""
    return DataLoader(dataset, batch_size=4, shuffle=True), kind(
        dataset, batch_size=5, shuffle=True, generator=generator()
    )


class Drawing(Sampler[int]):
    def __init__(self, sampler: Sampler[int]) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)


def seed_worker(worker: int) -> None:
    numpy.random.seed(torch.initial_seed() % 2**32)
    random.seed(torch.initial_seed() % 2**32)


SHAPES: dict[str, Callable[[], Any]] = {
    "plain": lambda: DataLoader(ITEMS, batch_size=4, shuffle=True),
    "augmented": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True),
    "generator": lambda: DataLoader(ITEMS, batch_size=4, shuffle=True, generator=generator()),
    "weighted": lambda: DataLoader(
        ITEMS, batch_size=4, sampler=WeightedRandomSampler([1.0] * 40, 24, generator=generator())
    ),
    "own generators": lambda: DataLoader(Own(), batch_size=4, shuffle=True),
    "exchanged generators": lambda: DataLoader(Exchanging(), batch_size=4, shuffle=True),
    "shared generator": shared,
    "counter": lambda: DataLoader(Counting(), batch_size=4, shuffle=True),
    "collate": lambda: DataLoader(Augmented(), batch_size=4, collate_fn=note_collated),
    "collate with state": lambda: DataLoader(Augmented(), batch_size=4, collate_fn=Mixing()),
    "collate with a global": lambda: DataLoader(Augmented(), batch_size=4, collate_fn=draw_globally),
    "no batching": lambda: DataLoader(Augmented(), batch_size=None, sampler=RandomSampler(range(9))),
    "sampler that draws": lambda: DataLoader(Augmented(), batch_size=4, sampler=Chunks()),
    "batch sampler": lambda: DataLoader(Augmented(), batch_sampler=Varying()),
    "subclass": lambda: Doubling(Augmented(), batch_size=4, shuffle=True),
    "subclass, generator": lambda: Doubling(Own(), batch_size=4, shuffle=True, generator=generator()),
    "irregular subclass": lambda: Partial(Augmented(), batch_size=4, shuffle=True),
    "wrapper": lambda: Wrapper(DataLoader(Augmented(), batch_size=4, shuffle=True)),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "short stream": lambda: DataLoader(Stream(items=3), batch_size=4),
    "measured stream": lambda: DataLoader(Measured(), batch_size=4),
    "stateful": lambda: StatefulDataLoader(Augmented(), batch_size=4, shuffle=True),
    "stateful stream": lambda: StatefulDataLoader(Stream(), batch_size=4),
    "two loaders": lambda: (
        DataLoader(Augmented(), batch_size=4, shuffle=True),
        DataLoader(Own(), batch_size=3, shuffle=True, generator=generator()),
    ),
    "loaders by name": lambda: {"a": DataLoader(Augmented(), batch_size=4), "b": DataLoader(Stream(), batch_size=5)},
    "two loaders of one dataset": lambda: two_of(Own(), DataLoader),
    "two loaders of one counter": lambda: two_of(Counting(), DataLoader),
    "two loaders with one collate_fn": lambda: (
        DataLoader(Augmented(), batch_size=4, collate_fn=draw_globally),
        DataLoader(Augmented(), batch_size=5, collate_fn=draw_globally),
    ),
    "function": lambda: lambda number: torch.full((2,), number) + torch.rand(2),
    "function with a generator": lambda: Noise().draw,
}

IN_WORKERS: dict[str, Callable[[], Any]] = {
    "augmented": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=2),
    "generator": lambda: DataLoader(
        Augmented(), batch_size=4, shuffle=True, num_workers=2, generator=generator(), worker_init_fn=seed_worker
    ),
    "persistent": lambda: DataLoader(
        Augmented(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True, generator=generator()
    ),
    "own generators": lambda: DataLoader(Own(), batch_size=4, shuffle=True, num_workers=2),
    "collate with a global": lambda: DataLoader(Augmented(), batch_size=4, collate_fn=draw_globally, num_workers=2),
    "sampler that draws": lambda: DataLoader(Augmented(), batch_size=4, sampler=Chunks(), num_workers=2),
    "subclass": lambda: Doubling(Augmented(), batch_size=4, shuffle=True, num_workers=2),
    "wrapper": lambda: Wrapper(DataLoader(Own(), batch_size=4, shuffle=True, num_workers=2)),
    "stream": lambda: DataLoader(Stream(), batch_size=4, num_workers=2),
    "persistent stream": lambda: DataLoader(Stream(), batch_size=4, num_workers=2, persistent_workers=True),
    "stream of epochs": lambda: DataLoader(Epochs(18), batch_size=4, num_workers=2),
    "persistent stream of epochs": lambda: DataLoader(Epochs(18), batch_size=4, num_workers=2, persistent_workers=True),
    "stateful": lambda: StatefulDataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=2),
    "stateful sampler": lambda: StatefulDataLoader(
        Augmented(), batch_size=4, sampler=DistributedSampler(ITEMS, 2, 0), num_workers=2
    ),
    "stateful dataset": lambda: StatefulDataLoader(Remembering(), batch_size=4, shuffle=True, num_workers=2),
    "stateful stream": lambda: StatefulDataLoader(Stream(), batch_size=4, num_workers=2),
    "two loaders": lambda: [
        DataLoader(Augmented(), batch_size=4, num_workers=1),
        DataLoader(Augmented(), batch_size=5, num_workers=1),
    ],
}


class Remembering(Augmented):
    """Has a state of its own, which a StatefulDataLoader keeps."""

    def state_dict(self) -> dict[str, int]:
        return {"seen": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"seen": 1}


class Noise:
    """A function of the batch's number, and of a generator that runs on."""

    def __init__(self) -> None:
        self.generator = generator()

    def draw(self, number: int) -> torch.Tensor:
        return torch.rand(3, generator=self.generator) + number


def make_batches(data: Any, accumulate: int = 1, streams: str = "step") -> Batches:
    return Batches(data, accumulate, 7, streams, PositionPage(-1))


def flat(batch: Any) -> list[float]:
    leaves = [torch.as_tensor(leaf).flatten().double() for leaf in torch.utils._pytree.tree_leaves(batch)]
    return torch.cat(leaves).tolist()


def train(batches: Batches, first: int, last: int) -> Iterator[tuple[bytes, list[float]]]:
    for step in range(first, last):
        private = encode_tree(batches.private(), "p")
        batch = flat(batches.get(step, 1))
        yield private, [*batch, float(torch.rand(()))]
        batches.private()
        batches.done()


def seed_globals(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    RNG.bit_generator.state = numpy.random.default_rng(11).bit_generator.state


def check(
    make: Callable[[], Any],
    starts: tuple[int, ...],
    streams: str = "step",
    accumulate: int = 1,
    *,
    rehearses: bool = True,
) -> None:
    seed_globals(1)
    original = make_batches(make(), accumulate, streams)
    original.start(0, 1)
    steps = list(train(original, 0, STEPS))
    original.close(1, 0)
    assert len({tuple(batch) for _, batch in steps}) == STEPS
    for start in starts:
        seed_globals(99)
        replacement = make_batches(make(), accumulate, streams)
        if rehearses:
            replacement.rehearse(0)
        replacement.take_over(decode_tree(steps[start][0]), start, 1)
        found = [batch for _, batch in train(replacement, start, STEPS)]
        assert found == [batch for _, batch in steps[start:]]
        replacement.close(1, 0)


@pytest.mark.parametrize("streams", ["step", "preserve"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_replacement_gets_the_batches_of_any_object(shape: str, streams: str) -> None:
    check(SHAPES[shape], (0, 1, 3, 9, 10, 11), streams)


@pytest.mark.parametrize("shape", SHAPES)
def test_accumulation(shape: str) -> None:
    check(SHAPES[shape], (1, 4, 5), accumulate=2)


@pytest.mark.parametrize("shape", IN_WORKERS)
def test_a_replacement_gets_the_batches_of_worker_processes(shape: str) -> None:
    check(IN_WORKERS[shape], (3, 11))  # in the middle of an epoch, and in the next one


def test_kept_workers_that_start_in_a_later_epoch_have_the_dataset_of_the_first() -> None:
    check(IN_WORKERS["persistent stream of epochs"], (3, 11), rehearses=False)


def test_worker_processes_that_are_spawned() -> None:
    loader = lambda: DataLoader(Augmented(), 3, shuffle=True, num_workers=1, multiprocessing_context="spawn")  # noqa: E731
    check(loader, (3,))


@pytest.mark.parametrize("shape", ["own generators", "function with a generator", "two loaders"])
def test_a_repeated_step_finds_the_generators_of_the_data_as_they_were(shape: str) -> None:
    data = SHAPES[shape]()
    objects = data[1].dataset if shape == "two loaders" else getattr(data, "dataset", None) or data.__self__
    found = objects.torch if hasattr(objects, "torch") else objects.generator
    batches = make_batches(data)
    batches.start(0, 1)
    batches.get(0, 1)
    first = torch.rand(3, generator=found)
    batches.private()
    batches.get(0, 1)
    assert torch.equal(torch.rand(3, generator=found), first)


class Drifting(Sampler[int]):
    """Keeps a value in a dictionary, on which its indices depend."""

    def __init__(self) -> None:
        self.held = {"shift": 0.0}

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        for number in range(40):
            self.held["shift"] = 0.9 * self.held["shift"] + number % 5
            yield (number + int(self.held["shift"])) % 40


@pytest.mark.parametrize("makes_another", [False, True])
def test_a_repeated_step_finds_the_values_of_a_sampler_as_they_were(makes_another: bool) -> None:
    undisturbed = [flat(batch) for batch in DataLoader(ITEMS, batch_size=4, sampler=Drifting())]
    sampler = Drifting()
    batches = make_batches(DataLoader(ITEMS, batch_size=4, sampler=sampler))
    batches.start(0, 1)
    began = dict(sampler.held)
    found = [flat(batches.get(0, 1))]
    if makes_another:  # the step is undone, with whatever it has changed of objects that variables lead to
        sampler.held = began
    else:
        sampler.held.update(began)

    assert flat(batches.get(0, 1)) == found[0]
    batches.done()
    for step in range(1, 10):
        found.append(flat(batches.get(step, 1)))
        batches.done()

    assert found == undisturbed
