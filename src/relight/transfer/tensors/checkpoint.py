"""Reads a safetensors checkpoint: what is in it, and the bytes of one bucket at a time. No torch.

A file is an eight-byte length, a header in JSON, and the tensors' bytes without gaps; a large model is several such
files and an index. Nothing of it is believed before it is checked: the header is bounded, every offset lies in the
file, no two tensors share a byte, and an index names no file outside its directory.
"""

import math
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import msgspec
import xxhash

from relight.errors import UsageError
from relight.transfer.plan.manifest import ITEM_BYTES, Entry, Manifest, make_manifest
from relight.transfer.plan.plan import Bucket, Piece

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * 10**6  # the format's own limit
_LENGTH = struct.Struct("<Q")
_MAX_VIEWS = 1024  # IOV_MAX on Linux
_MAX_READ_BYTES = 2**30  # one system call moves less than 2 GiB

# safetensors' names of the types that both it and torch have.
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}


_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Stored(msgspec.Struct, frozen=True):
    """One tensor as a header describes it. Offsets count from the header's end."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=64)]  # torch has no more dimensions either
    data_offsets: tuple[_Size, _Size]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class _Place(msgspec.Struct, frozen=True):
    """The place of a tensor's bytes."""

    file: int  # index into the open files
    start: int  # first byte, counted in the file


class Checkpoint:
    """An open checkpoint. `manifest` lists its tensors in the order of their bytes, file after file."""

    def __init__(self, manifest: Manifest, places: Sequence[_Place], files: Sequence[tuple[Path, int]]) -> None:
        """Made by `open_checkpoint`; owns the open files, each with its descriptor."""
        self.manifest = manifest
        self._places = places
        self._files = list(files)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. A second time does nothing."""
        while self._files:
            os.close(self._files.pop()[1])

    def read_into(self, buffer: memoryview, bucket: Bucket) -> None:
        """Fill the first `bucket.nbytes` of `buffer`: each byte is read once, and gaps of the alignment become zero.

        Several threads may read at a time, each into a buffer of its own. Raises UsageError if a file ends early or
        cannot be read.
        """
        assert self._files, "this checkpoint is closed"
        assert buffer.format == "B"
        assert len(buffer) >= bucket.nbytes
        filled = 0
        for piece in bucket.pieces:
            buffer[filled : piece.offset] = bytes(piece.offset - filled)
            filled = piece.offset + piece.nbytes
        for file, start, pieces in self._runs(bucket):
            path, descriptor = self._files[file]
            views = [buffer[piece.offset : piece.offset + piece.nbytes] for piece in pieces]
            _read_all(path, descriptor, start, views)

    def settle(self) -> None:
        """Files do not change."""

    def fill(self, bucket: Bucket, view: memoryview) -> int:
        """Read the bucket from disk straight into `view`; returns its digest (see `source.Source`)."""
        self.read_into(view, bucket)
        return xxhash.xxh3_64_intdigest(view[: bucket.nbytes])

    def _runs(self, bucket: Bucket) -> Iterator[tuple[int, int, list[Piece]]]:
        """The bucket's pieces, those together that follow each other in one file: (file, first byte, pieces)."""
        run: list[Piece] = []
        file = start = end = -1
        for piece in bucket.pieces:
            place = self._places[piece.tensor]
            first = place.start + piece.start
            if run and (place.file, first) == (file, end) and len(run) < _MAX_VIEWS:
                run.append(piece)
            else:
                if run:
                    yield file, start, run
                file, start, run = place.file, first, [piece]
            end = first + piece.nbytes
        if run:
            yield file, start, run


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a file, a directory with one `*.safetensors`, or one with several and `model.safetensors.index.json`.

    Raises UsageError that names the file and what is wrong with it.
    """
    index = _read_index(path)
    paths = [_single_file(path)] if index is None else [path / name for name in sorted(set(index.values()))]
    files: list[tuple[Path, int]] = []
    entries: list[Entry] = []
    places: list[_Place] = []
    found_in: dict[str, Path] = {}
    try:
        for file in paths:
            files.append((file, _open(file)))
            data_start, stored = _read_header(*files[-1])
            for name, tensor in stored:
                if name in found_in:
                    raise UsageError(f"tensor {name!r} is in {found_in[name].name} and again in {file}")
                found_in[name] = file
                entries.append(Entry(name, DTYPES[tensor.dtype], tensor.shape))
                places.append(_Place(len(files) - 1, data_start + tensor.data_offsets[0]))
        if index is not None:
            _check_index(path, index, found_in)
        return Checkpoint(make_manifest(entries), places, files)
    except BaseException:
        for _, descriptor in files:
            os.close(descriptor)
        raise


# --- which files ------------------------------------------------------------------------------------------------
def _read_index(path: Path) -> dict[str, str] | None:
    """Tensor to file, if there is an index. The files are those of the directory itself."""
    index_path = path / INDEX_NAME
    if not path.is_dir() or not index_path.exists():
        return None
    descriptor = _open(index_path)
    try:
        size = os.fstat(descriptor).st_size
        if size > MAX_HEADER_BYTES:
            raise UsageError(f"{index_path} has {size} bytes; an index has at most {MAX_HEADER_BYTES}")
        data = bytearray(size)
        _read_all(index_path, descriptor, 0, [memoryview(data)])
    finally:
        os.close(descriptor)
    try:
        index = msgspec.json.decode(data, type=_Index).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{index_path} is no index of a checkpoint: {error}") from error
    for name in index.values():
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise UsageError(f"{index_path} names the file {name!r}: only files of its own directory can be meant")
    if not index:
        raise UsageError(f"{index_path} lists no tensors")
    return index


def _single_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    try:
        found = sorted(file for file in path.iterdir() if file.name.endswith(".safetensors"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if len(found) != 1:
        count = f"{len(found)} files *.safetensors" if found else "no file *.safetensors"
        raise UsageError(f"{path} holds {count} and no {INDEX_NAME}: name the file to read")
    return found[0]


def _check_index(path: Path, index: dict[str, str], found_in: dict[str, Path]) -> None:
    for name, file in index.items():
        if name not in found_in or found_in[name].name != file:
            raise UsageError(f"{path / INDEX_NAME} says that {name!r} is in {file}, which does not hold it")
    for name, found in found_in.items():
        if name not in index:
            raise UsageError(f"{found} holds {name!r}, which {INDEX_NAME} does not list: are they of one checkpoint?")


# --- one file ---------------------------------------------------------------------------------------------------
def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not make us wait
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {path}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"{path} is not a plain file")
    return descriptor


def _read_header(path: Path, descriptor: int) -> tuple[int, list[tuple[str, _Stored]]]:
    """Return the offset of the tensors' bytes, and the tensors in their order, all checked."""
    size = os.fstat(descriptor).st_size
    if size < _LENGTH.size:
        raise UsageError(f"{path} is no safetensors file: it has only {size} bytes")
    head = bytearray(_LENGTH.size)
    _read_all(path, descriptor, 0, [memoryview(head)])
    (length,) = _LENGTH.unpack(head)
    data_start = _LENGTH.size + length
    if length > MAX_HEADER_BYTES:
        what = "its header would have {length} bytes"
        if head.startswith((b"PK\x03\x04", b"\x80\x02")):  # a zip archive, as torch writes them, or a pickle
            what = "it looks like one of torch.save; write the state dict with safetensors.torch.save_file"
        raise UsageError(f"{path} is no safetensors file: {what.format(length=length)}")
    if data_start > size:
        raise UsageError(f"{path} is cut short: its header should end at byte {data_start}, the file ends at {size}")
    header = bytearray(length)
    _read_all(path, descriptor, _LENGTH.size, [memoryview(header)])
    try:
        stored = _decode_header(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no safetensors file: its header cannot be read: {error}") from error
    for name, tensor in stored:
        _check_tensor(path, name, tensor)
    _check_layout(path, stored, size - data_start)
    return data_start, stored


def _decode_header(header: bytes | bytearray) -> list[tuple[str, _Stored]]:
    raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    raw.pop("__metadata__", None)  # whatever its writer noted; it describes no tensor
    stored = [(name, msgspec.json.decode(described, type=_Stored)) for name, described in raw.items()]
    return sorted(stored, key=lambda item: (item[1].data_offsets, item[0]))


def _check_tensor(path: Path, name: str, tensor: _Stored) -> None:
    if tensor.dtype not in DTYPES:
        raise UsageError(f"{path}: {name!r} is of type {tensor.dtype!r}, which relight does not move")
    start, end = tensor.data_offsets
    needed = math.prod(tensor.shape) * ITEM_BYTES[DTYPES[tensor.dtype]]
    if end - start != needed:
        raise UsageError(
            f"{path}: {name!r} ({tensor.dtype}, {list(tensor.shape)}) needs {needed} bytes, its offsets are "
            f"{start} to {end}"
        )


def _check_layout(path: Path, stored: Sequence[tuple[str, _Stored]], data_bytes: int) -> None:
    """The tensors fill the rest of the file without gap or overlap."""
    if stored and stored[0][1].data_offsets[0]:
        raise UsageError(f"{path}: no tensor begins at its first byte")
    for (name, tensor), (other, after) in pairwise(stored):
        end, start = tensor.data_offsets[1], after.data_offsets[0]
        if start != end:
            what = "overlap" if start < end else "have a gap between them"
            raise UsageError(f"{path}: {name!r} and {other!r} {what} (bytes {end} and {start})")
    end = stored[-1][1].data_offsets[1] if stored else 0
    if end > data_bytes:
        raise UsageError(f"{path} is cut short: its tensors have {end} bytes, {data_bytes} are there")
    if end < data_bytes:
        raise UsageError(f"{path} has {data_bytes - end} bytes after its last tensor")


def _read_all(path: Path, descriptor: int, start: int, views: list[memoryview]) -> None:
    """Fill the views one after the other with the file's bytes from `start` on."""
    views = [view for view in views if len(view)]
    while views:
        try:
            count = os.preadv(descriptor, _at_most(views, _MAX_READ_BYTES), start)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        if not count:
            raise UsageError(f"{path} ends at byte {start}: it was cut short after it was opened")
        start += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]


def _at_most(views: Sequence[memoryview], limit: int) -> list[memoryview]:
    """As many of these bytes as one system call can take."""
    return list(views[:_MAX_VIEWS]) if sum(map(len, views)) <= limit else [views[0][:limit]]
