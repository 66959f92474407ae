"""Random streams. By default a pure function of (seed, step, rank), so that repeating a step repeats its draws."""

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
import xxhash

_MAY_HAVE_CUDA = torch.backends.cuda.is_built()


def seed_everything(seed: int, purpose: str, number: int, rank: int) -> None:
    """Seed Python's, torch's and (if the script imported it) NumPy's global generators."""
    value = xxhash.xxh3_64_intdigest(f"{seed}/{purpose}/{number}/{rank}".encode())
    random.seed(value)
    # Not torch.manual_seed: it formats a stack trace for CUDA's lazy start, a hundred times the cost of the seeding.
    torch.default_generator.manual_seed(value & (2**63 - 1))
    if _MAY_HAVE_CUDA and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value & (2**63 - 1))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)


def capture() -> dict[str, Any]:
    """The state of the global generators, as a tree."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def put_back(state: dict[str, Any]) -> None:
    """The inverse of `capture`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])


@contextlib.contextmanager
def streams_kept() -> Iterator[None]:
    """Whatever is drawn inside does not count."""
    state = capture()
    try:
        yield
    finally:
        put_back(state)
