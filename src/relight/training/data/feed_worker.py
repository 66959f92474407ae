"""Streams of a DataLoader's worker processes: seeded for each batch, whichever process loads it.

The main process puts a key beside each message to a worker. In the worker, the key is noted as the message is read,
and the batch that it asks for is loaded with Python's, NumPy's and torch's streams, and the generators that dataset and
collate_fn hold, seeded from it. An iterable dataset is always read from its start, so its streams are seeded once an
epoch, for each worker.
"""

from dataclasses import dataclass
from typing import Any

import xxhash
from torch.utils.data import get_worker_info

from relight.errors import UsageError
from relight.training.data.held import reseed
from relight.training.data.reach import ABSENT, Place, Reach
from relight.training.data.rng import seed_everything
from relight.training.state.digest import batch_digest
from relight.training.state.value_images import copied, same_values
from relight.training.torch_private.loaders import FetchMethods, fetch_methods, is_resumption, replace_fetch_methods


@dataclass(frozen=True)
class Key:
    """`epoch` stands for seed, rank and epoch; `number` counts the batches of the epoch."""

    epoch: int
    number: int


class Keyed:
    """A message to a worker, with a key. What the worker gets is the message itself."""

    def __init__(self, message: Any, key: Key) -> None:
        self._message = message
        self._key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._message, self._key.epoch, self._key.number)


class _Arrived:
    """Keys, as this worker process knows them."""

    key: Key | None = None
    epoch: int | None = None  # of the iterable dataset that is being read
    reach: Reach | None = None
    first: dict[str, Any] | None = None  # plain values of dataset and collate_fn before the first batch
    batches = 0


def _arrive(message: Any, epoch: int, number: int) -> Any:
    if _Arrived.key is None:
        _install()
    _Arrived.key = Key(epoch, number)
    if is_resumption(message):  # the dataset's __iter__ comes next, in a worker that is kept
        _seed(None, f"{epoch}/{_worker()}")
    return message


def _install() -> None:
    before = fetch_methods()
    of_items, of_stream = before.items, before.stream

    def fetch_items(self: Any, index: Any) -> Any:
        key = _Arrived.key
        if key is None:
            return of_items(self, index)
        stem = f"{key.epoch}/{key.number}"
        reach = _Arrived.reach or _reach_of(self)
        changed = _changed_values(reach)
        _seed(reach, stem)
        data = of_items(self, index)
        _Arrived.reach = _reach_of(self)
        if _Arrived.reach.generators.keys() - reach.generators.keys():
            # A generator was made as it was needed: load the batch again, as it will be where there is one already.
            _seed(_Arrived.reach, stem)
            data = of_items(self, index)
        _Arrived.batches += 1
        if changed and _Arrived.batches & (_Arrived.batches - 1) == 0:
            kept = {path: copied(place.get(), {}) for path, place in changed.items()}
            _set(changed, _Arrived.first or {})
            _seed(_Arrived.reach, stem)
            again = of_items(self, index)
            _set(changed, kept)
            _compare(data, again, changed)
        return data

    def fetch_stream(self: Any, index: Any) -> Any:
        key = _Arrived.key
        if key is not None and _Arrived.epoch != key.epoch:
            _Arrived.epoch = key.epoch
            _seed(_reach_of(self), f"{key.epoch}/{_worker()}")
        return of_stream(self, index)

    replace_fetch_methods(FetchMethods(fetch_items, fetch_stream))


def _changed_values(reach: Reach) -> dict[str, Place]:
    """Plain values that are not what they were when this process began: a new one would not have them."""
    if _Arrived.first is None:
        _Arrived.first = {path: copied(place.get(), {}) for path, place in reach.values.items()}
    first = _Arrived.first
    return {
        path: place for path, place in reach.values.items() if not same_values(place.get(), first.get(path, ABSENT))
    }


def _set(places: dict[str, Place], values: dict[str, Any]) -> None:
    for path, place in places.items():
        place.set(values.get(path, ABSENT))


def _compare(data: Any, again: Any, changed: dict[str, Place]) -> None:
    if batch_digest(data) != batch_digest(again):
        raise UsageError(
            f"{', '.join(sorted(changed))} changes as a DataLoader's workers load data, and what they load depends"
            " on that: the workers of a replacement begin anew. Make it a function of the index, or of the epoch "
            "(set_epoch), or use num_workers=0"
        )


def _reach_of(fetcher: Any) -> Reach:
    return Reach({"dataset": fetcher.dataset, "collate_fn": fetcher.collate_fn})


def _worker() -> int:
    info = get_worker_info()
    return -1 if info is None else info.id


def _seed(reach: Reach | None, stem: str) -> None:
    seed = xxhash.xxh3_64_intdigest(stem.encode())
    seed_everything(seed, "worker", 0, 0)
    if reach is not None:
        reseed(reach.generators, seed)
