"""Knowledge while an iteration is read: places written so far, places read before that, and what each feeds."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from relight.training.carried.code.refs import UNKNOWN, Key, Place, Ref, has_contents
from relight.training.torch_private.tensors import is_plain_memory
from relight.transfer.io.codec import local_part

Use = frozenset[Key] | None  # what a value that is read goes into; None: something that has an effect
NOWHERE: Use = frozenset()  # it is only shown, or thrown away
ASKED_FOR = "files that steps ask for"  # a place like a variable's, for whether they exist
FILES = Ref(("files", 0, ""), None, (("setting", "", ASKED_FOR),))
_DEEPEST, _MOST = 3, 64  # of containers that are looked into
State = set[Key] | None  # what was written on every way that leads here; None: no way does


class Flow:
    """Reads and writes of places, in the order in which they run."""

    def __init__(self) -> None:
        self.state: State = set()
        self.late = False  # the step's block has ended
        self.outside: set[Key] = set()  # names that stand for parts of what was handed over, or of a library's objects
        self.places: dict[Key, Place] = {}
        self.values: dict[Key, Any] = {}  # what was there before the first step
        self.exposed: set[Key] = set()  # read before they are written
        self.writes: dict[Key, tuple[str, int]] = {}
        self.written_late: set[Key] = set()
        self.changed_in_place: set[Key] = set()
        self.rearranged: set[Key] = set()  # the same, otherwise than by what is added at the end
        self.used: set[Key] = set()  # read, and more than a method called whose result is thrown away
        self.is_called_alone = False  # what is read now is the receiver of such a call
        self._ends: list[State] = []  # of the ways through the iteration
        self._members: dict[Key, set[Key]] = {}  # places in what other places hold
        self._read_whole: set[Key] = set()
        self._edges: dict[Key, set[Key]] = {}
        self._sinks: set[Key] = set()
        self.is_for_files = False  # what is read decides only which files are changed
        self.files_changed: tuple[str, int] | None = None  # where code above the block, or in it, first does so
        self.sets_epoch = False  # what is read now only gives an object the number of the epoch
        self._of_epoch: set[Key] = set()
        self._otherwise: set[Key] = set()  # written, and not so
        self._set_on_tensors: dict[str, int] = {}  # attributes of what may be tensors: positions of their last writes
        self._written_at: dict[Key, int] = {}  # the position of the last write of each
        self._position = 0  # so many writes and steps of optimizers were read
        self._steps: list[int] = []  # positions of calls of an optimizer's `step`
        self._perhaps_steps: list[int] = []  # of calls of the `step` of an unknown object

    def read(self, ref: Ref, use: Use, *, whole: bool = True) -> None:
        """A value is read. `whole`: with all that it holds; False: on the way to a member, which is read by itself."""
        key = self._key(ref)
        if key is None:
            return
        if whole:
            self._read_whole |= {key, *([ref.alias.key] if ref.alias is not None and ref.alias.key else [])}
        if self.state is not None and not self._is_written(key):
            self.exposed.add(key)
        if not self.is_called_alone and use != NOWHERE:
            self.used.add(key)
        self.feed(key, use)

    @contextmanager
    def for_files(self, holds: bool = True) -> Iterator[None]:
        """Count what is read inside as read to decide which files are changed, if that `holds`."""
        outer, self.is_for_files = self.is_for_files, holds or self.is_for_files
        try:
            yield
        finally:
            self.is_for_files = outer

    def feed(self, key: Key, use: Use) -> None:
        """The value at `key` goes into `use`."""
        if self.is_for_files and (key == FILES.key or key in self._edges.get(FILES.key, ())):  # type: ignore[arg-type]
            return
        if use is None:
            self._sinks.add(key)
        else:
            self._edges.setdefault(key, set()).update(other for other in use if other != key)

    def write(self, ref: Ref, where: tuple[str, int]) -> None:
        """The place gets another value."""
        key = self._key(ref)
        if key is not None:
            self._record(key, where)
            if self.state is not None:
                self.state.add(key)

    def mutate(self, ref: Ref, where: tuple[str, int], *, grows: bool = False) -> None:
        """Note that the value at a place changes. `grows`: by what is added at its end."""
        for one in (ref, ref.alias):
            if one is not None and (key := self._key(one)) is not None:
                self.read(one, frozenset({key}))
                self._record(key, where)
                self.changed_in_place.add(key)
                if not grows:
                    self.rearranged.add(key)

    def is_rearranged(self, place: Place) -> bool:
        """Return whether something in a place changes otherwise than by what is added at its end."""
        changed = map(self.places.get, self.rearranged)
        return any(one is not None and one[: len(place)] == place for one in changed)

    def change_files(self, where: tuple[str, int]) -> None:
        """Files are made, changed or removed."""
        self.mutate(FILES, where)
        if not self.late and self.files_changed is None:
            self.files_changed = where

    def set_on_tensor(self, attribute: str) -> None:
        """An attribute of a tensor, or of an object that may be a tensor, gets a value."""
        self._position += 1
        self._set_on_tensors[attribute] = self._position

    def step(self, *, is_certain: bool) -> None:
        """An optimizer is called to write; or an object of which that is not known."""
        self._position += 1
        (self._steps if is_certain else self._perhaps_steps).append(self._position)

    def is_after_step(self, key: Key) -> bool:
        """Return whether a place is written after the last step of an optimizer, or may be."""
        return self._is_after_step(self._written_at.get(key, 0))

    def is_of_epoch(self, key: Key) -> bool:
        """Return whether a place only gets the number of the epoch, by `set_epoch`."""
        return key in self._of_epoch and key not in self._otherwise

    def written_after_write(self) -> set[Key]:
        """Return places written after the last step of an optimizer, or after the block, as far as it was read."""
        return {key for key in self._written_at if key in self.written_late or self.is_after_step(key)}

    def attributes_of_tensors(self) -> dict[str, bool]:
        """Attributes that are set on what may be tensors, and whether that is after the last step of an optimizer."""
        return {name: self._is_after_step(position) for name, position in self._set_on_tensors.items()}

    def _is_after_step(self, position: int) -> bool:
        last = self._steps[-1:] or self._perhaps_steps[:1]
        return bool(last) and position > last[0]

    def merge(self, *states: State) -> None:
        """Ways come together here."""
        for state in states:
            if state is not None:
                self.state = set(state) if self.state is None else self.state & state

    def end_turn(self) -> None:
        """A way through the iteration ends here."""
        self._ends.append(None if self.state is None else set(self.state))

    def may_remain(self, key: Key) -> bool:
        """Return whether some way through the iteration leaves what an earlier one wrote."""
        return any(end is not None and key not in end for end in self._ends)

    def hold(self, base: Ref, member: Ref) -> None:
        """Note that the value at `member` is part of the value at `base`."""
        for one in (base, base.alias):
            if one is not None and None not in (one.key, member.key) and one.key != member.key:
                self._members.setdefault(one.key, set()).add(member.key)  # type: ignore[arg-type]
                self.feed(member.key, frozenset({one.key}))  # type: ignore[arg-type]

    def hold_the_same(self) -> None:
        """One object in several places before the first step: what is in one of these is in the others."""
        keys: dict[int, list[Key]] = {}
        for key, value in self.values.items():
            for number in _ids_in(value, 0):
                keys.setdefault(number, []).append(key)
        for key, value in list(self.values.items()):
            for number in _ids_in(value, _DEEPEST):
                for other in keys.get(number, ()):
                    self.hold(Ref(key), Ref(other))
        for same in keys.values():
            self._change_all(same)

    def _change_all(self, same: list[Key]) -> None:
        """Note in each of these places, which have one object, what changes it in another one."""
        changed = sorted(self.changed_in_place.intersection(same), key=self._written_at.__getitem__)
        for key in same if changed else ():
            if key in self.writes:
                continue
            self.writes[key] = self.writes[changed[0]]
            self._written_at[key] = self._written_at[changed[-1]]
            if not self.written_late.isdisjoint(changed):
                self.written_late.add(key)

    def expose_members(self) -> None:
        """All of a value was read: each place in it may have been read before it was written."""
        left = list(self._read_whole)
        seen: set[Key] = set()
        while left:
            for member in self._members.get(left.pop(), set()) - seen:
                seen.add(member)
                left.append(member)
        self.exposed |= seen

    def feeding(self) -> set[Key]:
        """Places whose value reaches something that has an effect."""
        sources: dict[Key, set[Key]] = {}
        for key, others in self._edges.items():
            for other in others:
                sources.setdefault(other, set()).add(key)
        seen, left = set(self._sinks), list(self._sinks)
        while left:
            new = sources.get(left.pop(), set()) - seen
            seen |= new
            left += new
        return seen

    def _key(self, ref: Ref) -> Key | None:
        if ref.key is not None and ref.place is not None:
            self.places.setdefault(ref.key, ref.place)
            self.values.setdefault(ref.key, ref.value)
        return ref.key

    def _is_written(self, key: Key) -> bool:
        assert self.state is not None
        while key not in self.state:
            if key[0] != "of":
                return False
            key = key[1]  # an attribute of something that was itself written
        return True

    def _record(self, key: Key, where: tuple[str, int]) -> None:
        self.writes.setdefault(key, where)
        (self._of_epoch if self.sets_epoch else self._otherwise).add(key)
        self._position += 1
        self._written_at[key] = self._position
        if self.late:
            self.written_late.add(key)


def _ids_in(value: Any, depth: int) -> Iterator[int]:
    """The ids of a container and of the containers in it; of tensors where they lie, since they may be views."""
    if value is UNKNOWN or not has_contents(value):
        return
    own = local_part(value) if isinstance(value, torch.Tensor) else None
    yield id(value) if own is None or not is_plain_memory(own) else own.untyped_storage().data_ptr()
    if depth and isinstance(value, (list, dict)) and len(value) <= _MOST:
        for one in list(value.values() if isinstance(value, dict) else value):
            yield from _ids_in(one, depth - 1)
