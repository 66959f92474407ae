"""Loops written with Hugging Face's accelerate: its cached rank, and its data in groups of micro-batches.

Accelerate copies the rank of a process when it starts. A standby has a provisional rank then, so `follow_rank` must be
called at the head of each step. `update_loader` turns a prepared DataLoader into one that gives all micro-batches of
one optimizer step at a time, also the smaller last group of an epoch, and that finds its place by indices alone.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch.utils.data import DataLoader, IterableDataset

from relight.integrations.trainers.refused import transformers as refused
from relight.integrations.trainers.updates import UpdateSampler, grouped_loader

_BY = "relight.integrations.accelerate"

__all__ = ["UpdateSampler", "follow_rank", "update_loader"]


def follow_rank() -> int:
    """Correct the rank that accelerate has cached, and return it.

    `Accelerator`, `PartialState` and `TrainingArguments` read it from there. The local rank follows too. On the main
    process trackers are started, if `init_trackers` was called while this process had another rank.
    """
    rank = dist.get_rank()
    shared = PartialState._shared_state
    if shared and shared.get("process_index") != rank:
        local = rank % max(1, _ranks_per_node())
        for state in (shared, AcceleratorState._shared_state):
            if state:
                state["process_index"] = rank
                state["local_process_index"] = local
    while _trackers and rank == 0:
        _trackers.pop(0)()
    return rank


_trackers: list[Callable[[], None]] = []  # that start what this process has asked for as another rank


def _note_trackers() -> None:
    """Note which trackers a process asks for: accelerate starts them on the main process only."""
    original = Accelerator.init_trackers

    @functools.wraps(original)
    def init_trackers(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        if not self.is_main_process:
            _trackers.append(functools.partial(original, self, *args, **kwargs))
        original(self, *args, **kwargs)

    Accelerator.init_trackers = init_trackers


_note_trackers()


def _ranks_per_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def update_loader(prepared: DataLoader[Any], accumulate: int, *, first: int = 0, seed: int = 0) -> DataLoader[Any]:
    """Make a DataLoader of optimizer steps from one that `Accelerator.prepare` has returned.

    Args:
        prepared: a prepared DataLoader over a map-style dataset.
        accumulate: micro-batches per optimizer step.
        first: optimizer steps that an earlier run has made; the same data follows.
        seed: of the order of the data, if the sampler has no generator of its own.

    Returns:
        A DataLoader whose batches are lists of up to `accumulate` micro-batches, for `relight.Training(data=...)`.

    Raises:
        UsageError: the dataset is iterable, or batches are dispatched from one process.
    """
    refuse_unfit(prepared)
    return grouped_loader(prepared, accumulate, first=first, seed=seed)


def refuse_unfit(prepared: DataLoader[Any]) -> None:
    """Raise UsageError for a prepared DataLoader in which a replacement could not find its place."""
    if not hasattr(prepared, "batch_sampler"):
        raise refused.ITERABLE.error(_BY, f"the training data is read by a {type(prepared).__name__}, no DataLoader")
    if isinstance(prepared.dataset, IterableDataset) or prepared.batch_sampler is None:
        raise refused.ITERABLE.error(_BY, "the training data is an IterableDataset")
    if "Dispatcher" in type(prepared).__name__:
        raise refused.DISPATCHED.error(_BY)
