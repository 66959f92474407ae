"""Batches of one optimizer step at a time, out of a DataLoader, for `relight.Training(data=...)`.

A step of relight draws its data once. Here an item of the data is the list of all micro-batches of one optimizer step,
also of the smaller last group of an epoch, and a place in it is found by indices alone.
"""

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from relight.integrations.trainers.refused.table import LATE_CHANGE

__all__ = ["Reader", "UpdateSampler", "grouped_loader"]

_Tagged = tuple[int, Any]  # number of a micro-batch in its update, and an index, or an item, of the dataset


class UpdateSampler(Sampler[list[_Tagged]]):
    """Indices of one optimizer step: those of `accumulate` micro-batches, fewer at the end of an epoch.

    Each index comes with the number of its micro-batch. `rank` may be assigned: the batches of that rank are given
    from then on. `first` is the position, in optimizer steps, at which a resumed run begins; `most`, the number of
    micro-batches of an epoch if it is less than there are; `seed`, that of an order which ranks share and which no
    generator of its own decides.
    """

    def __init__(
        self, micro_batches: Any, accumulate: int, *, first: int = 0, most: int | None = None, seed: int = 0
    ) -> None:
        self._micro_batches = micro_batches
        self._accumulate = accumulate
        self._most = most
        self._seed = seed
        self.begin_after(first)
        self._epoch = 0
        drawing = [*self._parts(), _divided(self._parts()[-1])]
        self.set_by_relight = [  # set here, where an epoch begins, and kept in no other way
            each.generator for each in drawing if isinstance(getattr(each, "generator", None), torch.Generator)
        ]
        self._states = {0: self._generator_states()}  # at the start of epochs
        self._shard, self._rank_name, size = _who_shares(micro_batches)
        self.num_replicas = int(getattr(self._shard, size, 1))

    def begin_after(self, first: int) -> None:
        """Have the run begin after `first` optimizer steps, in the data of the next one."""
        self._first_epoch, self._skipped = divmod(first, len(self))

    @property
    def rank(self) -> int:
        """The rank whose batches are given."""
        return int(getattr(self._shard, self._rank_name, 0))

    @rank.setter
    def rank(self, rank: int) -> None:
        if self.num_replicas > 1:
            setattr(self._shard, self._rank_name, rank)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, counted from the start of this run."""
        self._epoch = epoch
        for thing in self._parts():
            if hasattr(thing, "set_epoch"):
                thing.set_epoch(self._first_epoch + epoch)

    def _parts(self) -> list[Any]:
        """The samplers, from the outermost one."""
        inner = getattr(self._micro_batches, "batch_sampler", self._micro_batches)
        return [self._micro_batches, inner, getattr(inner, "sampler", None)]

    def __len__(self) -> int:
        count = len(self._micro_batches)
        return math.ceil((count if self._most is None else min(count, self._most)) / self._accumulate)

    def __iter__(self) -> Iterator[list[_Tagged]]:
        skipped = self._skipped if self._epoch == 0 else 0
        for number, group in enumerate(self._groups()):
            if number >= skipped:
                yield group

    def _groups(self) -> Iterator[list[_Tagged]]:
        group: list[_Tagged] = []
        number = 0
        for indices in islice(self._drawn(), self._most):
            group += [(number, index) for index in indices]
            number += 1
            if number == self._accumulate:
                yield group
                group, number = [], 0
        if group:
            yield group

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self.set_by_relight]

    def _put_generators(self, epoch: int) -> None:
        """Have generators of the samplers' own at the start of an epoch, whatever this process has drawn before."""
        if not self.set_by_relight:
            return
        known = max(each for each in self._states if each <= epoch)
        for generator, state in zip(self.set_by_relight, self._states[known], strict=True):
            generator.set_state(state)
        for _ in range(known, epoch):
            for _ in self._micro_batches:  # draws as that epoch did
                pass
        self._states = {0: self._states[0], epoch: self._generator_states()}

    def _drawn(self) -> Iterator[Any]:
        """The batches, in an order that is the same on all ranks where they share it.

        A sampler without a generator of its own draws its order from the global streams, which differ between ranks.
        """
        self._put_generators(self._first_epoch + self._epoch)
        batches = iter(self._micro_batches)
        if self.num_replicas <= 1:
            yield from batches
            return
        with _seeded(self._seed + self._first_epoch + self._epoch):
            first = list(islice(batches, 1))
        yield from first
        yield from batches


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Inside, draws of the global streams follow from a seed; after it the streams are as they were."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])


def _divided(sampler: Any) -> Any:
    """Return the script's sampler whose indices Lightning's DistributedSamplerWrapper divides among ranks, or None."""
    return getattr(getattr(sampler, "dataset", None), "_sampler", None)


def _who_shares(micro_batches: Any) -> tuple[Any, str, str]:
    """Return the sampler that gives ranks their parts, and its attributes for rank and number of ranks."""
    if hasattr(micro_batches, "num_processes"):  # accelerate's BatchSamplerShard
        return micro_batches, "process_index", "num_processes"
    return getattr(micro_batches, "sampler", None), "rank", "num_replicas"


class _TaggedItems(Dataset[_Tagged]):
    """Items of a dataset, each with the number of its micro-batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    @property
    def whole(self) -> Any:
        """The dataset whose items these are."""
        return self._dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, tagged: Sequence[_Tagged]) -> list[_Tagged]:
        numbers, indices = zip(*tagged, strict=True)
        if hasattr(self._dataset, "__getitems__"):
            return list(zip(numbers, self._dataset.__getitems__(list(indices)), strict=True))
        return [(number, self._dataset[index]) for number, index in tagged]

    def __getitem__(self, tagged: _Tagged) -> _Tagged:
        number, index = tagged
        return number, self._dataset[index]


class _Places(Dataset[_Tagged]):
    """The numbers and indices themselves: items are read later."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, tagged: _Tagged) -> _Tagged:
        return tagged


class _CollateEach:
    """Collates each micro-batch by itself: a list of batches."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, tagged: Sequence[_Tagged]) -> list[Any]:
        groups: dict[int, list[Any]] = {}
        for number, item in tagged:
            groups.setdefault(number, []).append(item)
        return [self._collate(items) for items in groups.values()]


class _Late:
    """The batches of one optimizer step, each read when its turn comes."""

    def __init__(self, items: _TaggedItems, collate: Callable[[list[Any]], Any], tagged: Sequence[_Tagged]) -> None:
        self._items, self._collate = items, collate
        self._groups: dict[int, list[_Tagged]] = {}
        for number, index in tagged:
            self._groups.setdefault(number, []).append((number, index))

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Any]:
        for group in self._groups.values():
            yield self._collate([item for _, item in self._items.__getitems__(group)])


class Reader:
    """Reads the items of optimizer steps, after code at the head of a step that may change the dataset."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        """`loader` gives single batches."""
        self._reads_late = not loader.num_workers  # which read ahead, and have copies of the dataset
        self._items, self._collate = _TaggedItems(loader.dataset), loader.collate_fn
        # The dataset, and what makes batches of its items, if changes of them count.
        self.shown = loader.dataset if self._reads_late else None
        self.collate = loader.collate_fn if self._reads_late else None

    def places(self, grouped: DataLoader[Any]) -> DataLoader[Any]:
        """Make a DataLoader of places in place of one that `grouped_loader` has made, if items are to be read late."""
        if not self._reads_late:
            return grouped
        return DataLoader(_Places(len(self._items)), batch_sampler=grouped.batch_sampler, collate_fn=list)

    def read(self, given: Any) -> Any:
        """Return the batches of an item of the loader that `places` returned."""
        return _Late(self._items, self._collate, given) if self._reads_late else given

    @contextlib.contextmanager
    def no_late_changes(self) -> Iterator[None]:
        """Raises UsageError if code inside changes numbers of a dataset of which workers have copies."""
        before = {} if self._reads_late else self._numbers()
        yield
        changed = [name for name, value in before.items() if self._numbers().get(name) != value]
        if changed:
            raise LATE_CHANGE.error(
                "relight.integrations",
                f"a hook changed {', '.join(changed)} of the training data, with workers of the loader",
            )

    def _numbers(self) -> dict[str, Any]:
        attributes = getattr(self._items.whole, "__dict__", {})
        return {name: value for name, value in attributes.items() if type(value) in (bool, int, float, str)}


def grouped_loader(
    loader: DataLoader[Any], accumulate: int, *, first: int = 0, most: int | None = None, seed: int = 0
) -> DataLoader[Any]:
    """Make a DataLoader of lists of up to `accumulate` batches from one over a map-style dataset.

    Args:
        loader: gives single batches; it needs a batch sampler.
        accumulate: batches per list.
        first: lists that an earlier run has taken; the same data follows.
        most: batches of an epoch, if it is to be shorter.
        seed: of an order that ranks share, if its sampler has no generator.
    """
    options = {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
    }
    if loader.num_workers:
        options |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    return DataLoader(
        _TaggedItems(loader.dataset),
        batch_sampler=UpdateSampler(loader.batch_sampler, accumulate, first=first, most=most, seed=seed),
        collate_fn=_CollateEach(loader.collate_fn),
        **options,
    )
