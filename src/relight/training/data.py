"""Where a rank stands in its data, and how a replacement gets to the same place.

A map-style DataLoader is positioned by the step number: batch b lies in epoch b // len(loader). A loader with
`state_dict` (torchdata's StatefulDataLoader) carries its own position, which is rank-private state. A function of
the step needs no position at all.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from relight.errors import UsageError
from relight.training.rng import seed_everything, streams_kept
from relight.training.state import Stateful
from relight.transfer.codec import raw_bytes

_MARKED_ELEMENTS = 512


class DataSource(Protocol):
    """One rank's batches, in order."""

    def position(self, batch: int, rank: int) -> None:
        """Make `batch` (counted from the start of training) the next one."""

    def next(self) -> Any:
        """The next batch."""

    def state(self) -> Any:
        """Rank-private position, or None if the batch number says it all."""

    def restore(self, state: Any) -> None:
        """The inverse of `state`, instead of `position`."""

    def epoch(self, batch: int) -> int:
        """The epoch that `batch` lies in."""


def make_source(data: Any, seed: int) -> DataSource:
    """Choose how to position `data`. Raises UsageError for what cannot be positioned."""
    if data is None:
        return FunctionSource(lambda step: None)  # noqa: ARG005
    if isinstance(data, Stateful):
        return StatefulSource(data)
    if isinstance(data, DataLoader):
        return LoaderSource(data, seed)
    if callable(data):
        return FunctionSource(data)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return FunctionSource(lambda step: data[step % len(data)])
    raise UsageError(
        f"relight.Training(data=...) got a {type(data).__qualname__}: hand over a DataLoader, an object with "
        "state_dict() (torchdata's StatefulDataLoader), a sequence of batches, or a function from the batch's "
        "number to the batch, so that a replacement can find its place"
    )


class FunctionSource:
    """Batches are a pure function of their number."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        self._function = function
        self._batch = 0

    def position(self, batch: int, rank: int) -> None:  # noqa: ARG002
        self._batch = batch

    def next(self) -> Any:
        self._batch += 1
        return self._function(self._batch - 1)

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        raise AssertionError(f"a function of the step has no state, got {state!r}")

    def epoch(self, batch: int) -> int:  # noqa: ARG002
        return 0


class LoaderSource:
    """A torch DataLoader, read epoch after epoch; calls the sampler's set_epoch, as a training loop would."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._loader = loader
        self._seed = seed
        self._rank = 0
        self._batch = 0
        self._iterator: Iterator[Any] | None = None
        self._skip = 0

    def position(self, batch: int, rank: int) -> None:
        self._rank = rank
        self._batch = batch
        self._iterator = None
        bind_rank(self._loader, rank)

    def next(self) -> Any:
        if self._iterator is None:
            self._iterator = self._start(self._batch)
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._iterator = self._start(self._batch)
            batch = next(self._iterator)
        self._batch += 1
        return batch

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        raise AssertionError(f"this loader is positioned by number, got {state!r}")

    def epoch(self, batch: int) -> int:
        return batch // self._length()

    def _length(self) -> int:
        try:
            length = len(self._loader)
        except TypeError as error:
            raise UsageError(
                "the DataLoader has no length (an IterableDataset without __len__), so a replacement could not find "
                "its place: use torchdata's StatefulDataLoader"
            ) from error
        if length == 0:
            raise UsageError("the DataLoader is empty on this rank: the dataset is smaller than one batch per rank")
        return length

    def _start(self, batch: int) -> Iterator[Any]:
        """An iterator whose first item is `batch`. The global streams are as they were afterwards.

        Loader and sampler draw seeds from them when an epoch starts. These draws are made repeatable, and kept apart
        from the draws of the dataset, which a replacement in the middle of an epoch makes under the step's streams.
        """
        epoch, skip = divmod(batch, self._length())
        for sampler in _samplers(self._loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

        def seed_epoch() -> None:
            seed_everything(self._seed, "epoch", epoch, self._rank)

        if isinstance(self._loader.dataset, IterableDataset) or self._loader.batch_sampler is None:
            with streams_kept():
                seed_epoch()
                return itertools.islice(iter(self._loader), skip, None)
        with streams_kept():
            seed_epoch()
            return iter(_with_sampler(self._loader, _EpochSampler(self._loader.batch_sampler, skip, seed_epoch)))


class StatefulSource:
    """A loader that carries its own position."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0

    def position(self, batch: int, rank: int) -> None:
        bind_rank(self._loader, rank)
        if batch == 0:
            self._iterator = None

    def next(self) -> Any:
        if self._iterator is None:
            self._iterator = self._start()
        try:
            return next(self._iterator)
        except StopIteration:
            self._epoch += 1
            self._iterator = self._start()
            return next(self._iterator)

    def _start(self) -> Iterator[Any]:
        with streams_kept():
            return iter(self._loader)

    def state(self) -> Any:
        return {"loader": self._loader.state_dict(), "epoch": self._epoch}

    def restore(self, state: Any) -> None:
        self._loader.load_state_dict(state["loader"])
        self._epoch = state["epoch"]
        self._iterator = None

    def epoch(self, batch: int) -> int:  # noqa: ARG002
        return self._epoch


def batch_digest(batch: Any) -> int:
    """Digest of the shapes and first bytes of a batch's tensors: enough to tell one batch from another, and cheap."""
    state = xxhash.xxh3_64()
    for leaf in torch.utils._pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            state.update(str(tuple(leaf.shape)).encode())
            first = leaf.detach().reshape(-1)[:_MARKED_ELEMENTS].to("cpu").contiguous()
            state.update(raw_bytes(first))
        elif isinstance(leaf, (int, float, str)):
            state.update(str(leaf).encode())
    return state.intdigest() or 1


def _samplers(loader: Any) -> list[Any]:
    found = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    found.append(getattr(found[1], "sampler", None))
    return [sampler for sampler in found if sampler is not None]


def bind_rank(loader: Any, rank: int) -> None:
    """Tell samplers (and datasets) that were built by a standby, before it knew its rank, which rank they serve."""
    for thing in [*_samplers(loader), getattr(loader, "dataset", None)]:
        if isinstance(getattr(thing, "rank", None), int) and (
            hasattr(thing, "num_replicas") or hasattr(thing, "world_size")
        ):
            thing.rank = rank


class _EpochSampler:
    """The batches of a sampler after the first few: only indices are skipped, no data is loaded for them."""

    def __init__(self, sampler: Any, skip: int, seed_epoch: Callable[[], None]) -> None:
        self._sampler = sampler
        self._skip = skip
        self._seed_epoch = seed_epoch

    def __iter__(self) -> Iterator[Any]:
        with streams_kept():
            self._seed_epoch()
            indices = itertools.islice(iter(self._sampler), self._skip, None)
            first = list(itertools.islice(indices, 1))  # a sampler draws its seed when its first index is asked for
        yield from first
        yield from indices

    def __len__(self) -> int:
        return len(self._sampler) - self._skip


def _with_sampler(loader: DataLoader[Any], sampler: _EpochSampler) -> DataLoader[Any]:
    return DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )
