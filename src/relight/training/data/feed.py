"""Iterators of DataLoaders that serve the training: how they are positioned, and how their workers are keyed.

The user's own loader is iterated, as it is. Its iterators ask here for their indices and send messages to their workers
through here; those that do not belong to the training's data are left alone, but for a look at what the script does
with them (`strays`).
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import xxhash
from torch.utils.data import BatchSampler

from relight.training.data import rng
from relight.training.data.feed_worker import Key, Keyed
from relight.training.data.strays import watch
from relight.training.torch_private import loaders


class Feed:
    """One source of the training's data in its present epoch, as the iterators that it makes have to know it."""

    def __init__(self, seed: int, name: str, *, is_restored: bool = False) -> None:
        """`name` tells several sources apart. `is_restored`: its iterators know themselves how far they are."""
        self._seed = seed
        self._name = name
        self._lanes = 0
        self.is_restored = is_restored
        self.rank = 0
        self.epoch = 0
        self.skip = 0  # indices to leave out; no data is loaded for them
        self.after_skip: Callable[[], None] = lambda: None
        self.loads_in_a_thread = False  # of this process, beside the script

    def begin(self, epoch: int, rank: int, skip: int, after_skip: Callable[[], None]) -> None:
        """An epoch is iterated anew."""
        self._lanes = 0
        self.epoch, self.rank, self.skip, self.after_skip = epoch, rank, skip, after_skip

    def seed_epoch(self) -> None:
        rng.seed_everything(self._seed, f"epoch{self._name}", self.epoch, self.rank)

    def seed_batch(self, number: int) -> None:
        rng.seed_everything(self._seed, f"step{self._name}", number, self.rank)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Iterators that are made in here belong to this feed."""
        before, _Present.feed = _Present.feed, self
        try:
            yield
        finally:
            _Present.feed = before

    def lane(self, index_sampler: Any) -> "Lane":
        """Knowledge of an iterator that begins."""
        self._lanes += 1
        stem = f"{self._seed}/{self._name}/{self.epoch}/{self._lanes}/{self.rank}"
        return Lane(self, xxhash.xxh3_64_intdigest(stem.encode()), draws_at_once(index_sampler))


class Lane:
    """Knowledge of one iterator of a feed. It holds no iterator: those end their workers when they are forgotten."""

    def __init__(self, feed: Feed, key: int, draws_at_once: bool) -> None:
        self._feed = feed
        self._key = key
        self._draws_at_once = draws_at_once
        self._begun = False
        self._streams: Any = None  # of a sampler that draws as it goes
        self._ahead: list[Any] | None = None  # the first indices, if they were drawn ahead; empty if there are none
        self.number = -1  # of the batch whose indices were drawn last, in its epoch

    @property
    def key(self) -> Key:
        return Key(self._key, max(self.number, 0))

    def next_index(self, iterator: Any, draw: Callable[[Any], Any]) -> Any:
        """The indices of the next batch, drawn from streams that are the sampler's own."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            if not ahead:
                raise StopIteration
            return ahead[0]
        if not self._begun:
            self._begun = True
            with rng.streams_kept():
                self._feed.seed_epoch()
                index = self._first(iterator, draw)
                if not self._draws_at_once:
                    self._streams = rng.capture()
        elif self._streams is not None:
            with rng.streams_kept():
                rng.put_back(self._streams)
                index = draw(iterator)
                self._streams = rng.capture()
        else:
            index = draw(iterator)
        self.number = loaders.batches_drawn(iterator) if self._feed.is_restored else self.number + 1
        return index

    def draw_ahead(self, iterator: Any, draw: Callable[[Any], Any]) -> None:
        """Draw the first indices now: the script may read this iterator in a thread, beside other draws."""
        if loaders.workers_of(iterator) == 0 and not self._feed.is_restored:
            try:
                self._ahead = [self.next_index(iterator, draw)]
            except StopIteration:
                self._ahead = []

    def advanced(self, iterator: Any) -> None:
        if loaders.workers_of(iterator) == 0 and threading.current_thread() is not threading.main_thread():
            self._feed.loads_in_a_thread = True

    def _first(self, iterator: Any, draw: Callable[[Any], Any]) -> Any:
        skip, self._feed.skip = self._feed.skip, 0
        after_skip, self._feed.after_skip = self._feed.after_skip, lambda: None
        for _ in range(skip):
            draw(iterator)
        if skip:
            self.number += skip
            turns = loaders.worker_turns(iterator)
            if turns is not None:  # each batch is loaded by the worker that would have loaded it
                for _ in range(skip % loaders.workers_of(iterator)):
                    next(turns)
        try:
            return draw(iterator)
        finally:
            after_skip()


class _Present:
    """The feed whose data is being drawn."""

    feed: Feed | None = None


class _KeyedQueue:
    """A queue to a worker process. Each message takes a key along."""

    def __init__(self, queue: Any, lane: Lane) -> None:
        self.inner = queue
        self.lane = lane

    def put(self, message: Any) -> None:
        self.inner.put(None if message is None else Keyed(message, self.lane.key))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def draws_at_once(sampler: Any) -> bool:
    """True if it draws random numbers of the global streams with its first index only, as torch's own samplers do."""
    if isinstance(sampler, BatchSampler) or type(sampler).__module__.startswith("torchdata."):
        inner = getattr(sampler, "sampler", None)
        return _is_torch(sampler) and (inner is None or draws_at_once(inner))
    return _is_torch(sampler)


def _is_torch(sampler: Any) -> bool:
    return type(sampler).__module__.partition(".")[0] in ("torch", "torchdata")


@functools.cache
def install() -> None:
    """From now on, in this process, DataLoader iterators ask here. Those that no feed has made are as they were."""
    torchs = loaders.iterator_methods()
    init, reset, next_index, advance = torchs.init, torchs.reset, torchs.next_index, torchs.advance

    def claim(iterator: Any) -> None:
        feed = _Present.feed
        loaders.attach(iterator, None if feed is None else feed.lane(loaders.index_sampler_of(iterator)))
        watch.made(iterator)

    def on_init(self: Any, loader: Any) -> None:
        generator = loader.generator if _Present.feed and loader.persistent_workers else None
        state = generator.get_state() if generator else None
        init(self, loader)
        if generator:  # as in later epochs, for which the iterator with its workers is kept: it draws no seed for them
            generator.set_state(state)
        claim(self)
        if (lane := loaders.attached(self)) is not None:
            lane.draw_ahead(self, next_index)

    def on_reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        reset(self, loader, first_iter)
        if not first_iter:
            claim(self)
        lane, queues = loaders.attached(self), loaders.index_queues(self)
        raw = [queue.inner if isinstance(queue, _KeyedQueue) else queue for queue in queues]
        if queues:
            loaders.set_index_queues(self, [_KeyedQueue(queue, lane) for queue in raw] if lane else raw)

    def on_next_index(self: Any) -> Any:
        lane = loaders.attached(self)
        return next_index(self) if lane is None else lane.next_index(self, next_index)

    def on_advance(self: Any) -> Any:
        lane = loaders.attached(self)
        if lane is None and _Present.feed is None:
            watch.advanced(self)
        elif lane is not None:
            lane.advanced(self)
        return advance(self)

    loaders.replace_iterator_methods(loaders.IteratorMethods(on_init, on_reset, on_next_index, on_advance))
