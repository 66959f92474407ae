"""Loops written with Hugging Face's accelerate: its cached rank, and its data in groups of micro-batches.

Accelerate copies the rank of a process when it starts. A standby has a provisional rank then, so the states of
accelerate ask torch for it from then on. `follow_rank`, to be called at the head of each step, does what a process has
to do once its rank is another one. `update_loader` turns a prepared DataLoader into one that gives all micro-batches of
one optimizer step at a time, also the smaller last group of an epoch, and that finds its place by indices alone.

Accelerate also counts micro-batches (`accelerator.step`), and notes which loaders are being iterated. Undoing a step
restores neither, and a replacement has neither. So both are reset where a group of micro-batches from `update_loader`
begins, and `accelerator.accumulate` takes the last one of a group for the end of a loader: it synchronizes gradients
there. Outside of groups `accumulate` is refused.
"""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import recursively_apply, send_to_device
from torch.utils.data import DataLoader, IterableDataset

from relight.errors import UsageError
from relight.integrations.trainers.refused import transformers as refused
from relight.integrations.trainers.updates import UpdateSampler, grouped_loader

_BY = "relight.integrations.accelerate"
_IS_WORKER = "RELIGHT_PRIVATE_DIR" in os.environ

__all__ = ["UpdateSampler", "follow_rank", "update_loader"]


def follow_rank() -> int:
    """Have accelerate go on with the rank that this process has now, and return it.

    On the main process trackers are started, if `init_trackers` was called while this process had another rank. Loaders
    that an earlier attempt at the step has left half read (in an evaluation) are forgotten.
    """
    rank = dist.get_rank()
    _forget_loaders()
    while _trackers and rank == 0:
        _trackers.pop(0)()
    return rank


def _ask_for_rank() -> None:
    """Have accelerate's states ask for the rank each time: also after the last step a process may take another one.

    `Accelerator`, `PartialState` and `TrainingArguments` read it from there, also after `end_training`.
    """
    for kind in (PartialState, AcceleratorState):
        kind.process_index = _asked("process_index", _rank_now)
        kind.local_process_index = _asked("local_process_index", lambda: _rank_now() % max(1, _ranks_per_node()))


def _rank_now() -> int:
    """Return the rank of this process; relight keeps the variable, when the script has destroyed the process group."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])


def _asked(name: str, now: Callable[[], int]) -> property:
    """Make an attribute that has the value of now once it has been set."""

    def read(state: Any) -> int:
        if name not in vars(state):
            raise AttributeError(name)
        return now()

    def write(state: Any, value: int) -> None:
        vars(state)[name] = value

    return property(read, write)


if _IS_WORKER:
    _ask_for_rank()

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


_counting: WeakSet[Accelerator] = WeakSet()  # those that have counted since a group of micro-batches was begun


def _forget_loaders() -> None:
    """Have accelerate be in no loader, whatever was interrupted before."""
    if GradientState._shared_state:
        state = GradientState()
        state.dataloader_references = [None]
        state.sync_gradients = True


def _count_in_groups() -> None:
    """Have each Accelerator begin to count with each group of micro-batches; without groups it may not accumulate."""
    original = Accelerator._do_sync

    @functools.wraps(original)
    def _do_sync(self: Accelerator) -> None:
        is_in_group = isinstance(self.gradient_state.active_dataloader, _Group)
        if _IS_WORKER and self.gradient_state.num_steps > 1 and not is_in_group:
            raise UsageError(
                f"{_BY}: accelerator.accumulate() counts micro-batches from step to step, which a recovery could not "
                "repeat. Give a step all its micro-batches: relight.Training(data=update_loader(loader, "
                f"{self.gradient_state.num_steps})), and `for batch in batches` around accumulate()"
            )
        if self not in _counting:
            _counting.add(self)
            self.step = 0
        original(self)

    Accelerator._do_sync = _do_sync


class _Group:
    """Stands for a loader that accelerate sees iterated: the micro-batches of one optimizer step."""

    end_of_dataloader = False
    remainder = 0  # nothing of a gathered batch is cut off


_count_in_groups()


@dataclass(eq=False)
class _MicroBatches:
    """The micro-batches of one optimizer step. When they are iterated, accelerate knows which one is the last."""

    batches: list[Any]
    device: torch.device | None  # to which they are moved then

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Any:
        return self.batches[number] if self.device is None else send_to_device(self.batches[number], self.device)

    def __iter__(self) -> Iterator[Any]:
        _forget_loaders()
        _counting.clear()
        group, state = _Group(), GradientState()
        state.dataloader_references = [*state.dataloader_references, group]
        try:
            for number in range(len(self)):
                group.end_of_dataloader = number == len(self) - 1
                yield self[number]
        finally:
            state.dataloader_references = [each for each in state.dataloader_references if each is not group]

    def pin_memory(self) -> "_MicroBatches":
        """Return them as a DataLoader asks for them."""
        return _MicroBatches(recursively_apply(torch.Tensor.pin_memory, self.batches), self.device)


class _Collate:
    """Makes the micro-batches of one optimizer step from its items."""

    def __init__(self, collate_each: Any, device: torch.device | None) -> None:
        """`collate_each` makes a list of them."""
        self._collate_each, self._device = collate_each, device

    def __call__(self, items: Sequence[Any]) -> _MicroBatches:
        return _MicroBatches(self._collate_each(items), self._device)


def _ranks_per_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())


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
        UsageError: the dataset is iterable, batches are dispatched from one process, or the Accelerator would end a
            step with gradients that wait for the next one.
    """
    refuse_unfit(prepared)
    _refuse_waiting(accumulate, len(prepared))
    loader = grouped_loader(prepared, accumulate, first=first, seed=seed)
    loader.collate_fn = _Collate(loader.collate_fn, getattr(prepared, "device", None))
    return loader


def _refuse_waiting(accumulate: int, count: int) -> None:
    """Raise UsageError if gradients of one optimizer step would be those of micro-batches of several."""
    state = GradientState()
    if accumulate % state.num_steps:
        raise UsageError(
            f"{_BY}: update_loader(..., {accumulate}) gives {accumulate} micro-batches a step, and the Accelerator has "
            f"gradient_accumulation_steps={state.num_steps}: gradients would wait for the next step, and a replacement "
            f"would lack them. Write update_loader(..., {state.num_steps})"
        )
    if not state.sync_with_dataloader and count % accumulate:
        raise UsageError(
            f"{_BY}: sync_with_dataloader=False has the last {count % accumulate} micro-batches of an epoch wait for "
            "the next epoch, and a replacement would lack their gradients. Leave it out, or let "
            "gradient_accumulation_steps divide the number of batches of an epoch"
        )


def refuse_unfit(prepared: DataLoader[Any]) -> None:
    """Raise UsageError for a prepared DataLoader in which a replacement could not find its place."""
    if not hasattr(prepared, "batch_sampler"):
        raise refused.ITERABLE.error(_BY, f"the training data is read by a {type(prepared).__name__}, no DataLoader")
    if isinstance(prepared.dataset, IterableDataset) or prepared.batch_sampler is None:
        raise refused.ITERABLE.error(_BY, "the training data is an IterableDataset")
    if "Dispatcher" in type(prepared).__name__:
        raise refused.DISPATCHED.error(_BY)
