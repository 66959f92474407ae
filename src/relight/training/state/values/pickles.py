"""Digests of objects whose class is a library's, by what pickle makes of them: such an object has changed, or not."""

import hashlib
import io
import pickle  # noqa: TID251 (nothing is unpickled)
import types
import weakref
from threading import Lock, RLock, Thread
from typing import Any

from torch import nn

_MOST_BYTES = 64 * 2**20
# Known by their identity alone: what has no contents, cannot be written down, or is kept otherwise.
_BY_IDENTITY = (
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.GeneratorType,
    types.FrameType,
    type,
    type(Lock()),
    type(RLock()),
    Thread,
    io.IOBase,
    weakref.ref,
    nn.Module,
)


class _Full(Exception):
    """There is more than is looked at."""


class _Hash:
    """Takes what pickle writes."""

    def __init__(self) -> None:
        self._left = _MOST_BYTES
        self.digest = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._left -= view.nbytes
        if self._left < 0:
            raise _Full
        self.digest.update(view)
        return view.nbytes


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> str | None:
        return str(id(value)) if isinstance(value, _BY_IDENTITY) else None


def pickled_digest(value: Any) -> bytes | None:
    """Return a digest of the object, to be compared within this process. None: it cannot be pickled, or is large."""
    into = _Hash()
    try:
        _Pickler(into, protocol=4).dump(value)
    except Exception:  # of a library's own methods, too
        return None
    return into.digest.digest()
