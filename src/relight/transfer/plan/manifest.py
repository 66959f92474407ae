"""Manifests: names, types and sizes of tensors, in one order that all sides share. Pure, without torch."""

import math
from collections.abc import Iterable, Sequence

import msgspec

from relight.errors import UsageError

# Bytes of one element, by torch's name of the type. What a type means is torch's business; here only its size counts.
ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor, or another name of one (tied parameters): then `same_as` names it, and no bytes are moved."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    same_as: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes that this entry moves; an empty tensor and a second name move none."""
        return 0 if self.same_as else math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of one tensor that the same sources hold: `count` runs of `run` bytes, the first at byte `start`.

    The next one begins `stride` bytes further on. So a part can be rows of a matrix, or some columns of each row.
    """

    tensor: int  # index into the manifest's entries
    start: int
    run: int
    stride: int
    count: int
    group: int = 0  # parts of one group have the same holders; a bucket carries parts of one group

    @property
    def nbytes(self) -> int:
        return self.run * self.count

    @property
    def end(self) -> int:
        """The byte after its last one."""
        return self.start + self.stride * (self.count - 1) + self.run


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """Every tensor of one set of weights. Names are unique; the order is that of moving.

    `parts`: which bytes travel together, if no source holds all of them; empty otherwise. Together they are every
    byte, once (`division.divide`).
    """

    entries: tuple[Entry, ...]
    parts: tuple[Part, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def make_manifest(entries: Iterable[Entry], parts: Iterable[Part] = ()) -> Manifest:
    """Check and keep the entries. Raises UsageError: a name twice, an unknown type, a second name of nothing."""
    found: dict[str, Entry] = {}
    for entry in entries:
        if entry.name in found:
            raise UsageError(f"there are two tensors named {entry.name!r}")
        if entry.dtype not in ITEM_BYTES:
            raise UsageError(f"{entry.name}: relight moves no tensors of type {entry.dtype!r}")
        if any(size < 0 for size in entry.shape):
            raise UsageError(f"{entry.name}: a shape of {list(entry.shape)} makes no tensor")
        if entry.same_as:
            original = found.get(entry.same_as)
            if original is None or original.same_as or (original.dtype, original.shape) != (entry.dtype, entry.shape):
                raise UsageError(f"{entry.name} is to be the same tensor as {entry.same_as!r}, which it cannot be")
        found[entry.name] = entry
    return Manifest(tuple(found.values()), tuple(parts))


def differences(offered: Manifest, wanted: Manifest, limit: int = 5) -> list[str]:
    """Return the reasons why weights as `offered` do not fit those `wanted`, a sentence each; none if they fit.

    Names, types and shapes count. Which names are tied does not: the side that ties them keeps doing so.
    """
    have = {entry.name: entry for entry in offered.entries}
    want = {entry.name: entry for entry in wanted.entries}
    found = [f"{name} is missing" for name in want if name not in have]
    found += [f"{name} is not known here" for name in have if name not in want]
    for name, ours in want.items():
        theirs = have.get(name, ours)
        if theirs.dtype != ours.dtype:
            found.append(f"{name} comes as {theirs.dtype}, wanted is {ours.dtype}")
        if theirs.shape != ours.shape:
            found.append(f"{name} comes as {list(theirs.shape)}, wanted is {list(ours.shape)}")
    more = len(found) - limit
    return found if more <= 0 else [*found[:limit], f"and {more} more"]


def describe_bytes(count: float) -> str:
    """ "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def parse_bytes(text: str) -> int:
    """ "64MiB", "1.5 GiB" or "4096". Raises ValueError."""
    units: Sequence[tuple[str, int]] = (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40), ("B", 1))
    for unit, factor in units:
        if text.strip().lower().endswith(unit.lower()):
            count = float(text.strip()[: -len(unit)]) * factor
            if not math.isfinite(count):
                raise ValueError(f"{text!r} is no number of bytes")
            return round(count)
    return int(text)
