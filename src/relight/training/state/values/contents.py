"""Digests of all that a value holds: a later look sees whether it changed, and no copy of it is kept.

They are compared within one process: objects of other kinds count by their `id`.
"""

import enum
import io
import itertools
import pickle  # noqa: TID251 - it only writes
import sys
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from relight.training.state.values.cells import cells_state
from relight.training.state.values.generators import generator_state, stream_state
from relight.training.state.values.iterators import has_position, position_of
from relight.training.state.values.kinds import PLAIN, STREAMS, attributes_of, items_of, kind_of, members_in
from relight.training.state.values.marks import Mark, gradient_of
from relight.training.torch_private.tensors import components_of, version_of
from relight.transfer.io.codec import host_copy, local_part, raw_bytes

_MOST_BYTES = 2**31  # digested in one look: a fifth of a second
_MOST_VALUES = 2**16  # looked at one by one in one look: about as long
_CHUNK = 1024  # members of a container that are digested at once, if all of them are plain
_PLAIN_BYTES = 512  # of plain values take about as long as one value of another kind
_MAPS = Path("/proc/self/maps")
_IN_MEMORY = ("/dev/shm/", "/dev/zero", "/memfd:", "/SYSV", "[")  # names of mappings that are no files
_LONG_TEXT = 1024  # characters
_WEAK: Any = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_CHECKED = 2**22  # bytes of an array from which on it matters whether it is a file


def is_container(value: Any) -> bool:
    """Return whether it has members or memory that are digested, though of a class of a library's, or derived."""
    return isinstance(value, (dict, list, set, deque, bytearray, array, *STREAMS, *_WEAK)) or _is_array(value)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


@dataclass
class Room:
    """The number of bytes and values that may be digested yet."""

    nbytes: int = _MOST_BYTES
    values: int = _MOST_VALUES


class Digests:
    """Digests values within one room. What does not fit is known by its `id`, length, and version alone."""

    def __init__(self, is_kept_otherwise: Callable[[Any], bool]) -> None:
        """`is_kept_otherwise`: of a value of which it only matters that it is this one."""
        self._is_kept_otherwise = is_kept_otherwise
        self._room = Room()
        self._files = Files()
        self.is_full = False  # something did not fit

    def of(self, value: Any) -> int:
        """Return a digest of the value, and of all that can be reached from it."""
        found = _Digest(self._is_kept_otherwise, self._room, self._files)
        number = found.of(value)
        self.is_full |= found.is_full
        return number

    def mark(self, value: Any) -> Mark:
        """Return a mark by which a change of the value is seen; it cannot be put back."""
        room = Room(self._room.nbytes, self._room.values)

        def again(value: Any) -> int:
            return _Digest(self._is_kept_otherwise, Room(room.nbytes, room.values), self._files).of(value)

        return Mark("digest", value, (self.of(value), again))


class Files:
    """Memory of this process that is a file: state in files is not looked at, and to read it may take minutes."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] | None = None

    def have(self, address: int) -> bool:
        """Return whether this address lies in a file that is mapped. False where that cannot be known."""
        if self._ranges is None:
            self._ranges = list(_mapped_files())
        return any(start <= address < end for start, end in self._ranges)


def _mapped_files() -> Iterator[tuple[int, int]]:
    try:
        lines = _MAPS.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and not fields[5].startswith(_IN_MEMORY):
            start, end = (int(text, 16) for text in fields[0].split("-"))
            yield start, end


class _Full(Exception):
    """There is no room for more."""


class _Plain(pickle.Pickler):
    """Writes numbers, texts, and built-in containers of these. Raises ValueError for a value of another kind."""

    def __init__(self, file: "_Digest") -> None:
        super().__init__(file, 5)
        self.fast = True  # without references, which depend on more than values

    def reducer_override(self, value: Any) -> Any:
        raise ValueError(type(value))


class _Digest:
    """One digest: values are looked at in an order that is the same as long as nothing changes."""

    def __init__(self, is_kept_otherwise: Callable[[Any], bool], room: Room, files: Files) -> None:
        self._is_kept_otherwise = is_kept_otherwise
        self._room = room
        self._files = files
        self._state = xxhash.xxh3_64()
        self._seen: dict[int, int] = {}  # order in which values were met, by `id`
        self._ahead: deque[Any] = deque()
        self.is_full = False

    def of(self, value: Any) -> int:
        self._ahead.append(value)
        try:
            while self._ahead:
                self._look(self._ahead.popleft())
        except _Full:
            self.is_full = True
        return self._state.intdigest()

    def write(self, written: bytes) -> int:
        """Add plain values that were written down."""
        self._state.update(written)
        self._room.values -= len(written) // _PLAIN_BYTES
        if self._room.values <= 0:
            raise _Full
        return len(written)

    def _add(self, *words: Any) -> None:
        self._state.update(repr(words).encode(errors="backslashreplace"))

    def _add_plain(self, value: Any) -> None:
        """Add a number or a text, a long one by its hash, which Python keeps: a text may be all of the data."""
        is_long = isinstance(value, (str, bytes)) and len(value) > _LONG_TEXT
        self._add(*(("text", len(value), hash(value)) if is_long else (value,)))

    def _look(self, value: Any) -> None:
        self._room.values -= 1
        if self._room.values < 0:
            raise _Full
        if type(value) in PLAIN:
            self._add_plain(value)
            return
        if (number := self._seen.get(id(value))) is not None:
            self._add("seen", number)
            return
        kind = kind_of(value)
        if kind == "number":
            self._add(type(value).__name__, value)
            return
        if isinstance(value, enum.Enum):  # one object each, whatever it shows itself as
            self._add(id(value))
            return
        if kind == "plain":
            self._add(value)
            return
        self._seen[id(value)] = len(self._seen)
        self._add(kind, id(value))
        if self._is_kept_otherwise(value):
            return
        if isinstance(value, torch.Tensor):
            self._look_into_tensor(value)
        elif kind == "array":
            self._look_into_array(value)
        elif kind == "bytearray":
            self._look_into_buffer(memoryview(value))
        elif kind in ("list", "tuple", "deque", "set", "objects"):
            self._look_into_all(members_in(kind, value))
        elif kind == "dict":
            self._look_into_all(itertools.chain.from_iterable(items_of(value)))
        elif kind == "opaque":
            self._look_into_opaque(value)
        else:
            self._look_into_state(kind, value)

    def _look_into_state(self, kind: str, value: Any) -> None:
        if kind == "object":
            own = attributes_of(value)
            self._add(*own)
            self._ahead.extend(own.values())
        elif kind == "generator":
            state = generator_state(value)
            self._add(state.tolist() if isinstance(state, torch.Tensor) else state)
        elif kind == "stream":
            self._add(stream_state(value))
        elif kind == "cells":
            self._add(cells_state(value))

    def _look_into_opaque(self, value: Any) -> None:
        """Containers have members, of whatever class; buffers, memory; iterators, a position; others are themselves."""
        if isinstance(value, (bytearray, array)):
            self._look_into_buffer(memoryview(value))
        elif isinstance(value, io.BytesIO) and not value.closed:
            self._look_into_buffer(io.BytesIO.getbuffer(value))
            self._add(io.BytesIO.tell(value))
        elif isinstance(value, io.StringIO) and not value.closed:
            self._add_plain(io.StringIO.getvalue(value))
            self._add(io.StringIO.tell(value))
        elif _is_array(value):
            numpy = sys.modules["numpy"]
            self._look_into_array(numpy.ndarray.view(value, numpy.ndarray))
        if is_container(value):
            self._ahead.extend(getattr(value, "__dict__", {}).values())
        table = value.data if isinstance(value, _WEAK) else value
        if isinstance(table, dict):
            self._look_into_all(itertools.chain.from_iterable(dict.items(table)))
        elif isinstance(table, (list, set, deque)):
            self._look_into_all(iter(table))
        elif has_position(value):
            self._look_into_all(position_of(value))

    def _look_into_array(self, held: Any) -> None:
        if self._has_room(held.nbytes, lambda: int(held.ctypes.data)):
            is_read_in_place = held.flags.c_contiguous and held.ndim and not held.dtype.hasobject
            self._state.update(held.view("u1") if is_read_in_place else held.tobytes())

    def _look_into_buffer(self, buffer: memoryview) -> None:
        if self._has_room(buffer.nbytes, lambda: 0):
            self._state.update(buffer)

    def _look_into_all(self, members: Iterable[Any]) -> None:
        count, iterator = 0, iter(members)
        while chunk := list(itertools.islice(iterator, _CHUNK)):
            count += len(chunk)
            try:
                _Plain(self).dump(chunk)
            except (ValueError, RecursionError):  # of another kind, or deep
                self._ahead.extend(chunk)
        self._add("members", count)

    def _look_into_tensor(self, tensor: torch.Tensor) -> None:
        gradient = gradient_of(tensor)
        if gradient is not None:
            self._ahead.append(gradient)
        for part in [local_part(tensor)] if kind_of(tensor) == "tensor" else components_of(tensor.detach()):
            if part.is_meta or part.device.type != "cpu" or not self._look_into_bytes(part):
                self._add(-1 if part.is_inference() else version_of(part))

    def _look_into_bytes(self, tensor: torch.Tensor) -> bool:
        """Add the elements of a tensor in host memory. False: they do not fit, or are a file."""
        for dim, step in enumerate(tensor.stride()):
            if step == 0 and tensor.shape[dim] > 1:  # of an expanded tensor: these elements are one
                tensor = tensor.narrow(dim, 0, 1)
        if not self._has_room(tensor.nbytes, tensor.data_ptr):
            return False
        held = host_copy(tensor)
        self._state.update(raw_bytes(held))
        return True

    def _has_room(self, nbytes: int, address: Callable[[], int]) -> bool:
        """Return whether these bytes are to be digested."""
        if nbytes > self._room.nbytes:
            self.is_full = True
            return False
        if nbytes >= _CHECKED and self._files.have(address()):
            return False
        self._room.nbytes -= nbytes
        return True
