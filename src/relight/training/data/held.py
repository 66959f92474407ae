"""State of the data's own objects: the generators that they hold, and plain values that change while data is read."""

import array
import random
from typing import Any

import torch
import xxhash

from relight.training.data.reach import ABSENT, GENERATORS, Generator, Reach, is_small, numpy
from relight.training.state.value_images import Objects, can_change, copied, same_values
from relight.training.state.values.generators import generator_state, set_generator_state

State = dict[str, Any]


class Held:
    """Generators and plain values of some objects, to be kept and put back. Values count once they have changed."""

    def __init__(self, roots: dict[str, Any], without: tuple[Any, ...] = ()) -> None:
        """`without`: objects that are not entered."""
        self._roots = roots
        self._without = without
        self._reach = Reach(roots, without)
        self._first = {path: copied(place.get(), {}) for path, place in self._reach.values.items()}
        self._births = {path: state_of(generator) for path, generator in self._reach.generators.items()}
        self._objects = Objects()
        self._late: set[str] = set()  # generators that were made since

    def look_again(self) -> None:
        """Find what came to be since: a generator made when the first item was read, say."""
        if not self._roots:
            return
        self._reach = Reach(self._roots, self._without)
        self._late |= self._reach.generators.keys() - self._births.keys()
        for path in self._reach.values:
            self._first.setdefault(path, ABSENT)

    def take_numbers(self) -> None:
        """Numbers were set to those of the rank that this process has taken: it counts from these."""
        for path, place in self._reach.values.items():
            if isinstance(value := place.get(), (bool, int, float)) and path in self._first:
                self._first[path] = value

    def shares_with(self, other: "Held") -> bool:
        """Return whether some generator is reached from both."""
        own = {id(generator) for generator in self._reach.generators.values()}
        return any(id(generator) in own for generator in other._reach.generators.values())

    def first(self) -> State:
        """The value when this object was made."""
        return {"generators": dict(self._births), "values": {}}

    def capture(self) -> State:
        """As it is now, as a tree."""
        first = self._first
        found = {path: place.get() for path, place in self._reach.values.items()}
        changed = {path: value for path, value in found.items() if not same_values(value, first[path])}
        values = {path: copied(value, {}) for path, value in changed.items() if is_small(value)}
        gone = [path for path, value in changed.items() if value is ABSENT]
        grown = [path for path in changed.keys() - values.keys() if path not in gone]  # caches: left as they are
        objects = {path: self._objects.number(changed[path]) for path in values if can_change(changed[path])}
        more = {"gone": gone, "grown": grown, "objects": objects and [self._objects.home, objects]}
        return {"generators": self.generators(), "values": values, **{name: one for name, one in more.items() if one}}

    def generators(self) -> State:
        """The states of the generators as they are now."""
        self._reach.follow_generators()
        return {path: state_of(generator) for path, generator in self._reach.generators.items()}

    def put_back(self, state: State) -> None:
        """The inverse of `capture`, also in another process that has made the same objects."""
        reach, values = self._reach, state["values"]
        reach.follow_generators()
        for path in self._late - state["generators"].keys():
            reach.generators.pop(path, None)
            if (place := reach.place(path)) is not None:
                place.set(None if path in self._first else ABSENT)
        places = {**{path: reach.place(path) for path in values}, **reach.values}
        for path in state.get("grown", ()):
            places.pop(path, None)
        values = {**values, **dict.fromkeys(state.get("gone", ()), ABSENT)}
        as_they_were = self._objects.filled(values, *state.get("objects", ("", {})))
        for path, place in places.items():
            value = values.get(path, self._first.get(path, ABSENT))
            if place is None:
                continue
            if path in as_they_were:
                place.set(as_they_were[path])
            elif not same_values(value, place.get()):
                place.set(copied(value, {}))
        for path, kept in state["generators"].items():
            generator = reach.generators.get(path)
            if generator is None and (place := reach.place(path)) is not None:  # this process has not made it yet,
                found = place.get()  # or another owner of the same object did
                generator = reach.generators[path] = found if isinstance(found, GENERATORS) else _make(kept)
                place.set(generator)
            if generator is not None:
                set_state(generator, kept)


def state_of(generator: Generator) -> tuple[str, Any]:
    """The kind of a generator, and its state as a tree of plain values."""
    if isinstance(generator, torch.Generator):
        return "torch", generator.get_state().numpy().tobytes()
    if _is_numpy(generator, "Generator"):
        return "numpy", _without_arrays(generator_state(generator))
    if _is_numpy(generator, "SeedSequence"):
        return "numpy seeds", _without_arrays(generator_state(generator))
    if _is_numpy(generator, "RandomState"):
        return "numpy legacy", _without_arrays(generator.get_state(legacy=False))
    version, words, gauss = generator.getstate()
    return "python", (version, array.array("Q", words).tobytes(), gauss)


def set_state(generator: Generator, kept: tuple[str, Any]) -> None:
    """The inverse of `state_of`."""
    state = kept[1]
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif _is_numpy(generator, "Generator") or _is_numpy(generator, "SeedSequence"):
        set_generator_state(generator, state)
    elif _is_numpy(generator, "RandomState"):
        generator.set_state(state)
    else:
        words = array.array("Q")
        words.frombytes(state[1])
        generator.setstate((state[0], tuple(words), state[2]))


def reseed(generators: dict[str, Generator], seed: int) -> None:
    """Seed each generator from `seed` and the path where it is kept."""
    for path, generator in generators.items():
        value = xxhash.xxh3_64_intdigest(f"{seed}/{path}".encode())
        if isinstance(generator, torch.Generator):
            generator.manual_seed(value & (2**63 - 1))
        elif _is_numpy(generator, "Generator"):
            set_generator_state(generator, generator_state(type(generator.bit_generator)(value)))
        elif _is_numpy(generator, "SeedSequence"):
            set_generator_state(generator, generator_state(numpy.random.SeedSequence(value)))
        elif _is_numpy(generator, "RandomState"):
            generator.seed(value & 0xFFFFFFFF)
        else:
            generator.seed(value)


def _is_numpy(generator: Generator, name: str) -> bool:
    return bool(numpy) and isinstance(generator, getattr(numpy.random, name))


def _without_arrays(state: Any) -> Any:
    """Return the state of a NumPy generator with lists for arrays, so that two states can be compared."""
    if isinstance(state, dict):
        return {name: _without_arrays(one) for name, one in state.items()}
    return state.tolist() if isinstance(state, numpy.ndarray) else state


def _make(kept: tuple[str, Any]) -> Generator:
    kind, state = kept
    if kind == "torch":
        return torch.Generator()
    if kind == "numpy":
        return numpy.random.Generator(getattr(numpy.random, state["bit_generator"])())
    if kind == "numpy seeds":
        return numpy.random.SeedSequence()
    return numpy.random.RandomState() if kind == "numpy legacy" else random.Random()
