"""DataLoaders: their iterators, and the fetchers of their worker processes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _BaseDataLoaderIter

LOADER_ITERATOR: type = _BaseDataLoaderIter  # the class of all iterators of DataLoaders
_MINE = "_relight"  # an attribute of iterators, for `attach`
# Methods and attributes that decide how a DataLoader iterates.
ITERATION = ("__iter__", "_get_iterator", "_index_sampler", "_auto_collation", "__getattribute__")


def index_sampler_of(loader_or_iterator: Any) -> Any:
    """Return what gives the indices: the batch sampler, or the sampler of a loader without batches."""
    return loader_or_iterator._index_sampler


def workers_of(iterator: Any) -> int:
    """Return the number of worker processes of an iterator."""
    return int(iterator._num_workers)


def batches_drawn(iterator: Any) -> int:
    """Return the number of batches whose indices an iterator has drawn (torchdata's, which restores itself)."""
    return int(iterator._sampler_iter_yielded)


def worker_turns(iterator: Any) -> Iterator[int] | None:
    """Return the cycle by which batches are given to worker processes; None without workers."""
    turns: Iterator[int] | None = vars(iterator).get("_worker_queue_idx_cycle")
    return turns


def index_queues(iterator: Any) -> list[Any]:
    """Return the queues of indices to worker processes; empty without workers."""
    queues: list[Any] = getattr(iterator, "_index_queues", [])
    return queues


def set_index_queues(iterator: Any, queues: list[Any]) -> None:
    """Have an iterator use these queues."""
    iterator._index_queues = queues


def attach(iterator: Any, thing: Any) -> None:
    """Keep an object with an iterator, for `attached`."""
    setattr(iterator, _MINE, thing)


def attached(iterator: Any) -> Any:
    """Return the object that was attached to an iterator, or None."""
    return vars(iterator).get(_MINE)


@dataclass
class IteratorMethods:
    """The methods through which each iterator of a DataLoader passes."""

    init: Callable[..., None]
    reset: Callable[..., None]
    next_index: Callable[[Any], Any]
    advance: Callable[[Any], Any]


def iterator_methods() -> IteratorMethods:
    """Return the present methods."""
    base: Any = _BaseDataLoaderIter
    return IteratorMethods(base.__init__, base._reset, base._next_index, base.__next__)


def replace_iterator_methods(methods: IteratorMethods) -> None:
    """Put others in their place, for all iterators of this process."""
    base: Any = _BaseDataLoaderIter
    base.__init__, base._reset = methods.init, methods.reset
    base._next_index, base.__next__ = methods.next_index, methods.advance


@dataclass
class FetchMethods:
    """The methods by which a worker process loads a batch: of a map-style dataset, and of an iterable one."""

    items: Callable[[Any, Any], Any]
    stream: Callable[[Any, Any], Any]


def fetch_methods() -> FetchMethods:
    """Return the present methods."""
    of_items: Any = fetch._MapDatasetFetcher.fetch
    of_stream: Any = fetch._IterableDatasetFetcher.fetch
    return FetchMethods(of_items, of_stream)


def replace_fetch_methods(methods: FetchMethods) -> None:
    """Put others in their place, in this process."""
    fetch._MapDatasetFetcher.fetch = methods.items  # type: ignore[method-assign]
    fetch._IterableDatasetFetcher.fetch = methods.stream  # type: ignore[method-assign]


def is_resumption(message: Any) -> bool:
    """True if a message to a worker that is kept for another epoch has it call the dataset's `__iter__` again."""
    return type(message).__name__ == "_ResumeIteration"


def starts_kept_workers(loader: Any) -> bool:
    """Return whether the next iteration starts worker processes which later epochs keep."""
    return getattr(loader, "persistent_workers", False) and getattr(loader, "_iterator", None) is None


def end_persistent_workers(loader: Any) -> None:
    """Let the next epoch begin with new worker processes: these hold the dataset as it was when they started."""
    if getattr(loader, "persistent_workers", False):
        loader._iterator = None
