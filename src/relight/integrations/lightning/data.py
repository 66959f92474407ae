"""The training data of a Lightning Trainer, as lists of batches: one for each optimizer step."""

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.loops.fetchers import _DataFetcher
from torch.utils.data import DataLoader, IterableDataset

from relight.integrations.trainers.updates import Reader, grouped_loader


class NoFetcher(_DataFetcher):
    """Stands where the loops expect a data fetcher; relight gives the batches."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self._combined_loader = loader

    def __iter__(self) -> "NoFetcher":
        for loader in self.combined_loader.flattened:
            if not getattr(loader, "persistent_workers", False):  # one that makes an iterator draws a seed for workers
                torch.empty((), dtype=torch.int64).random_()
        self.done = False
        return self


class _Updates:
    """Lists of batches, one for each optimizer step, from loaders of any kind."""

    def __init__(self, loop: Any, accumulate: int, first: int) -> None:
        self._loader = loop._combined_loader
        self._most = loop.max_batches
        self._accumulate = accumulate
        self.begin_after(first)
        self._at = 0
        self.sampler = self  # relight tells samplers the rank and the epoch
        self.num_replicas = 0

    def begin_after(self, first: int) -> None:
        """Have the run begin after `first` optimizer steps, in the data of the next one."""
        self._first_epoch, self._skipped = divmod(first, len(self))

    @property
    def rank(self) -> int:
        """The rank whose batches are given."""
        return next((each.rank for each in self._samplers()), 0)

    @rank.setter
    def rank(self, rank: int) -> None:
        for each in self._samplers():
            each.rank = rank

    def _samplers(self) -> Iterator[Any]:
        for loader in self._loader.flattened:
            sampler = getattr(loader, "sampler", None)
            if hasattr(sampler, "rank") and hasattr(sampler, "num_replicas"):
                yield sampler

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, counted from the start of this run."""
        self._at = epoch
        for loader in self._loader.flattened:
            _set_sampler_epoch(loader, self._first_epoch + epoch)

    def __len__(self) -> int:
        return math.ceil(self._most / self._accumulate)

    def __iter__(self) -> Iterator[list[Any]]:
        batches = islice((batch for batch, _, _ in iter(self._loader)), self._most)
        skipped = self._skipped if self._at == 0 else 0
        for number in range(len(self)):
            group = list(islice(batches, self._accumulate))
            if number >= skipped:
                yield group


def updates(loop: Any, accumulate: int, first: int) -> tuple[Any, Reader | None]:
    """Return the data of the steps: found by indices alone where it is one plain DataLoader, and then with a reader."""
    combined = loop._combined_loader
    loader = combined.iterables
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if plain and loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset):
        reader = Reader(loader)
        return reader.places(grouped_loader(loader, accumulate, first=first, most=int(loop.max_batches))), reader
    return _Updates(loop, accumulate, first), None


def updates_done(loop: Any, accumulate: int, per_epoch: int) -> int:
    """Return the optimizer steps that the run of a checkpoint has made, in groups of batches."""
    epochs = loop.epoch_progress.current
    batches = loop.epoch_loop.batch_progress.current.ready if epochs.processed < epochs.ready else 0
    return int(epochs.processed) * per_epoch + math.ceil(batches / accumulate)
