"""Fingerprints of objects that can be neither put back nor written down: they show that such an object has changed.

Such are objects of C and of libraries whose state nothing sets, open files and databases, and the results that a cached
function keeps. Fingerprints of one object are compared within one process.
"""

import contextlib
import functools
import gc
import io
import queue
import socket
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from relight.training.state.values.contents import Digests
from relight.training.state.values.kinds import kind_of
from relight.training.state.values.pickles import pickled_digest

CACHED = type(functools.lru_cache(len))
_QUEUES = (queue.Queue, queue.LifoQueue, queue.PriorityQueue)
_STACKS = (contextlib.ExitStack, contextlib.AsyncExitStack)
_PACKER, _UNPACKER = type(zlib.compressobj()), type(zlib.decompressobj())
_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedRandom, io.FileIO)
_SEEN: frozenset[type] = frozenset({CACHED, *_QUEUES, queue.SimpleQueue, *_STACKS, _PACKER, _UNPACKER, *_FILES})
_HASHES = ("_hashlib", "_md5", "_sha1", "_sha2", "_sha256", "_sha512", "_sha3", "_blake2", "hmac", "xxhash")
_BLIND = ("_bz2", "_lzma")  # their objects show nothing
_SHAKE_BYTES = 32  # of a digest whose length one chooses


def has_fingerprint(value: Any) -> bool:
    """Return whether this is an object that `fingerprint_of` is for."""
    kind = type(value)
    return kind in _SEEN or kind.__module__ in (*_HASHES, *_BLIND) or is_database(value) or _is_answering(value)


def is_database(value: Any) -> bool:
    """Return whether it is a connection to an SQLite database."""
    sqlite = sys.modules.get("sqlite3")
    return sqlite is not None and isinstance(value, sqlite.Connection)


def _is_answering(value: Any) -> bool:
    """Return whether it is another program, whose output is read, or a socket that is connected."""
    if type(value) is socket.socket:
        return value.fileno() >= 0 and _has_peer(value)
    program = sys.modules.get("subprocess")
    return (
        program is not None and type(value) is program.Popen and value.stdout is not None and value.returncode is None
    )


def _has_peer(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def fingerprint_of(value: Any, digests: Digests) -> Any:
    """Return what changes with the object, to be compared by `differs`. None: nothing that matters can."""
    kind = type(value)
    if not has_fingerprint(value):
        return pickled_digest(value)
    if kind is CACHED:
        return {id(key): (id(one), digests.of(one)) for key, one in results_in(value) if not _is_plain(one)}
    if kind in _QUEUES:
        return digests.of(value.queue)
    if kind is queue.SimpleQueue:
        return _Blind() if value.qsize() else 0
    if kind in _STACKS:
        callbacks = vars(value)["_exit_callbacks"]
        return digests.of(callbacks) if callbacks else None  # one that was closed has nothing that goes on
    if kind is _PACKER:
        return _flushed(value)
    if kind in _FILES:
        return _position_of(value)
    if kind is _UNPACKER or kind.__module__ in _BLIND or _is_answering(value):
        return _Blind()
    if is_database(value):
        return _changes_of(value)
    return _digest_of(value) if hasattr(kind, "digest") else None


def differs(before: Any, now: Any) -> bool:
    """Return whether an object has changed between two fingerprints; of a cache, whether an older result has."""
    if isinstance(before, dict) and isinstance(now, dict):
        return any(now[key][0] == one[0] and now[key] != one for key, one in before.items() if key in now)
    return now is not None and bool(before != now)


class _Blind:
    """A fingerprint that tells nothing: it differs from every other."""


def results_in(cached: Any) -> Iterator[tuple[Any, Any]]:
    """The results that a cached function has now, with their keys."""
    parts = gc.get_referents(cached)
    table = next((one for one in parts if type(one) is dict and one is not vars(cached)), {})
    if cached.cache_info().maxsize is None:
        yield from list(table.items())
        return
    link = type(next(iter(table.values()), None))
    for number in range(2, len(parts)):
        if parts[number] is link:  # of each: its key, its result, its class
            yield parts[number - 2], parts[number - 1]


def _is_plain(value: Any) -> bool:
    return kind_of(value) in ("plain", "number") or isinstance(value, (type, *_FUNCTIONS))


_FUNCTIONS: tuple[type, ...] = (type(lambda: None), type(len))


def _flushed(packer: Any) -> Any:
    """Bytes that it would give if it ended here."""
    try:
        return packer.copy().flush()
    except (ValueError, zlib.error):
        return "ended"


def _digest_of(value: Any) -> Any:
    try:
        return value.digest()
    except TypeError:
        return value.digest(_SHAKE_BYTES)


def _position_of(file: Any) -> Any:
    """The place up to which a file has been read. None: it is closed, or none that is read."""
    try:
        if file.closed or not file.readable() or not file.seekable():
            return None
        return _told_by(file.tell, file)
    except (OSError, ValueError):
        return None


def _told_by(tell: Callable[[], int], file: Any) -> int:
    try:
        return tell()
    except OSError:  # lines of it are being iterated over
        return int(file.buffer.tell())


def _changes_of(connection: Any) -> Any:
    """Counts of changes to a database in a file, here and by others. None: it is in memory, or is not to be asked."""
    sqlite = sys.modules["sqlite3"]
    try:
        cursor = connection.cursor()
        cursor.row_factory = None
        if not any(file for _, _, file in cursor.execute("PRAGMA database_list")):
            return None
        return connection.total_changes, *cursor.execute("PRAGMA data_version")
    except sqlite.Error:
        return None
