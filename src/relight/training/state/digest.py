"""A short mark of a batch's values, and another of whether code has changed it."""

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash

from relight.training.torch_private.tensors import components_of, is_plain_memory, version_of
from relight.transfer.io.codec import host_copy, raw_bytes

try:
    import numpy
except ImportError:  # torch does without
    numpy = None  # type: ignore[assignment]

_MARKED_ELEMENTS = 512
_MOST_OBJECTS = 10_000  # that a batch is made of
_ARRAYS: tuple[Any, ...] = (numpy.ndarray,) if numpy else ()
_NUMBERS: tuple[Any, ...] = (numpy.generic,) if numpy else ()
_PLAIN = (bool, int, float, complex, str, type(None))


def batch_digest(batch: Any) -> int:
    """Return a digest of a batch: of the shapes and first elements of its tensors and arrays, and of plain values.

    It is enough to tell one batch from another, and cheap. Tensors may be sparse, nested, quantized, or of a subclass;
    containers may be mappings, sequences and data classes. Of other objects only tensors and arrays count: an object
    may hold what differs from process to process, its data set for example.
    """
    state = xxhash.xxh3_64()
    queue: deque[Any] = deque([batch])
    entered: dict[int, Any] = {}  # containers and objects by their `id`, kept alive so that no other one has it
    while queue and len(entered) < _MOST_OBJECTS:
        value = queue.popleft()
        if isinstance(value, torch.Tensor):
            _add_tensor(state, value)
        elif isinstance(value, _PLAIN):
            state.update(str(value).encode(errors="replace"))
        elif isinstance(value, (bytes, bytearray)):
            state.update(value)
        elif isinstance(value, _NUMBERS):
            state.update(value.tobytes() if value.dtype.kind != "O" else b"")
        elif isinstance(value, _ARRAYS) and value.dtype.kind != "O":
            state.update(f"{value.shape}{value.dtype}".encode())
            state.update(value.reshape(-1)[:_MARKED_ELEMENTS].tobytes())
        elif id(value) not in entered:
            entered[id(value)] = value
            queue.extend(_inside(value))
    return state.intdigest() or 1


def edits_of(batch: Any) -> list[tuple[Any, Any]]:
    """Return a list that is another one once code has changed a batch: in place, by other items, or by fewer.

    The same containers and objects are looked into as for a digest. Of an array, all contents count.
    """
    found: list[tuple[Any, Any]] = []
    queue: deque[Any] = deque([batch])
    entered: set[int] = set()
    while queue and len(entered) < _MOST_OBJECTS:
        value = queue.popleft()
        if isinstance(value, torch.Tensor):
            found.append((_Same(value), -1 if value.is_inference() else version_of(value)))
        elif isinstance(value, (*_PLAIN, *_NUMBERS, bytes)):
            found.append((type(value), value))
        elif isinstance(value, bytearray):
            found.append((_Same(value), bytes(value)))
        elif isinstance(value, _ARRAYS) and not value.dtype.hasobject:
            flat = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
            found.append((value.shape, xxhash.xxh3_64_intdigest(flat.data)))
        elif id(value) not in entered:
            entered.add(id(value))
            found.append((_Same(value), None))
            queue.extend(_inside(value))
    return found


def sizes_in(edits: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Return the shapes of the tensors and arrays in a batch, from what `edits_of` returned for it.

    Of other parts only their number counts.
    """
    return [mark.shape if isinstance(mark, _Same) else mark if type(mark) is tuple else None for mark, _ in edits]


class _Same:
    """An object that equals itself only, as tensors do not; kept alive, so that no other one has its `id`."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    @property
    def shape(self) -> Any:
        is_one = isinstance(self._thing, torch.Tensor) and not self._thing.is_nested
        return self._thing.shape if is_one else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._thing is self._thing

    def __hash__(self) -> int:
        return id(self._thing)


def _add_tensor(state: xxhash.xxh3_64, tensor: torch.Tensor) -> None:
    is_usual = type(tensor) is torch.Tensor and is_plain_memory(tensor)
    for part in (tensor,) if is_usual else components_of(tensor.detach()):
        state.update(f"{tuple(part.shape)}{part.dtype}".encode())
        if not part.is_meta:
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
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name, None) for field in dataclasses.fields(value))
    else:
        yield type(value).__qualname__
        found = list(getattr(value, "__dict__", {}).values())
        yield from (one for one in found if isinstance(one, (torch.Tensor, *_ARRAYS)))
