"""Values that a script made before its loop, from its rank or from what it found at its start.

A standby is built as the last rank. So a variable or attribute that was made from the rank (`start = rank * size`) has
the last rank's value in it, also when it takes another rank. And a process that starts later may find something else
(the script's own checkpoint). The ranks therefore compare, once, what their loops can reach and steps do not change. A
replacement whose value is the last rank's, and not that of the rank it takes, takes that rank's; so does one whose
value is not that of all ranks. Numbers are set, and texts, paths, and small tensors and containers of numbers and
texts that are equal on all ranks; small tensors, arrays and containers, texts, paths and ranges in which ranks differ
are carried with each step, as variables are that steps change. Other values are doubted. Values that differ from
process to process (a time) stay as they are.

All values of a rank are compared in an all-reduce of `SLOTS` sums. Names fall into slots by their hashes; the few slots
in which ranks differ are then gathered rank by rank.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn

from relight.training.carried.code.refs import Place, describe
from relight.training.carried.finding.catalog import Catalog
from relight.training.carried.finding.kept import Kept
from relight.training.carried.finding.looks import Places
from relight.training.carried.finding.places import key_of
from relight.training.carried.finding.spots.spot import MISSING
from relight.training.carried.finding.survey import Survey
from relight.training.carried.values.texts import refill, text_of
from relight.training.carried.values.trees.writer import write_down
from relight.training.state.modules.plain_values import plain_bytes
from relight.training.state.values.kinds import PLAIN, kind_of
from relight.training.torch_private.tensors import is_plain_memory
from relight.transfer.io.codec import encode_tree
from relight.transfer.io.constants import name_of_callable, write_constant
from relight.words import listed

SLOTS = 2**15
WIDTH = 4  # integers of one slot of one rank: its digest, and a number as kind, upper and lower half
_MOST_SLOTS = 64  # gathered rank by rank
_MOST_GATHERED = 2**20  # integers
_BITS = 40  # of a digest: the sum over all ranks fits into int64
_EDGE = 2**13  # elements at either end of a larger tensor
_LONGEST = 5000  # items of a container
_DEEPEST = 3
_MOST_CARRIED = 2**18  # bytes of a rank's own values that are carried, though no step changes them
_FEW = 512  # items of a container that is carried for that: a survey looks into longer ones as a whole
_MOST_TEXTS = 64
_MOST_LETTERS = 2**16  # of texts and paths
_HALF = 32
_NO_NUMBER, _INT, _FLOAT, _BOOL = range(4)
_UNKNOWN = (
    "a rank was lost before all ranks had compared what the script makes from them, and its replacement was built "
    "as the last rank. Where that matters: relight.init(late_standby=True)"
)
_OF_RANK = (
    "{names}: made from the rank before the loop, and a replacement was built as the last rank. Make it anew in "
    "job.on_rank_change(...), or let standbys build when they have a rank: relight.init(late_standby=True)"
)
_OF_START = (
    "{names}: made before the loop, equal on all ranks when the job began, and other in a process that started "
    "later. Do not let it depend on what changes while the job runs (files, clocks)"
)
_PATH = type(Path())
_DATA_ROOT: Place = (("data", "", "data"),)
_DATA = frozenset({"tensor", "array", "list", "tuple", "dict", "deque", "set"})


class _Found(NamedTuple):
    place: Place
    value: Any
    digest: int


Look = dict[int, list[_Found]]  # by slot


def row_of(own: Look) -> list[int]:
    """Return the digests of a rank's values: `SLOTS` integers to be summed over all ranks."""
    return [_together(own.get(number, [])) for number in range(SLOTS)]


def differing_slots(row: Sequence[int], sums: Sequence[int], world_size: int) -> list[int]:
    """Return the slots in which ranks differ. The same on all ranks. `row` is this rank's, `sums` that of all."""
    found = [number for number in range(SLOTS) if sums[number] != world_size * row[number]]
    return found[: min(_MOST_SLOTS, _MOST_GATHERED // (WIDTH * world_size))]


def entries_of(own: Look, slots: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Return a rank's part of the table of these slots; zeros elsewhere, so that a sum is the whole table."""
    table = [0] * (WIDTH * len(slots) * world_size)
    start = WIDTH * len(slots) * rank
    for place, number in enumerate(slots):
        found = own.get(number, [])
        table[start + WIDTH * place : start + WIDTH * (place + 1)] = [_together(found), *_number_of(found)]
    return table


class RankValues:
    """Compares this rank's values with those of others, and gives them to a replacement."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.is_state: Callable[[str, str, str], bool] = lambda *_: False  # of a module's attribute: steps change it
        self._ranks = 0  # that were compared
        self._slots: list[int] = []  # in which they differ
        self._common: list[int] = []  # of each other slot with one value in it: the slot, and its WIDTH integers
        self._texts: dict[str, str] = {}  # by slot, of small containers that are equal on all ranks
        self._words: dict[str, str] = {}  # by slot, texts that are, and their classes
        self._table: list[int] = []  # WIDTH integers for each of these slots, rank after rank
        self._pending: tuple[int, int] | None = None  # the rank that this process was built as, and the one it has
        self._own: Look | None = None
        self._built: dict[int, int] = {}  # by slot, digests of values before the state of another process arrived
        self.restore_data: Callable[[], None] = lambda: None  # again, after its values were set
        self.see_above: Callable[[], None] = lambda: None  # what code above the block has changed is for `is_state`

    # --- on every rank, once ----------------------------------------------------------------------------------------
    def look(self) -> Look:
        """Return this rank's values as they were when it began the first step, also if that is begun again."""
        if self._own is None:
            self.see_above()
            self._own = self._look(lambda _: True)
        return self._own

    def forget_look(self) -> None:
        """The first step is committed: `look` is not asked for any more."""
        self._own = None

    def _look(self, is_had: Callable[[Kept], bool]) -> Look:
        """Return values as they are now, but those that are carried and that the process has, as `is_had` says."""
        slots: Look = {}
        for place, value in self._values(is_had):
            if (digest := _digest(value)) is not None:
                key = key_of(place)
                number = xxhash.xxh3_64_intdigest(key.encode()) % SLOTS
                whole = xxhash.xxh3_64_intdigest(f"{key}\n{digest}".encode()) >> 64 - _BITS
                slots.setdefault(number, []).append(_Found(place, value, whole))
        return slots

    def learn(self, own: Look, ranks: int, slots: Sequence[int], table: Sequence[int]) -> bool:
        """Keep the table of all ranks, and the values in which they do not differ. Carry small ones that do.

        Returns whether there are such ones, which were not kept with the version that is now.
        """
        self._ranks, self._slots, self._table = ranks, list(slots), list(table)
        letters = 0
        for number, found in own.items():
            if number in slots or len(found) != 1:
                continue
            if words := _words_of(value := found[0].value):
                letters += len(words)
                if letters <= _MOST_LETTERS:
                    self._words[str(number)] = words
                    self._common += [number, found[0].digest, *_number_of(found)]
            elif _matters(value) and type(value) is not str:
                self._common += [number, found[0].digest, *_number_of(found)]
                if len(self._texts) < _MOST_TEXTS and (text := text_of(value)):
                    self._texts[str(number)] = text
        left = _MOST_CARRIED
        has_kept = False
        for one in (one for number in slots for one in own.get(number, [])):
            is_new = _is_carried(one.value) and key_of(one.place) not in self._catalog.kept
            size = _size_of(one.value, left) if is_new else None
            feeds = not _words_of(one.value)  # a text names files, mostly: a host that is lost takes little with it
            if size is not None and (kept := self._catalog.keep(one.place, feeds=feeds, seen=True)) is not None:
                kept.mark = self._catalog.mark_of(one.value, kept)  # the step under way began with it
                left -= size
                has_kept = True
        return has_kept

    def describe(self) -> dict[str, Any]:
        """Return what a replacement needs to know."""
        own = {"ranks": self._ranks, "slots": self._slots, "table": self._table, "common": self._common}
        return {**own, "texts": self._texts, "words": self._words}

    # --- in a replacement -------------------------------------------------------------------------------------------
    def note_built(self) -> None:
        """Remember values before the state of another process arrives: what that brings (to data) is left alone."""
        if not self._ranks and self._catalog.loop.is_found:
            self._built = {number: _together(found) for number, found in self._look(lambda _: False).items()}

    def adopt(self, described: dict[str, Any], world_size: int, built_as: int, rank: int) -> str:
        """Take on the values of `rank`, as soon as the loop is found, in a process that was built as another rank.

        Returns why equal bits cannot be vouched for, or "".
        """
        if self._ranks:
            return ""  # its values were compared, or taken on already
        if described.get("ranks") != world_size:
            return "" if built_as == rank else _UNKNOWN
        self._ranks, self._slots, self._table = world_size, described["slots"], described["table"]
        self._common, self._texts, self._words = described["common"], described["texts"], described["words"]
        self._pending = built_as, rank
        return ""

    @property
    def is_pending(self) -> bool:
        """True if values wait to be put in."""
        return self._pending is not None

    def put_in(self) -> str | None:
        """Set the numbers that are others in the rank. Returns why equal bits cannot be vouched for."""
        assert self._pending is not None
        built_as, rank = self._pending
        self._pending = None
        # What a rehearsal was first to see change is carried here, and the rank did not know: nothing was put in.
        own = self._look(lambda one: one.is_put_in)
        own = {
            number: found for number, found in own.items() if self._built.get(number, now := _together(found)) == now
        }
        of_rank, of_start = [], []
        for place, number in enumerate(self._slots if built_as != rank else ()):
            found = own.get(number, [])
            as_built, wanted = self._entry(built_as, place), self._entry(rank, place)
            if _together(found) != as_built[0] or as_built[0] == wanted[0]:
                continue  # it does not follow from the rank, or has been set already
            if len(found) > 1 or not self._set(found, wanted):
                of_rank += [describe(one.place) for one in found if len(found) > 1 or _matters(one.value)]
        for start in range(0, len(self._common), 1 + WIDTH):
            number, *wanted = self._common[start : start + 1 + WIDTH]
            found = own.get(number, [])
            if len(found) != 1 or found[0].digest == wanted[0] or self._set(found, wanted):
                continue
            words, text = self._words.get(str(number), ""), self._texts.get(str(number), "")
            if not (self._put(found, _value_of(words)) if words else refill(found[0].value, text)):
                of_start.append(describe(found[0].place))
        self.restore_data()
        self._catalog.loop.spots.frames.forget()
        self._catalog.comparison.look_again()
        if of_rank:
            return _OF_RANK.format(names=listed(sorted(of_rank)))
        return _OF_START.format(names=listed(sorted(of_start))) if of_start else None

    def _set(self, found: Sequence[_Found], wanted: Sequence[int]) -> bool:
        """Set the only value of a slot, if it is to be a number."""
        return wanted[1] != _NO_NUMBER and self._put(found, _number_from(wanted[1], wanted[2], wanted[3]))

    def _put(self, found: Sequence[_Found], value: Any) -> bool:
        """Give the only place of a slot a number, text or path. False: it cannot be set."""
        spots = self._catalog.loop.spots
        spot = spots.find(found[0].place) if found else None
        holder = spots.find(found[0].place[:-1]) if found and len(found[0].place) > 1 else None
        if spot is None or (holder is not None and isinstance(holder.get(), tuple)):
            return False
        if holder is not None and isinstance(owner := holder.get(), nn.Module):
            vars(owner)[found[0].place[-1][1]] = value  # no assignment by the script
        else:
            spot.set(value)
        return True

    def _entry(self, rank: int, place: int) -> Sequence[int]:
        start = WIDTH * (len(self._slots) * rank + place)
        return self._table[start : start + WIDTH]

    # --- what there is ----------------------------------------------------------------------------------------------
    def _values(self, is_had: Callable[[Kept], bool]) -> Iterator[tuple[Place, Any]]:
        catalog = self._catalog
        spots = catalog.loop.spots
        spots.frames.forget()
        survey = Survey(spots, catalog.is_foreign, Places(), enters_data=True, rebound=catalog.comparison.rebound)
        survey.look(_DATA_ROOT, spots.data)  # a function, with what it encloses
        for place in survey.found:
            holders = (catalog.kept.get(key_of(place[:length])) for length in range(1, len(place) + 1))
            is_carried = any(one is not None and is_had(one) for one in holders)
            if is_carried or place in catalog.dead or (spot := spots.find(place)) is None:
                continue
            value, (kind, owner, path) = spot.get(), place[0]
            is_state = kind == "inner" and len(place) > 1 and self.is_state(owner, path, place[1][1])
            if value is not MISSING and not (is_state or catalog.is_foreign(value)):
                yield place, value


def _is_carried(value: Any) -> bool:
    """Return whether a value that differs between ranks is written down with each step's private state."""
    kind = kind_of(value)
    is_single = kind in ("tensor", "array", "number", "generator") or type(value) in (str, _PATH, range)
    return is_single or (kind in _DATA and len(value) <= _FEW)


def _size_of(value: Any, most: int) -> int | None:
    """Return about how many bytes a value takes; None if it cannot be written down, or takes more than `most`."""
    if kind_of(value) == "generator":
        return size if (size := len(_written(value))) <= most else None
    return plain_bytes(value, most)


def _matters(value: Any) -> bool:
    """Return whether a difference in a value may change what steps compute."""
    return kind_of(value) in (*_DATA, "number", "generator") or isinstance(value, (bool, int, float, str, range, _PATH))


def _together(found: Sequence[_Found]) -> int:
    digest = 0
    for one in found:
        digest ^= one.digest
    return digest


def _number_of(found: Sequence[_Found]) -> tuple[int, int, int]:
    """Return the number that is the only value in a slot, as kind, upper and lower half."""
    value = found[0].value if len(found) == 1 else None
    if isinstance(value, bool):
        return _BOOL, 0, int(value)
    if isinstance(value, int) and abs(value) < 2**62:
        return _INT, value >> _HALF, value & 2**_HALF - 1
    if type(value) is float:
        (bits,) = struct.unpack("<Q", struct.pack("<d", value))
        return _FLOAT, bits >> _HALF, bits & 2**_HALF - 1
    return _NO_NUMBER, 0, 0


def _number_from(kind: int, upper: int, lower: int) -> int | float | bool:
    if kind == _BOOL:
        return bool(lower)
    bits = (upper << _HALF) + lower
    if kind == _INT:
        return bits
    (value,) = struct.unpack("<d", struct.pack("<Q", bits))
    return float(value)


def _words_of(value: Any) -> str:
    """Return a text or path and its class as one text, for `_value_of`; "" for other values."""
    return f"{type(value).__name__}:{value}" if type(value) in (str, _PATH) else ""


def _value_of(words: str) -> str | Path:
    kind, _, text = words.partition(":")
    return text if kind == "str" else Path(text)


def _digest(value: Any, depth: int = 0) -> str | None:
    """Return a text that is equal for equal values; None for a value that is not compared."""
    kind = kind_of(value)
    if kind == "plain" and type(value) not in PLAIN:
        return f"{write_constant(value) or name_of_callable(value)}"  # an Enum of the user's may show itself otherwise
    if kind in ("plain", "number") or type(value) is range:
        return f"{type(value).__name__} {value!r}"
    if kind == "array":
        return _digest(torch.from_numpy(value), depth) if value.dtype.kind in "fiub" and value.size else None
    if kind == "tensor":
        if value.is_meta or not is_plain_memory(value):
            return None
        flat = value.detach().reshape(-1)
        edges = torch.cat([flat[:_EDGE], flat[-_EDGE:]]).cpu().contiguous().view(torch.uint8)
        return f"{value.dtype} {tuple(value.shape)} {xxhash.xxh3_64_hexdigest(edges.numpy().tobytes())}"
    if kind == "generator":
        return f"{type(value).__name__} {xxhash.xxh3_64_hexdigest(_written(value))}"
    if kind not in _DATA or depth > _DEEPEST or len(value) > _LONGEST:
        return None
    items = [part for pair in value.items() for part in pair] if kind == "dict" else list(value)
    parts = [_digest(item, depth + 1) for item in items]
    if None in parts:
        return None
    return f"{kind} {sorted(parts, key=str) if kind == 'set' else parts}"


def _written(generator: Any) -> bytes:
    return encode_tree({"state": write_down(generator)}, "generator")
