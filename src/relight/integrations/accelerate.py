"""Loops written with Hugging Face's accelerate: its cached rank, and its data in groups of micro-batches.

Accelerate copies the rank of a process when it starts. A standby has a provisional rank then, so `follow_rank` must be
called at the head of each step. `update_loader` turns a prepared DataLoader into one that gives all micro-batches of
one optimizer step at a time, also the smaller last group of an epoch, and that finds its place by indices alone.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard
from accelerate.state import AcceleratorState, PartialState
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from relight.errors import UsageError

__all__ = ["UpdateSampler", "follow_rank", "update_loader"]

_Tagged = tuple[int, Any]  # number of a micro-batch in its update, and an index, or an item, of the dataset


def follow_rank() -> int:
    """Correct the rank that accelerate has cached, and return it.

    `Accelerator`, `PartialState` and `TrainingArguments` read it from there. The local rank follows too.
    """
    rank = dist.get_rank()
    shared = PartialState._shared_state
    if shared and shared.get("process_index") != rank:
        local = rank % max(1, _ranks_per_node())
        for state in (shared, AcceleratorState._shared_state):
            if state:
                state["process_index"] = rank
                state["local_process_index"] = local
    return rank


def _ranks_per_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


class UpdateSampler(Sampler[list[_Tagged]]):
    """Indices of one optimizer step: those of `accumulate` micro-batches, fewer at the end of an epoch.

    Each index comes with the number of its micro-batch. `rank` may be assigned: the batches of that rank are given
    from then on. `first` is the position, in optimizer steps, at which a resumed run begins.
    """

    def __init__(self, micro_batches: Any, accumulate: int, *, first: int = 0) -> None:
        self._micro_batches = micro_batches
        self._accumulate = accumulate
        self._first_epoch, self._skipped = divmod(first, len(self))
        self._epoch = 0
        self.num_replicas = getattr(micro_batches, "num_processes", 1)

    @property
    def rank(self) -> int:
        """The rank whose batches are given."""
        return int(getattr(self._micro_batches, "process_index", 0))

    @rank.setter
    def rank(self, rank: int) -> None:
        if isinstance(self._micro_batches, BatchSamplerShard) and self._micro_batches.num_processes > 1:
            self._micro_batches.process_index = rank

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, counted from the start of this run."""
        self._epoch = epoch
        inner = getattr(self._micro_batches, "batch_sampler", self._micro_batches)
        things: list[Any] = [self._micro_batches, inner, getattr(inner, "sampler", None)]
        for thing in things:
            if hasattr(thing, "set_epoch"):
                thing.set_epoch(self._first_epoch + epoch)

    def __len__(self) -> int:
        return math.ceil(len(self._micro_batches) / self._accumulate)

    def __iter__(self) -> Iterator[list[_Tagged]]:
        skipped = self._skipped if self._epoch == 0 else 0
        for number, group in enumerate(self._groups()):
            if number >= skipped:
                yield group

    def _groups(self) -> Iterator[list[_Tagged]]:
        group: list[_Tagged] = []
        number = 0
        for indices in self._micro_batches:
            group += [(number, index) for index in indices]
            number += 1
            if number == self._accumulate:
                yield group
                group, number = [], 0
        if group:
            yield group


class _TaggedItems(Dataset[_Tagged]):
    """Items of a dataset, each with the number of its micro-batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

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


class _CollateEach:
    """Collates each micro-batch by itself: a list of batches."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, tagged: Sequence[_Tagged]) -> list[Any]:
        groups: dict[int, list[Any]] = {}
        for number, item in tagged:
            groups.setdefault(number, []).append(item)
        return [self._collate(items) for items in groups.values()]


def update_loader(prepared: DataLoader[Any], accumulate: int, *, first: int = 0) -> DataLoader[Any]:
    """Make a DataLoader of optimizer steps from one that `Accelerator.prepare` has returned.

    Args:
        prepared: a prepared DataLoader over a map-style dataset.
        accumulate: micro-batches per optimizer step.
        first: optimizer steps that an earlier run has made; the same data follows.

    Returns:
        A DataLoader whose batches are lists of up to `accumulate` micro-batches, for `relight.Training(data=...)`.

    Raises:
        UsageError: the dataset is iterable, or batches are dispatched from one process.
    """
    if isinstance(prepared.dataset, IterableDataset) or prepared.batch_sampler is None:
        raise UsageError(
            "the training data is an IterableDataset: a replacement could not find its place in it by an index. Use a "
            "dataset with __len__ and __getitem__"
        )
    if "Dispatcher" in type(prepared).__name__:
        raise UsageError("dispatch_batches=True sends batches from rank 0 to the others: set dispatch_batches=False")
    options = {
        "num_workers": prepared.num_workers,
        "pin_memory": prepared.pin_memory,
        "worker_init_fn": prepared.worker_init_fn,
        "multiprocessing_context": prepared.multiprocessing_context,
    }
    if prepared.num_workers:
        options |= {"prefetch_factor": prepared.prefetch_factor, "persistent_workers": prepared.persistent_workers}
    return DataLoader(
        _TaggedItems(prepared.dataset),
        batch_sampler=UpdateSampler(prepared.batch_sampler, accumulate, first=first),
        collate_fn=_CollateEach(prepared.collate_fn),
        **options,
    )
