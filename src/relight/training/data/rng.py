"""Random streams. By default a pure function of (seed, step, rank), so that repeating a step repeats its draws."""

import array
import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from relight.device.choose import accelerator

_python: Any = getattr(random.seed, "__self__")  # noqa: B009 # the generator behind Python's functions
_seed_of_c = super(random.Random, _python).seed


def _seed_python(number: int) -> None:
    """As `random.seed`, in two thirds of its time: of an integer that makes nothing but this."""
    _seed_of_c(number)
    _python.gauss_next = None


def seed_everything(seed: int, purpose: str, number: int, rank: int) -> None:
    """Seed Python's, torch's and (if the script imported it) NumPy's global generators."""
    value = xxhash.xxh3_64_intdigest(f"{seed}/{purpose}/{number}/{rank}".encode())
    _seed_python(value)
    # Not torch.manual_seed: it formats a stack trace for a device's lazy start, a hundred times the seeding's cost.
    torch.default_generator.manual_seed(value & (2**63 - 1))
    accelerator().seed(value & (2**63 - 1))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)


def capture() -> dict[str, Any]:
    """The state of the global generators, as a tree."""
    version, words, gauss = random.getstate()  # 625 numbers, written down in each step if the streams run on
    state: dict[str, Any] = {
        "python": (version, array.array("Q", words).tobytes(), gauss),
        "torch": torch.get_rng_state(),
    }
    if (of_device := accelerator().random_state()) is not None:
        state["device"] = of_device
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def put_back(state: dict[str, Any]) -> None:
    """The inverse of `capture`."""
    version, packed, gauss = state["python"]
    words = array.array("Q")
    words.frombytes(packed)
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if "device" in state:
        accelerator().set_random_state(state["device"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])


def number() -> int:
    """Return a number that stands for the state of the global generators, in this process alone."""
    of_device = accelerator().random_state()
    numpy = sys.modules.get("numpy")
    parts: list[Any] = [random.getstate(), torch.get_rng_state().numpy().tobytes()]
    if of_device is not None:
        parts.append(of_device.cpu().numpy().tobytes())
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        parts += [name, keys.tobytes(), *rest]
    return hash(tuple(parts))


@contextlib.contextmanager
def streams_kept() -> Iterator[None]:
    """Whatever is drawn inside does not count."""
    state = capture()
    try:
        yield
    finally:
        put_back(state)
