"""The position of a rank in its data, and the way of a replacement to the same place.

What can be iterated again (a DataLoader, a class made of it, an object of the script's own) is iterated: see `loaders`.
An object with `state_dict` carries its own position, which is rank-private state. A function of the batch's number
needs no position at all.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader

from relight.errors import UsageError
from relight.training.data.feed import Feed
from relight.training.data.held import Held
from relight.training.data.loaders import (
    LoaderSource,
    bind_rank,
    iterates_as_torch,
    refuse_what_cannot_be_read_again,
    samplers,
)
from relight.training.data.rng import capture, put_back, streams_kept
from relight.training.state.digest import batch_digest
from relight.training.state.handed.handed import Stateful
from relight.training.torch_private.script_modes import sees_calls

_HANDED_OVER = (
    "hand over a DataLoader, an object whose __iter__ begins anew each time, an object with state_dict() and "
    "load_state_dict(), a sequence of batches, a dict, tuple or list of DataLoaders, or a function from the batch's "
    "number to the batch, so that a replacement can find its place"
)


class DataSource(Protocol):
    """One rank's batches, in order."""

    def position(self, batch: int, rank: int) -> None:
        """Make `batch` (counted from the start of training) the next one."""

    def next(self) -> Any:
        """The next batch."""

    def state(self) -> Any:
        """Rank-private position, or None if the batch number says it all."""

    def restore(self, state: Any) -> None:
        """The inverse of `state`, after `position`."""

    def hold(self) -> Any:
        """Its generators and values after a batch was drawn; None if it has none."""

    def put_back(self, held: Any) -> None:
        """The inverse of `hold`, in this process: the step that used that batch is repeated."""

    def epoch(self, batch: int) -> int:
        """The epoch that `batch` lies in."""


def make_source(data: Any, seed: int, *, preserve: bool = False, name: str = "") -> DataSource:
    """Choose how to position `data`. Raises UsageError for what cannot be positioned.

    `preserve`: the script's own random streams run on from step to step. `name` tells several sources apart.
    """
    if data is None:
        return NoSource()
    if isinstance(data, (dict, list, tuple)) and _are_loaders(data):
        return CombinedSource(data, seed, preserve=preserve, name=name)
    if isinstance(data, Stateful) and not _is_numbered(data):
        return StatefulSource(data, seed, name)
    if isinstance(data, DataLoader):
        return LoaderSource(data, seed, preserve=preserve, name=name)
    if callable(data):
        return FunctionSource(data)
    if hasattr(data, "__next__"):
        raise UsageError(
            f"relight.Training(data=...) got an iterator, a {type(data).__qualname__}, which can be read only once: a "
            "replacement could not find its place in it. Instead of iter(loader) hand over the loader, instead of "
            f"zip(loader, other) a tuple, data=(loader, other); or else {_HANDED_OVER}"
        )
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, dict):
        return FunctionSource(lambda step: data[step % len(data)])
    if hasattr(data, "__iter__") and not isinstance(data, (set, frozenset, dict, str, bytes)):
        return LoaderSource(data, seed, preserve=preserve, name=name)
    raise UsageError(f"relight.Training(data=...) got a {type(data).__qualname__}: {_HANDED_OVER}")


class NoSource:
    """The script fetches its own data from the step's number."""

    def position(self, batch: int, rank: int) -> None:
        pass

    def next(self) -> Any:
        return None

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        raise AssertionError(f"no data has no state, got {state!r}")

    def hold(self) -> Any:
        return None

    def put_back(self, held: Any) -> None:
        pass

    def epoch(self, batch: int) -> int:  # noqa: ARG002
        return 0


class FunctionSource:
    """Batches are a function of their number, and of generators that the function reaches."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        self._function = function
        self._batch = 0
        self._held: Held | None = None
        self._checked = False

    def position(self, batch: int, rank: int) -> None:  # noqa: ARG002
        self._batch = batch
        if self._held is None:
            self._held = Held({"function": self._function})
        else:
            self._held.put_back(self._held.first())

    def next(self) -> Any:
        if self._held is None:
            self._held = Held({"function": self._function})
        number, self._batch = self._batch, self._batch + 1
        if self._checked or sees_calls():  # a mode of the script would see two calls
            return self._function(number)
        self._checked = True
        streams, before = capture(), self._held.capture()
        batch = self._function(number)
        mark = batch_digest(batch)
        put_back(streams)
        self._held.look_again()
        self._held.put_back(before)
        if batch_digest(again := self._function(number)) != mark:
            raise UsageError(
                "relight.Training(data=FUNCTION): called twice with the same number, the function returns two batches: "
                "it reads on in something (an iterator, a file), or draws random numbers that nothing seeds. Make the "
                "batch from its number alone, or hand over what it reads from: a DataLoader, or an object whose "
                "__iter__ begins anew"
            )
        return again

    def state(self) -> Any:
        if self._held is None:
            return None
        found = self._held.capture()
        return found if found["generators"] or found["values"] else None

    def restore(self, state: Any) -> None:
        if self._held is None:
            raise AssertionError("a source is positioned first")
        self._held.put_back(state)

    def hold(self) -> Any:
        return self.state()

    def put_back(self, held: Any) -> None:
        if held is not None:
            self.restore(held)

    def epoch(self, batch: int) -> int:  # noqa: ARG002
        return 0


class StatefulSource:
    """A loader that carries its own position."""

    def __init__(self, loader: Any, seed: int, name: str = "") -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._rank = 0
        self._feed = Feed(seed, name, is_restored=True)
        refuse_what_cannot_be_read_again(loader)

    def position(self, batch: int, rank: int) -> None:
        self._rank = rank
        bind_rank(self._loader, rank)
        if batch == 0:
            self._iterator = None

    def next(self) -> Any:
        with self._feed.drawing():
            if self._iterator is None:
                self._iterator = self._start()
            try:
                return next(self._iterator)
            except StopIteration:
                self._epoch += 1
                self._iterator = self._start()
                return next(self._iterator)

    def _start(self) -> Iterator[Any]:
        self._feed.begin(self._epoch, self._rank, 0, lambda: None)
        with streams_kept():
            self._feed.seed_epoch()
            return iter(self._loader)

    def state(self) -> Any:
        if self._iterator is not None:
            return {"loader": self._loader.state_dict(), "epoch": self._epoch}
        self._feed.begin(self._epoch, self._rank, 0, lambda: None)
        with self._feed.drawing(), streams_kept():  # torchdata makes its iterator to tell its state
            self._feed.seed_epoch()
            return {"loader": self._loader.state_dict(), "epoch": self._epoch}

    def restore(self, state: Any) -> None:
        self._loader.load_state_dict(state["loader"])
        self._epoch = state["epoch"]
        self._iterator = None

    def hold(self) -> Any:
        return None

    def put_back(self, held: Any) -> None:
        pass

    def epoch(self, batch: int) -> int:  # noqa: ARG002
        return self._epoch


class CombinedSource:
    """A batch of each of several loaders in a step, in a dict, list or tuple like theirs. Each has its own epochs."""

    def __init__(self, data: Any, seed: int, *, preserve: bool, name: str) -> None:
        self._kind = type(data) if type(data) in (dict, list) else tuple
        pairs = data.items() if isinstance(data, dict) else enumerate(data)
        self._parts = {key: make_source(loader, seed, preserve=preserve, name=f"{name}/{key}") for key, loader in pairs}

    def position(self, batch: int, rank: int) -> None:
        for part in self._parts.values():
            part.position(batch, rank)
        loaders = self._loaders()
        if any(one.clashes_with(other) for one in loaders for other in loaders if other is not one):
            raise UsageError(
                "the loaders in relight.Training(data=...) draw random numbers from one generator in turns (of a "
                "dataset or a collate_fn that they share), and one of them can only be read again from the start of "
                "its epoch, alone, where it would draw others: give each loader a dataset with a generator of its own"
            )

    def next(self) -> Any:
        # All get into their epochs before the first draws: what they share is then put back once, and not again
        # between the draws of two.
        for loader, now in [(loader, loader.begin()) for loader in self._loaders()]:
            loader.put_back_items(now)
        batches = {key: part.next() for key, part in self._parts.items()}
        return batches if self._kind is dict else self._kind(batches.values())

    def take_numbers(self) -> None:
        """Values of datasets and samplers were set to those of the rank."""
        for loader in self._loaders():
            loader.take_numbers()

    def state(self) -> Any:
        states = {key: part.state() for key, part in self._parts.items()}
        return states if any(state is not None for state in states.values()) else None

    def restore(self, state: Any) -> None:
        for key, part in self._parts.items():
            if state[key] is not None:
                part.restore(state[key])

    def hold(self) -> Any:
        return {key: part.hold() for key, part in self._parts.items()}

    def put_back(self, held: Any) -> None:
        for key, part in self._parts.items():
            part.put_back(held[key])

    def epoch(self, batch: int) -> int:
        """The length of the first loader."""
        return next(iter(self._parts.values())).epoch(batch)

    def _loaders(self) -> list[LoaderSource]:
        return [part for part in self._parts.values() if isinstance(part, LoaderSource)]


def _are_loaders(data: Any) -> bool:
    loaders = list(data.values()) if isinstance(data, dict) else list(data)
    return bool(loaders) and all(isinstance(loader, DataLoader) for loader in loaders)


def _is_numbered(data: Any) -> bool:
    """True if torchdata's loader has no state but the number of the batch, of which its workers' streams follow too."""
    if not iterates_as_torch(data) or not type(data).__module__.startswith("torchdata"):
        return False
    own = [each for each in samplers(data) if type(each).__module__.partition(".")[0] not in ("torch", "torchdata")]
    return not any(hasattr(each, "state_dict") for each in (data.dataset, data.collate_fn, *own))
