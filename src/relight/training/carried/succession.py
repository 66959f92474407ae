"""Values that are carried, on their way to a rank's successor: kept with the private state, and put in there."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from relight.script_files import is_user_type
from relight.training.carried.code.refs import Place
from relight.training.carried.ends import Ends
from relight.training.carried.finding.catalog import Catalog
from relight.training.carried.finding.compare import FIRST_STEPS
from relight.training.carried.finding.kept import (
    MOST_BYTES,
    MOST_LEAVES,
    MOST_LOG_BYTES,
    MOST_LOG_LEAVES,
    MOST_SEEN_BYTES,
    MOST_SHOWN_BYTES,
    NEVER,
    Kept,
)
from relight.training.carried.finding.places import key_of, place_of
from relight.training.carried.finding.spots.files import ASKED_FOR_KEY
from relight.training.carried.finding.spots.spot import MISSING
from relight.training.carried.finding.told.orders import keeps_its_order, only_grows
from relight.training.carried.late_values import offered
from relight.training.carried.values.parts import is_part
from relight.training.carried.values.trees.sizes import has_tensors, keys_of, leaves_of, size_of, tensor_bytes
from relight.training.carried.values.trees.words import MISSING_TREE, Unsupported
from relight.training.carried.values.trees.writer import Writer
from relight.training.state.values.kinds import kind_of
from relight.training.state.values.marks import changed
from relight.transfer.io.codec import Node, flatten, joined
from relight.transfer.io.constants import name_of_callable

_WEIGHED_EVERY = 16  # captures, after the first ones
_MOVED = (
    "{names}: changed for the first time after the last write of a step, or between steps, and a rank was lost there, "
    "or in the step after it: what it leaves may show older values. Change them before the write; values that are only "
    "shown survive with step.report(...) and training.log_to(...)"
)
_Trees = tuple[list[str], Any, Any]  # keys, and trees of values by these; apart: those of functions that the loop calls
_CONTAINERS = frozenset({"list", "tuple", "dict", "set", "deque", "object"})  # may lead to other objects


class Keeper:
    """Writes the values of a catalog down, as a tree for `encode_tree`."""

    def __init__(self, catalog: Catalog, is_id: Callable[[int], bool]) -> None:
        """`is_id`: of a number that is the `id` of a tensor handed over."""
        self._catalog = catalog
        self._kept = catalog.kept
        self._is_id = is_id
        self._captures = 0
        self._last: _Trees = [], {}, {}  # as they were written last
        self._names = 0  # of objects, as of then
        self._of_rebound: dict[str, bool] = {}
        self._was_unsettled = False
        self._early, self._ends_epoch = False, True  # of the step in which they were written
        self._is_of_step = False  # they were written at the barrier of a step, and not between two
        self.ends = Ends(catalog)
        self._moved: list[str] = []  # what was seen to change after it was kept, where that was not expected

    def capture(self, *, in_step: bool, early: bool, ends_epoch: bool, compared: bool) -> Any:
        """The values now, as a tree. Empty: nothing is carried. `early`: the block of the step goes on after this.

        `ends_epoch`: code between two epochs may follow. `compared`: `is_due` has just looked at them.

        Raises UsageError for a value that decides what a step computes and cannot be kept.
        """
        self._early, self._ends_epoch, self._is_of_step = early, ends_epoch, in_step
        unset, lost = self._catalog.unset() if in_step and early else [], self._catalog.lost
        ends = self.ends.capture() if in_step and ends_epoch else {}
        if not (self._kept or unset or lost or ends):
            return {}
        self._captures += 1
        weigh = self._captures <= 2 * FIRST_STEPS or self._captures % _WEIGHED_EVERY == 0
        keys, names, of_calls = self._written_again(weigh, compared) or self._write_all(weigh)
        if not (keys or unset or lost or ends):
            return {}
        may_change = [one for one in self._kept.values() if one.may_change(early=early, ends_epoch=ends_epoch)]
        here = may_change if in_step else []
        unsettled = [one.key for one in here if one.feeds and one.late]
        lacking = [one.key for one in here if one.may_move_on(early=early) and one.key in {*keys}]
        lacking += unset
        self._was_unsettled = bool(unsettled or lacking)
        between = [one.key for one in here if ends_epoch and not one.may_change(early=early, ends_epoch=False)]
        words = _words(tuple(unsettled), tuple(lacking), tuple(between), tuple(lost), self._catalog.loop.place)
        return joined({"names": names, "of_calls": of_calls, **words, **({"ends": ends} if ends else {})})

    @property
    def is_unsettled(self) -> bool:
        """True if code may change after the barrier what was captured there."""
        return self._was_unsettled

    def late_values(self, captured: Mapping[str, Any] | None, again: Mapping[str, Any] | None = None) -> bytes:
        """Return what code may have changed since it was `captured` at the barrier, for `Carried.adopt` elsewhere.

        `again`: captured as the loop asked for the next step, if that has been undone.
        """
        self._catalog.loop.spots.frames.forget()
        found = offered(captured, self._kept, self._catalog.parts, again)
        self._catalog.loop.spots.frames.forget()
        return found

    def is_due(self) -> bool:
        """At a turn of the loop: whether code between steps changed what was kept at the barrier, or may have."""
        if not self._kept:
            return False
        if not self._captures:
            for one in self._kept.values():
                one.at_end_of_epoch |= one.seen and self._ends_epoch
            return True
        found = [one for one in self._kept.values() if one.is_written and changed(one.kept, one.spot.get())]
        for one in found:
            one.lasting = None
            may_move = one.is_put_in or one.may_change(early=self._early, ends_epoch=self._ends_epoch)
            is_new = one.seen and (not one.late or one.kept is NEVER)  # it was not seen to change there before
            one.at_end_of_epoch = self._ends_epoch and (is_new or one.at_end_of_epoch)
            one.late_at_end &= may_move  # another step than the last one of an epoch may change it there as well
            if not (one.feeds or one.moves_on or one.is_put_in):
                one.moves_on = True
                self._moved += [] if may_move and (one.late or one.after_write) else [one.name]
            elif not may_move:
                self._moved.append(one.name)
            one.late |= one.seen and one.kept is not NEVER  # no code tells that it is changed there
        return self._was_unsettled or bool(found)

    def roll_back(self) -> None:
        """Take the values with which the step began for those kept: what its barrier kept is withdrawn."""
        for one in self._kept.values() if self._is_of_step else ():
            if one.is_written and not one.is_put_in:
                one.kept, one.lasting = one.mark, None
        self._is_of_step = False

    def moved(self) -> str | None:
        """Return why a rank that was lost in the step that has just ended shows older values, if so; once."""
        moved, self._moved = sorted(set(self._moved)), []
        return _MOVED.format(names=", ".join(moved)) if moved else None

    def _written_again(self, weigh: bool, compared: bool) -> _Trees | None:
        """Return the same as last time, if all values have lasted since then."""
        lasts, parts = not weigh, self._catalog.parts
        for one in self._kept.values():
            if one.is_written and one.lasting is not None:
                value = one.spot.get()
                if not (compared or not changed(one.kept, value)) or is_part(parts, value):
                    one.lasting = None
            lasts = lasts and not (one.is_written and one.lasting is None)
        keys, _, _ = self._last
        is_same = lasts and self._names == self._catalog.homes.count
        return self._last if is_same and keys == [one.key for one in self._kept.values() if one.is_written] else None

    def _write_all(self, weigh: bool) -> _Trees:
        """All values, and those of functions that the loop calls: read back once these run. Also their keys."""
        catalog, sizes = self._catalog, dict[str, int]()
        self._divide_mixed()
        trees: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        written = [(one, one.spot.get()) for one in self._kept.values() if one.is_written]
        # First attributes of what a name happens to stand for: where that is a part of another value, that one counts.
        written.sort(key=lambda pair: not self._is_of_rebound(pair[0].key))
        holders = self._holders() if any(kind_of(value) in _CONTAINERS for _, value in written) else {}
        writers = [Writer(catalog.homes, catalog.parts, holders) for _ in trees]
        for one, value in written:
            one.lasting = None if weigh else one.lasting
            if one.lasting is None:
                writers[one.is_of_a_call].look_at(value)
        for one, value in written:
            writer = writers[one.is_of_a_call]
            if one.lasting is not None and (again := writer.write_again(one.lasting)) is not None:
                trees[one.is_of_a_call][one.key] = again
                continue
            is_short = type(value) is dict and len(value) <= MOST_LOG_LEAVES and not weigh
            if is_short and (found := writer.write_words(one.key, value)) is not None:
                one.kept, one.lasting = found
                one.is_put_in, one.looked = False, one.kept if one.looked is None else one.looked
                trees[one.is_of_a_call][one.key] = one.lasting.tree
                continue
            if isinstance(value, (set, frozenset)) and not (keeps_its_order(value) and only_grows(one.kept, value)):
                catalog.doubt_order(one)
            one.kept, one.is_put_in = catalog.mark_of(value, one), False
            if one.looked is None:  # found in this step: what changed it came before this
                one.looked = one.kept
            tree = self._written_down(one, value, weigh, writer)
            one.lasting = None if value is MISSING or tree is NEVER else writer.lasting(tree)
            if tree is NEVER:
                continue
            trees[one.is_of_a_call][one.key] = tree if one.lasting is None else one.lasting.tree
            if weigh and one.feeds:
                sizes[one.key] = size_of(tree)
        if sum(sizes.values()) > MOST_BYTES:
            largest = self._kept[max(sizes, key=lambda key: sizes[key])]
            catalog.refuse_or_leave_out(largest, largest.spot.get(), f"over {MOST_BYTES >> 20} MiB are carried")
            return self._write_all(weigh)  # others may refer to what is in it
        keys = [one.key for one, _ in written if one.key in trees[one.is_of_a_call]]
        names, of_calls = map(joined, trees)
        is_flat = type(names) is type(of_calls) is Node  # no tensors are held for this
        self._last, self._names = (keys, names, of_calls) if is_flat else ([], {}, {}), catalog.homes.count
        return keys, names, of_calls

    def _divide_mixed(self) -> None:
        """Carry only attributes of objects that hold something which cannot be written down, if they are the script's.

        An object that comes to hold such a thing later is refused, or left out.
        """
        for one in list(self._kept.values()):
            if not one.is_written or one.was_tried:
                continue
            one.was_tried, value = True, one.spot.get()
            is_whole = kind_of(value) != "object" or one.is_late(value, self._catalog.homes)
            if _is_class_at_home(one, value) or not (is_whole or self._can_be_written(one, value)):
                self._catalog.divide(one, self._can_be_written)

    def _can_be_written(self, one: Kept, value: Any) -> bool:
        try:
            Writer(self._catalog.homes, self._catalog.parts).write(one.key, value)
        except Unsupported:
            return False
        return True

    def _holders(self) -> dict[int, str]:
        """Objects of which only attributes are carried, by `id`: a value that refers to one means that very object.

        Not what a name stands for that steps bind to another object now and then: a replacement's means its first one.
        """
        holders: dict[int, str] = {}
        rebound = self._catalog.comparison.rebound
        for name, holder in _holders_of(tuple(key for key, one in self._kept.items() if one.is_written)):
            if name not in self._kept and not _is_in(holder, rebound):
                spot = self._catalog.loop.spots.find(holder)
                if spot is not None and kind_of(thing := spot.get()) == "object":
                    holders.setdefault(id(thing), name)
        return holders

    def _is_of_rebound(self, key: str) -> bool:
        """Return whether a place is an attribute of an object that a name or attribute stands for only now and then."""
        found = self._of_rebound.get(key)
        if found is None:
            found = self._of_rebound[key] = _is_in(place_of(key)[:-1], self._catalog.comparison.rebound)
        return found

    def _written_down(self, one: Kept, value: Any, weigh: bool, writer: Writer) -> Any:
        """The tree of a value, which may be None; NEVER: it was left out."""
        if value is MISSING:
            return MISSING_TREE
        if not one.feeds and (why := self._is_too_large_to_show(one, value, weigh)):
            self._catalog.leave_out(one, why)
            return NEVER
        try:
            tree = writer.write(one.key, value, grows=not one.feeds)
            if weigh and any(map(self._is_id, keys_of(tree))):
                writer.take_back()
                raise Unsupported("the id() of a parameter as a key, which is another in each process (use its name)")
        except Unsupported as problem:
            self._catalog.refuse_or_leave_out(one, value, f"it holds {problem}")
            return NEVER
        if weigh and (one.seen or not one.feeds):
            size, leaves = size_of(tree), leaves_of(tree)
            few = MOST_LEAVES if one.feeds or one.has_tensors else MOST_LOG_LEAVES
            most = MOST_SEEN_BYTES if one.feeds else MOST_SHOWN_BYTES if one.has_tensors else MOST_LOG_BYTES
            if size > most or leaves > few:
                writer.take_back()
                self._catalog.leave_out(one, f"it has grown to {leaves} values, {size} bytes")
                return NEVER
        return tree

    def _is_too_large_to_show(self, one: Kept, value: Any, weigh: bool) -> str:
        """Return whether a value that is only accumulated or shown is too large to be written down."""
        nbytes = tensor_bytes(value, self._catalog.parts) if weigh else 0
        one.has_tensors = has_tensors(value)
        if nbytes > MOST_SHOWN_BYTES:
            return f"its tensors take {nbytes >> 20} MiB"
        if not one.has_tensors and type(value) in (list, dict, set) and len(value) > MOST_LOG_LEAVES:
            return f"it has {len(value)} items"
        return ""


def settled_by_code(tree: dict[str, Any]) -> dict[str, Any]:
    """Return what was kept at the last barrier of an epoch, for a process that runs the code after that itself."""
    done = {*tree.get("between", ())}
    done.discard(ASKED_FOR_KEY)  # what the lost rank has made is there
    left = {name: [key for key in tree[name] if key not in done] for name in ("unsettled", "lacking")}
    return {**tree, **left, "runs_code": True}


@functools.lru_cache(maxsize=64)
def _words(
    unsettled: tuple[str, ...],
    lacking: tuple[str, ...],
    between: tuple[str, ...],
    lost: tuple[str, ...],
    loop: tuple[str, int],
) -> dict[str, Node]:
    """Flatten what goes with the values: mostly the same in every step.

    `unsettled`, `lacking`: what a step may change after this. `between`: what only code between epochs does.
    """
    found: dict[str, Any] = {"unsettled": unsettled, "lacking": lacking, "loop": loop}
    found |= {name: words for name, words in (("between", between), ("lost", lost)) if words}
    return {name: flatten([*words], "") for name, words in found.items()}


@functools.lru_cache(maxsize=1)
def _holders_of(keys: tuple[str, ...]) -> list[tuple[str, Place]]:
    """Return the objects that have the attributes among these places: their keys and places."""
    found = [(holder, kind) for *holder, (kind, _, _) in map(place_of, keys)]
    return [(key_of(tuple(holder)), tuple(holder)) for holder, kind in found if kind == "attribute" and holder]


def _is_in(place: Place, rebound: Collection[Place]) -> bool:
    """Return whether a place is one of these, or in one."""
    return any(place[:length] in rebound for length in range(1, len(place) + 1))


def _is_class_at_home(one: Kept, value: Any) -> bool:
    """Return whether it is a class of the script's, where it was defined: its attributes alone can change."""
    if not isinstance(value, type) or not is_user_type(value):
        return False
    home = name_of_callable(value)
    return home is None or place_of(one.key) == (("module", *home.split(":")),)
