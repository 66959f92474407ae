"""The places that a script carries, what was left out, and why equal bits cannot be vouched for then."""

import functools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from relight.training.carried.code.refs import Place, describe, is_iterator
from relight.training.carried.finding import refusals
from relight.training.carried.finding.compare import Comparison
from relight.training.carried.finding.kept import CHANGES, MOST_MODULE_BYTES, NEVER, Kept
from relight.training.carried.finding.late_modules import LateModules
from relight.training.carried.finding.loop import Loop
from relight.training.carried.finding.places import Spots, key_of, leads_into_function, place_of
from relight.training.carried.finding.spots.spot import MISSING, Spot
from relight.training.carried.finding.told.fingerprinted import Fingerprinted
from relight.training.carried.finding.told.orders import is_iterated
from relight.training.carried.finding.told.unrepeatable import Unrepeatable
from relight.training.carried.values.homes import Homes
from relight.training.carried.values.parts import NoParts, Parts
from relight.training.carried.values.parts import is_part as is_part_of
from relight.training.state.values.fingerprints import has_fingerprint
from relight.training.state.values.kinds import HOLDERS, kind_of
from relight.training.state.values.marks import changed, remember

_attributes = operator.attrgetter("__dict__")
_INCOMPLETE = (
    "the values that the loop can reach are too many, or too large, to compare all of them (docs/CARRIED.md). A change "
    "of one by code that relight cannot read may be missed: training.carry(...) names what such code changes"
)


class Catalog:
    """Lists carried variables and those that were left out, and the messages about them."""

    def __init__(
        self,
        is_foreign: Callable[[Any], bool],
        say: Callable[[str, str], None],
        is_of_data: Callable[[Any], bool],
        parts: Parts | None,
    ) -> None:
        self.parts = parts or NoParts()
        self.loop = Loop(self.parts)
        self.kept: dict[str, Kept] = {}
        self.homes = Homes()
        self.shown_after: list[str] = []  # names that code after the loop may read
        self._spots = self.loop.spots
        self._is_foreign, self.is_of_data, self.say = is_foreign, is_of_data, say
        self.comparison = Comparison(self._spots, lambda thing: self.is_foreign(thing) or is_of_data(thing))
        self.left_out: set[str] = set()
        self.lost: list[str] = []  # of these, what decides a step: a replacement lacks it
        self._late = LateModules(self._spots)
        self.left_out_why = ""  # of what decides a step, perhaps
        self.dead: set[Place] = set()  # written before they are read: nothing of them is carried
        self.ignored: set[str] = set()
        # Attributes that the code sets on tensors, on parameters perhaps, and whether after the last write of a step.
        self.watched: dict[str, bool] = {}
        self._parameters: dict[Place, torch.Tensor] = {}  # those that were handed over
        self._unset: tuple[Any, list[str]] = None, []  # what `unset` has found, and for which places that are covered
        self._stands_for: dict[str, tuple[Kept, Any]] = {}  # names of parts of what was handed over, and their marks
        fingerprinted = Fingerprinted(lambda thing: is_part_of(self.parts, thing) or self.is_foreign(thing))
        self.unrepeatable = Unrepeatable(self.comparison.look, self._is_told_otherwise, fingerprinted, self._spots)

    @property
    def is_idle(self) -> bool:
        """True if a step needs nothing remembered."""
        return not (self.kept or self.watched) and self.comparison.is_idle

    def begin(self) -> None:
        """The loop is found."""
        survey = self.comparison.look()
        for place, thing in self.comparison.objects(survey):
            self.homes.name(key_of(place), thing)  # a variable that comes to stand for it means this very object
        for place in self.comparison.of_loaders():
            if not self.is_covered(place):
                self.keep(place, seen=True)
        owners = self.parts.owners()
        self._parameters = {(("slot", n[1], n[2]),): one for n, one in owners if isinstance(one, torch.Tensor)}
        self._watch()
        self.unrepeatable.begin(survey, self.ignored)

    def is_foreign(self, thing: Any) -> bool:
        """Return whether an object's attributes are kept otherwise, and an integration has not shown it."""
        return id(thing) not in self._spots.keepers and self._is_foreign(thing)

    # --- what is kept ------------------------------------------------------------------------------------------
    def keep(
        self,
        place: Place,
        where: str = "",
        *,
        feeds: bool = True,
        late: bool = False,
        seen: bool = False,
        after_write: bool = False,
        is_left: bool = False,
        mark: Any = NEVER,
    ) -> Kept | None:
        """Carry a place from now on. None: it is left out, is not there, or is kept otherwise.

        `mark`: of the value that it began with, if that is not the present one.
        """
        name, key = describe(place), key_of(place)
        if key in self.kept or key in self.left_out:
            return self.kept.get(key)
        is_not_wanted = self.is_ignored(name) or self._spots.is_kept_otherwise(place)
        if is_not_wanted or (spot := self._spots.find(place)) is None:
            return None
        one, value = Kept(key, name, where, spot, feeds, late, is_left, seen=seen, after_write=after_write), spot.get()
        is_part = self.is_foreign(value) and not _is_carried_anyway(value, late=late, seen=seen)
        if value is not MISSING and not is_part and self.is_of_data(value):
            return None
        self.homes.add(key, value if mark is NEVER else mark)
        if value is not MISSING and is_part:  # until it means another
            self._stands_for.setdefault(key, (one, self.mark_of(value, one) if mark is NEVER else mark))
            return None
        one.is_of_data = holder_in_data(place, self._spots, self.is_of_data) is not None
        _put(one, place, self.kept, self._spots)
        return one

    def receive(self, place: Place) -> tuple[Kept | None, Spot]:
        """A place for which another process gives a value. Raises UsageError if this one has no such place."""
        key = key_of(place)
        self.left_out.discard(key)
        one = self.kept.get(key) or self.keep(place, seen=True)
        if key in self._stands_for:
            one = self.kept[key] = self._stands_for.pop(key)[0]
        spot = one.spot if one is not None else self._spots.find(place)
        if spot is None:
            raise refusals.of_missing_name(describe(place))
        return one, spot

    def leave_out(self, one: Kept, why: str) -> None:
        """Do not carry this any more, and say so; unless it is only shown, undo it with its step all the same."""
        if one.seen or one.feeds or is_iterator(one.spot.get()):
            self.kept.pop(one.key, None)
            self.left_out.add(one.key)
        one.is_written = False
        if one.decides or one.has_tensors:
            self.left_out_why = f"{one.shown} {CHANGES}, and is not carried: {why}"
        self.say(f"carried {one.name}", one.left_out(why))

    def refuse_or_leave_out(self, one: Kept, value: Any, why: str) -> None:
        """A value that cannot be written down. Raises UsageError in the first steps, if the code shows it to decide.
        No job ends for what has a fingerprint: after a recovery the bits are not known."""
        if one.decides and not (one.seen or has_fingerprint(value) or self.is_foreign(value)):
            if self.comparison.is_first_of_job:
                raise one.refusal(why)
            self.lost.append(one.key)  # to end a job which may never fail would be worse than to doubt its bits
        if isinstance(value, nn.Module) or one.is_late(value, self.homes):
            self._late.note(one.key, value, self.comparison.number)
        self.leave_out(one, why)

    def divide(self, one: Kept, can_be_written: Callable[[Kept, Any], bool]) -> None:
        """Carry the attributes of an object, a trainer say, that cannot be written down whole; others must stay."""
        del self.kept[one.key]
        _write_by_themselves(one.key, self.kept)
        for name, value in self._spots.own_attributes(one.spot.get()).items():
            place: Place = (*place_of(one.key), ("attribute", name, ""))
            own, spot = self.kept.pop(key_of(place), None), self._spots.find(place)
            if own is not None:
                _put(own, place, self.kept, self._spots)
            if own is not None or spot is None or name.startswith("__"):  # of a class
                continue
            part = replace(one, key=key_of(place), name=describe(place), spot=spot, was_tried=True, mark=None)
            part.mark = self.mark_of(value, part)
            is_whole = can_be_written(part, value)
            if not is_whole and kind_of(value) != "object":
                self._stands_for.setdefault(part.key, (part, part.mark))
                continue
            _put(part, place, self.kept, self._spots)
            if is_whole:
                self.homes.add(part.key, value)
            else:
                self.divide(part, can_be_written)

    def unchanged_parts(self) -> list[Kept]:
        """Names that have stood for the same part of the state since the loop began."""
        return [one for one, _ in self._stands_for.values()]

    def follow_parts(self) -> None:
        """Carry the names that stand for another part of the state than at first, or for none."""
        if not self._stands_for:
            return
        self._spots.frames.forget()
        for key, (one, began) in list(self._stands_for.items()):
            if changed(began, one.spot.get()):
                one.mark = began
                self.kept[key] = one
                del self._stands_for[key]

    def mark_of(self, value: Any, one: Kept) -> Any:
        """A value as it is now. Tensors of what is left out are not copied: only which they are is put back."""
        is_part = functools.partial(is_part_of, self.parts)
        is_kept_otherwise = is_part if one.is_written else lambda thing: isinstance(thing, torch.Tensor)
        return remember(value, grows=one.only_grows, members_stay=one.is_only_added_to, is_part=is_kept_otherwise)

    # --- by values ---------------------------------------------------------------------------------------------
    def begin_comparison(self, number: int) -> None:
        """Compare step `number`, which begins; carry also what has changed since the last comparison."""
        for place in self.comparison.begin(number, self._is_told_otherwise, self.unrepeatable.see):
            if self._late.has(place, number, is_first=False):
                continue  # it was left out, and that was said
            spot = self._spots.find(place)
            was = None if spot is not None and kind_of(spot.get()) == "object" else NEVER  # else it has its home
            if not self.is_covered(place) and (one := self.keep(place, seen=True, mark=was)) is not None:
                one.noticed = number - 1  # a step before this one has changed it
        self.unrepeatable.begin_step(is_looked_at=self.comparison.is_due)
        if self.comparison.is_incomplete:
            self.say("incomplete", _INCOMPLETE)

    def notice(self, *, between: bool, early: bool = False) -> list[Kept]:
        """Carry also what changed although the code did not show it, and return that.

        `early`: the block is not over. A context that it is in, such as autocast, may still end with it.
        """
        step, is_first, new = self.comparison.number - between, self.comparison.is_first, []
        for change in self.comparison.changes(self.is_covered, settings=not early):
            if self._late.has(change.place, step, is_first=is_first):
                continue  # it was left out, and that was said
            if change.module is not None and change.nbytes > MOST_MODULE_BYTES:
                raise refusals.of_module_by_values(describe(change.module), change.place[-1][1])
            one = self.keep(change.place, late=between, seen=True, mark=change.mark)
            if one is not None:
                new.append(one)
                one.mark = change.mark
                one.noticed = self.comparison.number if self.comparison.is_due else -1
        for one in self._watch():
            one.mark = remember(MISSING)
        if between:
            self.comparison.end()
        return new

    def _watch(self) -> list[Kept]:
        """Carry attributes that parameters did not have before."""
        if not self.watched or not any(map(_attributes, self._parameters.values())):  # mostly there are none
            return []
        new = []
        for place, owner in self._parameters.items():
            for attribute in sorted(self.watched.keys() & vars(owner).keys()):
                at = (*place, ("attribute", attribute, ""))
                if not self.is_covered(at) and (one := self.keep(at, seen=True)) is not None:
                    one.after_write = self.watched[attribute]
                    new.append(one)
        return new

    def unset(self) -> list[str]:
        """Attributes that the rest of a step, after its last write, may set on parameters for the first time."""
        late = {name for name, after_write in self.watched.items() if after_write and not hasattr(torch.Tensor, name)}
        if not late:
            return []
        if (covering := ([*self.kept], {*self.left_out})) != self._unset[0]:
            places = [(*place, ("attribute", name, "")) for place in self._parameters for name in sorted(late)]
            self._unset = covering, [key_of(place) for place in places if not self.is_covered(place)]
        return self._unset[1]

    def is_covered(self, place: Place) -> bool:
        """Return whether what holds this place is carried as a whole, or is dead. Of functions nothing is carried."""
        for length in range(1, len(place) + 1):
            if place[:length] in self.dead:
                return True
            if key_of(place[:length]) in self.kept and not leads_into_function(self._spots, place, length):
                return True
        return key_of(place) in self.left_out

    def _is_told_otherwise(self, place: Place) -> bool:
        """Return whether nothing need be told of a place: it is covered, or the script left it out."""
        return self.is_covered(place) or self.is_ignored(describe(place))

    def is_ignored(self, name: str) -> bool:
        """Return whether the script left it out: by this name, its last part, or that of what holds it."""
        return not self.ignored.isdisjoint(_names_of(name))

    # --- doubts ------------------------------------------------------------------------------------------------
    def doubt_order(self, one: Kept) -> None:
        """Doubt the bits if steps iterate over this set: its order depends on members that it no longer has."""
        if not self.left_out_why and is_iterated(one.name, [frame for frame in self._spots.frames.frames if frame]):
            self.left_out_why = (
                f"{one.shown}: steps go through a set, in an order that another process cannot repeat. Go through "
                "sorted(...), or use a dict"
            )


def holder_in_data(place: Place, spots: Spots, is_of_data: Callable[[Any], bool]) -> Place | None:
    """Return the first object on the way to a place that the data holds, if there is one."""
    for length in range(1, len(place)):
        spot = spots.find(place[:length])
        if spot is not None and spot.get() is not MISSING and is_of_data(spot.get()):
            return place[:length]
    return None


def _is_carried_anyway(part: Any, *, late: bool, seen: bool) -> bool:
    """Return whether a place is carried although its value was handed over, or is a container of such values.

    `late`: it is written after the block. `seen`: something else in the container was seen to change.
    """
    return (late and not isinstance(part, nn.Module)) or (seen and kind_of(part) in HOLDERS)


def _put(one: Kept, place: Place, kept: dict[str, Kept], spots: Spots) -> None:
    """Keep a place. Parts of it are undone by themselves, and written down with it."""
    for part in kept.values():
        if place_of(part.key)[: len(place)] == place:
            one.write_down_with(part)
    for length in range(1, len(place)):
        whole = kept.get(key_of(place[:length]))
        if whole is not None and whole.is_written and not leads_into_function(spots, place, length):
            whole.write_down_with(one)
    kept[one.key] = one


def _write_by_themselves(whole: str, kept: Mapping[str, Kept]) -> None:
    """Write those down that were written with a place which is not kept any more."""
    for part in kept.values():
        if part.whole == whole:
            part.is_written, part.whole = True, ""


def _names_of(name: str) -> list[str]:
    """Return the name of a place, its last part, and the names of all that holds it.

    What a function encloses has its own name as well: `seen of act()` is `seen`.
    """
    inner = name.partition(" of ")[0]
    return [name, inner, name.rpartition(".")[2], *(name[: found.start()] for found in re.finditer(r"[.\[]", name))]
