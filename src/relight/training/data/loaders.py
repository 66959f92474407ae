"""Batches of what can be iterated again and again: torch's DataLoader, a class made of it, or an object of one's own.

The object itself is iterated, epoch after epoch. To get into the middle of an epoch, what its parts held when the epoch
began is put back, and it is iterated anew: past the first batches by their indices alone where it is torch's own
iteration over a map-style dataset, else by drawing and dropping them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from relight.errors import UsageError
from relight.training.data.feed import Feed, draws_at_once
from relight.training.data.held import Held, State
from relight.training.data.rng import capture, put_back, seed_everything, streams_kept
from relight.training.state.digest import batch_digest
from relight.training.torch_private.loaders import (
    ITERATION,
    end_persistent_workers,
    index_sampler_of,
    starts_kept_workers,
)

_LOOKS = 3  # of the first batches: some generators are made when the first item is read


class LoaderSource:
    """One rank's batches out of an object that can be iterated again."""

    def __init__(self, loader: Any, seed: int, *, preserve: bool = False, name: str = "") -> None:
        """`preserve`: the script's random streams run on. `name` tells several sources apart."""
        self._loader = loader
        self._preserve = preserve
        self._feed = Feed(seed, name)
        self._skips = is_skippable(loader)
        self._has_workers = getattr(loader, "num_workers", 0) > 0
        self._rank = 0
        self._batch = 0  # number of the next one
        self._epoch = 0
        self._offset = 0  # of the next one in its epoch
        self._iterator: Iterator[Any] | None = None
        self._fresh = True  # the epoch is begun at its first batch, with whatever the parts hold now
        self._index_held: Held | None = None
        self._fetch_held: Held | None = None
        self._initial: tuple[State, State] | None = None
        self._start: State = {}
        self._now: State | None = None
        self._length: int | None = None  # of an epoch, as len() says
        self._irregular = False  # an epoch had another one
        self._checked = self._skips
        self._looks = 0
        self._left: Any = None  # generators of loader and sampler after the last batch
        refuse_what_cannot_be_read_again(loader)

    # --- position -------------------------------------------------------------------------------------------------
    def position(self, batch: int, rank: int) -> None:
        self._rank = rank
        self._batch = batch
        self._iterator = None
        if self._index_held is None or self._fetch_held is None:
            self._index_held, self._fetch_held = self._hold()
            self._initial = self._index_held.first(), self._fetch_held.first()
        elif self._initial is not None:
            self._index_held.put_back(self._initial[0])
            self._fetch_held.put_back(self._initial[1])
        bind_rank(self._loader, rank)
        self._start, self._now, self._fresh, self._left = {}, None, True, None
        self._length = length_of(self._loader)
        length = self._known_length
        # Of where an epoch ends len() is only sure with torch's own samplers; else it is seen by drawing once more.
        last = batch if self._skips and draws_at_once(index_sampler_of(self._loader)) else max(batch - 1, 0)
        self._epoch = last // length if length else 0
        self._offset = batch - self._epoch * length if length else 0  # if it has no length, `restore` comes next

    def take_numbers(self) -> None:
        """Values of dataset and sampler were set to those of the rank, right after `position`."""
        for held in self._parts():
            held.take_numbers()
        end_persistent_workers(self._loader)

    def state(self) -> Any:
        index_held, fetch_held = self._parts()
        start, now = self._start or index_held.capture(), self._now or fetch_held.capture()
        if self._known_length is not None and not any(map(_is_used, (start, now))):
            return None
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "irregular": self._irregular,
            "start": start,
            "now": now,
        }

    def restore(self, state: Any) -> None:
        self._iterator = None
        self._epoch, self._offset = state["epoch"], state["offset"]
        self._start, self._now = state["start"], state["now"]
        self._fresh = False
        self._irregular = state["irregular"]

    def epoch(self, batch: int) -> int:
        length = self._known_length
        return self._epoch if length is None else batch // length

    # --- batches --------------------------------------------------------------------------------------------------
    def begin(self) -> Any:
        """Get to the next batch without drawing it. What its dataset held there, if that is not what it holds now."""
        now = self._now
        if self._iterator is None:
            with self._feed.drawing():
                self._begin()
        return now

    def next(self) -> Any:
        index_held = self._parts()[0]
        if self._left is not None and self._left != index_held.generators():
            raise UsageError(
                "between two batches something else drew from a generator that the DataLoader or its sampler has "
                "(generator=...), or iterated that DataLoader: a replacement could not repeat it. Give the DataLoader "
                "a generator of its own, and evaluate with another DataLoader"
            )
        batch = self._next()
        if self._looks < _LOOKS:
            self._looks += 1
            for held in self._parts():
                held.look_again()
        if not self._checked and self._batch == 1:
            self._check(batch)
        self._checked = True
        self._left = index_held.generators() if self._skips else None
        return batch

    def hold(self) -> Any:
        states = [held.capture() for held in self._parts()]
        return states if any(map(_is_used, states)) else None

    def put_back(self, held: Any) -> None:
        """The inverse of `hold`: where indices are drawn (a sampler), and where items are (dataset, `collate_fn`)."""
        for part, state in zip(self._parts(), held or (), strict=False):
            part.put_back(state)

    def put_back_items(self, now: State | None) -> None:
        """Give dataset and `collate_fn` what `begin` returned."""
        if now is not None:
            self._parts()[1].put_back(now)

    def _next(self) -> Any:
        for _ in range(2):
            try:
                batch = self._advance()
            except StopIteration:
                if self._offset == 0:
                    break
                self._irregular |= self._offset != self._length
                self._epoch, self._offset = self._epoch + 1, 0
                self._iterator, self._fresh = None, True
                continue
            self._batch += 1
            self._offset += 1
            self._irregular |= self._length is not None and self._offset > self._length
            return batch
        raise UsageError(
            f"the {type(self._loader).__qualname__} is empty on this rank: the dataset is smaller than one batch per "
            f"rank, or it can be read only once (epoch {self._epoch})"
        )

    def _advance(self) -> Any:
        with self._feed.drawing():
            if self._iterator is None:
                self._begin()
            if self._iterator is None:
                raise AssertionError("an epoch was begun")
            return self._draw(self._iterator, self._batch)

    def _draw(self, iterator: Iterator[Any], number: int) -> Any:
        if self._skips:
            return next(iterator)
        if not self._preserve:
            self._feed.seed_batch(number)
            return next(iterator)
        with streams_kept():
            self._feed.seed_batch(number)
            return next(iterator)

    def _begin(self) -> None:
        """An iterator whose next item is the batch at `_offset`. The global streams are as they were afterwards.

        Loader and sampler draw seeds from them when an epoch starts. These draws are made repeatable, and kept apart
        from the draws of the dataset, which a replacement in the middle of an epoch makes under the step's streams.
        """
        index_held, fetch_held = self._parts()
        now, self._now = self._now, None
        if self._fresh:
            self._start = index_held.capture()
            self._fresh = False
        else:
            index_held.put_back(self._start)
            bind_rank(self._loader, self._rank)
        for thing in [self._loader, getattr(self._loader, "dataset", None), *samplers(self._loader)]:
            if hasattr(thing, "set_epoch"):
                thing.set_epoch(self._epoch)

        def after_skip() -> None:
            if now is not None:
                fetch_held.put_back(now)

        skip = self._offset if self._skips else 0
        self._feed.begin(self._epoch, self._rank, skip, after_skip)
        with streams_kept(), _as_kept_workers_begin(self._loader, self._epoch):
            self._feed.seed_epoch()
            iterator = iter(self._loader)
        if not self._skips:
            with streams_kept():
                for number in range(self._batch - self._offset, self._batch):
                    self._draw(iterator, number)
        self._iterator = iterator

    def _check(self, batch: Any) -> None:
        """Draw the first batch again, as a replacement would. Raises UsageError if it is another one."""
        streams = capture()
        position = self._epoch, self._offset, self._batch
        iterator, self._iterator = self._iterator, None
        del iterator
        again: Any = None
        self._offset, self._batch = self._offset - 1, self._batch - 1
        try:
            again = self._advance()
        except StopIteration:
            pass
        self._epoch, self._offset, self._batch = position
        put_back(streams)
        if self._feed.loads_in_a_thread and draws_for_items(self._loader):
            raise UsageError(
                f"the data, a {type(self._loader).__qualname__}, loads items in a thread, and its dataset draws random "
                "numbers from global streams, of which the script draws at the same time: which gets which is left to "
                "chance. Load in worker processes (num_workers=1), or give the dataset a generator of its own"
            )
        if again is None or batch_digest(again) != batch_digest(batch):
            found = "nothing" if again is None else "other batches"
            raise UsageError(
                f"the data, a {type(self._loader).__qualname__}, gives {found} "
                "when it is iterated a second time with the same seeds, as a replacement has to: it reads an iterator "
                "that is used up, or draws from a generator that nothing seeds. Make what it reads anew in __iter__, "
                "seed its generators, or hand over a function: relight.Training(data=lambda number: ...)"
            )

    # --- what is kept ---------------------------------------------------------------------------------------------
    def clashes_with(self, other: "LoaderSource") -> bool:
        """True if they draw from one generator in turns, and this one, read again from its start, would draw alone."""
        if self._skips or self._has_workers:
            return False
        return any(self._parts()[0].shares_with(held) for held in other._parts())

    def _parts(self) -> tuple[Held, Held]:
        if self._index_held is None or self._fetch_held is None:
            raise AssertionError("a source is positioned first")
        return self._index_held, self._fetch_held

    def _hold(self) -> tuple[Held, Held]:
        """Keep what decides the order of data as it is at the start of an epoch, and what reading changes."""
        if not self._skips:
            return Held({"data": self._loader}), Held({})
        loader = self._loader
        parts = {"generator": loader.generator, "sampler": loader.sampler, "batches": loader.batch_sampler}
        index = Held(parts, without=(loader.dataset, loader.collate_fn))
        if self._has_workers:  # their copies of the dataset are seeded for each batch
            return index, Held({})
        fetch = Held({"dataset": loader.dataset, "collate_fn": loader.collate_fn})
        if index.shares_with(fetch) and not draws_at_once(index_sampler_of(loader)):
            self._skips = False  # one generator for both, in turns: only all of it can be repeated
            return Held({"data": self._loader}), Held({})
        return index, fetch

    @property
    def _known_length(self) -> int | None:
        return None if self._irregular else self._length


def draws_for_items(loader: Any) -> bool:
    """Return whether its dataset draws from the global streams as it gives its first item."""
    dataset = getattr(loader, "dataset", None)
    if not hasattr(dataset, "__getitem__"):
        return False
    with streams_kept():
        seed_everything(0, "look", 0, 0)
        before = mark_of(capture())
        dataset[0]  # type: ignore[index]
        return mark_of(capture()) != before


def mark_of(streams: Any) -> str:
    """Two of them are equal if the streams are."""
    return repr([streams["python"], streams["torch"].tolist(), str(streams.get("numpy"))])


def length_of(loader: Any) -> int | None:
    """Batches of an epoch, if it can tell. Raises UsageError if there is none."""
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        return None
    if length == 0:
        raise UsageError("the DataLoader is empty on this rank: the dataset is smaller than one batch per rank")
    return length


def is_skippable(loader: Any) -> bool:
    """True if its batches follow from indices, one list for each: torch's own iteration, over a map-style dataset."""
    return iterates_as_torch(loader) and not isinstance(loader.dataset, IterableDataset)


def iterates_as_torch(loader: Any) -> bool:
    """Return whether it is a DataLoader, of a class that has no iteration of its own."""
    if not isinstance(loader, DataLoader):
        return False
    return all(_definer(type(loader), name) in ("torch", "torchdata", "builtins") for name in ITERATION)


def _definer(kind: type, name: str) -> str:
    """The package of the class that defines this attribute of `kind`."""
    for each in kind.__mro__:
        if name in vars(each):
            return each.__module__.partition(".")[0]
    return ""


def refuse_what_cannot_be_read_again(loader: Any) -> None:
    """Raises UsageError for iterators, and for a loader that gives batches in the order in which they are ready."""
    for thing in samplers(loader):
        if hasattr(thing, "__next__"):
            raise UsageError(
                f"the DataLoader's sampler is an iterator, a {type(thing).__qualname__}: it can be read only once, and "
                "a replacement has to read it from the start of the epoch. Hand over a list, or an object whose "
                "__iter__ begins anew"
            )
    if getattr(loader, "num_workers", 0) > 1 and getattr(loader, "in_order", True) is False:
        raise UsageError(
            "the DataLoader gives batches in the order in which its worker processes are done (in_order=False), which "
            "nothing can repeat: leave in_order as it is, or use one worker"
        )


def samplers(loader: Any) -> list[Any]:
    """Samplers of a DataLoader: of items, of batches, and what that one draws from."""
    found = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    found.append(getattr(found[1], "sampler", None))
    return [sampler for sampler in found if sampler is not None]


@contextlib.contextmanager
def _as_kept_workers_begin(loader: Any, epoch: int) -> Iterator[None]:
    """Let workers that are kept start with the dataset of the first epoch, also in a replacement."""
    dataset: Any = getattr(loader, "dataset", None) if starts_kept_workers(loader) else None
    if not hasattr(dataset, "set_epoch"):
        yield
        return
    dataset.set_epoch(0)
    try:
        yield
    finally:
        dataset.set_epoch(epoch)


def bind_rank(loader: Any, rank: int) -> None:
    """Tell samplers (and datasets) that were built by a standby, before it knew its rank, which rank they serve."""
    for thing in [*samplers(loader), getattr(loader, "dataset", None)]:
        if isinstance(getattr(thing, "rank", None), int) and (
            hasattr(thing, "num_replicas") or hasattr(thing, "world_size")
        ):
            thing.rank = rank
        if isinstance(getattr(thing, "process_index", None), int) and hasattr(thing, "num_processes"):
            thing.process_index = rank  # accelerate's BatchSamplerShard and IterableDatasetShard


def _is_used(state: State) -> bool:
    return bool(state["generators"] or state["values"])
