"""A short mark of a batch's values."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from relight.training.torch_private.tensors import components_of
from relight.transfer.io.codec import host_copy, raw_bytes

try:
    import numpy
except ImportError:  # torch does without
    numpy = None  # type: ignore[assignment]

_MARKED_ELEMENTS = 512
_MOST_OBJECTS = 10_000  # that a batch is made of
_ARRAYS: Any = (numpy.ndarray,) if numpy else ()
_NUMBERS: Any = (numpy.generic,) if numpy else ()
_PLAIN = (bool, int, float, complex, str, type(None))


def batch_digest(batch: Any) -> int:
    """Return a digest of a batch: of the shapes and first elements of its tensors and arrays, and of plain values.

    It is enough to tell one batch from another, and cheap. Tensors may be sparse, nested, quantized, or of a subclass;
    containers may be dicts and sequences of any class, or objects with attributes.
    """
    state = xxhash.xxh3_64()
    entered: list[Any] = []  # kept, since they are told apart by their ids
    queue: deque[Any] = deque([batch])
    seen: set[int] = set()
    while queue and len(seen) < _MOST_OBJECTS:
        value = queue.popleft()
        if isinstance(value, _PLAIN):
            state.update(repr(value).encode(errors="replace"))
        elif isinstance(value, (bytes, bytearray)):
            state.update(value)
        elif isinstance(value, torch.Tensor):
            _add_tensor(state, value)
        elif isinstance(value, _NUMBERS):
            state.update(value.tobytes() if value.dtype.kind != "O" else b"")
        elif isinstance(value, _ARRAYS) and value.dtype.kind != "O":
            state.update(f"{value.shape}{value.dtype}".encode())
            state.update(value.reshape(-1)[:_MARKED_ELEMENTS].tobytes())
        elif id(value) not in seen:
            seen.add(id(value))
            entered.append(value)
            queue.extend(_inside(value))
    return state.intdigest() or 1


def _add_tensor(state: xxhash.xxh3_64, tensor: torch.Tensor) -> None:
    for part in components_of(tensor.detach()):
        state.update(f"{tuple(part.shape)}{part.dtype}".encode())
        if part.device.type != "meta":
            first = host_copy(part.reshape(-1)[:_MARKED_ELEMENTS])
            state.update(raw_bytes(first))


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key in value:
            yield key
            yield value[key]
    elif isinstance(value, (list, tuple, deque)):
        yield from value
    elif isinstance(value, _ARRAYS):
        yield from value.ravel()
    else:
        yield type(value).__qualname__
        if not isinstance(value, type) and not callable(value):
            yield from (each for key, each in sorted(getattr(value, "__dict__", {}).items()) if isinstance(key, str))
