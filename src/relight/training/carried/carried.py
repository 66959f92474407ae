"""State that a script carries from step to step by itself: found, kept with the rank-private state, and put back.

What is carried is found in the code of the loop before the first step, and by values in the first steps. The value that
belongs to a version is the one with which the loop asks for its step: code above `with step` runs in every attempt, and
in a replacement.
"""

import functools
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from relight.errors import UsageError
from relight.training.carried.compare import FIRST_STEPS, Comparison
from relight.training.carried.kept import (
    CHANGES,
    MOST_BYTES,
    MOST_LEAVES,
    MOST_LOG_BYTES,
    MOST_LOG_LEAVES,
    MOST_MODULE_BYTES,
    MOST_SEEN_BYTES,
    MOST_SHOWN_BYTES,
    Kept,
)
from relight.training.carried.loop import Loop
from relight.training.carried.names import Found, names_of
from relight.training.carried.parts import NoParts, Parts
from relight.training.carried.parts import is_part as is_part_of
from relight.training.carried.places import MISSING, key_of, place_of
from relight.training.carried.refs import Place, describe, is_iterator
from relight.training.carried.sizes import has_tensors, keys_of, leaves_of, size_of, tensor_bytes
from relight.training.carried.source import short
from relight.training.carried.trees import (
    TAG,
    Homes,
    Reader,
    Unsupported,
    Writer,
    name_of,
    write_down,
)
from relight.training.carried.unrepeatable import drawing_caches, is_iterated, keeps_its_order, only_grows
from relight.training.carried.values import changed, kind_of, put_back, remember

_HAND_OVER = 'model={{"model": model, "{0}": {0}}}), or, if it differs between ranks, per_rank={{"{0}": {0}}}'
_NAMED = 5  # places in a message
_MISSING_TREE = {TAG: "missing"}


class Carried:
    """Owned by the main thread. `turn` and `remember` begin a step; `commit` or `roll_back` ends it."""

    def __init__(
        self,
        is_foreign: Callable[[Any], bool],
        say: Callable[[str, str], None],
        *,
        is_id: Callable[[int], bool] = lambda _: False,
        is_of_data: Callable[[Any], bool] = lambda _: False,
        parts: Parts | None = None,
    ) -> None:
        """`is_foreign`: of an object whose attributes are kept otherwise: what was handed over, and relight's own.

        `parts` names what was handed over, so that it can be carried which of it a name stands for.

        `say` tells the user something once, by a key. `is_id`: of a number that is the `id` of a tensor handed over.
        `is_of_data`: of an object that dataset, sampler or `collate_fn` holds, or is.
        """
        self._is_of_data = is_of_data
        self._parts = parts or NoParts()
        self._is_foreign = is_foreign
        self._is_id = is_id
        self._say = say
        self._loop = Loop()
        self._spots = self._loop.spots
        self._kept: dict[str, Kept] = {}
        self._homes = Homes()
        self._left_out: set[str] = set()
        self._dead: set[Place] = set()
        self._declared_names: list[str] = []
        self._ignored: set[str] = set()
        self._missed = False  # the first values are those at the entry of the first step
        self._in_step = False
        self._again = False  # the last step was rolled back
        self._pending: dict[str, Any] | None = None  # to be put in at the next entry
        self._comparison = Comparison(self._spots, self._is_elsewhere)
        self._left_out_why = ""  # of what decides a step, perhaps
        self._stands_for: dict[str, tuple[Kept, Any]] = {}  # names of parts of what was handed over, and their marks
        self._drawn_before: dict[str, int] = {}  # `_caches` when the loop began
        self._shown_after: list[str] = []
        self._was_unsettled = False
        self._captures = 0
        self._looks = 0

    # --- what the user says ------------------------------------------------------------------------------------
    def declare(self, *things: Any, ignore: Sequence[str] = ()) -> None:
        """Carry these too: names as strings, as the loop's function sees them (`"h"`, `"self.mean"`), or objects."""
        for thing in things:
            if isinstance(thing, str):
                self._declared_names.append(thing)
            else:
                try:
                    write_down(thing)
                except Unsupported as problem:
                    raise UsageError(
                        f"training.carry() was given {name_of(thing)}, which holds {problem}: carry tensors, numbers, "
                        "strings, containers and objects of these, or generators of random numbers; hand over what "
                        "has a state_dict(): relight.Training(..., per_rank={...})"
                    ) from None
                self._loop.declared.append(thing)
        self._ignored.update(ignore)

    # --- a step ------------------------------------------------------------------------------------------------
    def turn(self, frame: FrameType) -> str | None:
        """The loop asks for a step, from a frame that called this one.

        Returns why equal bits cannot be vouched for. Raises UsageError for what is carried and cannot be kept.
        """
        if not self._loop.is_found:
            self._loop.ask(frame)
            if (ahead := self._loop.ahead) is not None:
                self._find(*ahead)
            else:
                if self._pending is not None:
                    self._loop.look_for(frame, *self._pending["loop"])
                    self._put_in()
                return None
        if not self._kept and not self._comparison.is_due and self._pending is None:
            return None
        self._loop.look_at(frame)
        doubt = None
        if self._again:
            self._put_back()  # also what code between steps did after a step that does not count
            if self._missed and self._pending is None and self._loop.computes_above and self.decides:
                doubt = (
                    f"{', '.join(self.names)}: carried by the script from its first step on, and that step was "
                    "interrupted. Put `with step` into the function that has the loop"
                )
            self._again = False
        if self._pending is not None:
            self._put_in()
        self._notice(between=True)
        return doubt

    def enter(self, frame: FrameType) -> None:
        """`with step` in this frame: the first one shows the loop, if its head did not."""
        if self._loop.is_found:
            return
        self._find(frame)
        self._missed = True
        if self._pending is not None:
            self._put_in()
        self.remember()

    def remember(self) -> None:
        """What `roll_back` goes back to: the values now."""
        if not self._loop.is_found:
            return
        self._in_step = True
        self._follow_parts()
        if not self._kept and not self._comparison.is_due:
            return
        self._spots.frames.forget()
        for one in self._kept.values():
            one.mark = self._remember(one.spot.get(), one)
        if self._comparison.is_due:
            self._comparison.begin()
        self._spots.frames.forget()

    def commit(self) -> None:
        """The step counts."""
        self._in_step = False
        self._again = self._missed = False
        self._comparison.commit()
        self._spots.frames.forget()

    def roll_back(self) -> None:
        """Put back what the step under way changed; what code changes before the next turn is put back there."""
        if self._in_step:
            self._in_step = False
            self._again = True
            self._spots.frames.forget()
            self._notice(between=False)
            self._put_back()

    def end(self, *, computed: bool) -> str | None:
        """The loop is about to end. `computed`: steps were computed in this process.

        Returns why the code after the loop does not see what it would have.
        """
        if computed or not self._shown_after:
            return None
        return (
            f"{', '.join(sorted(self._shown_after))}: set by the last step and used after the loop, and a rank was "
            "lost after its last step"
        )

    def risk(self) -> str:
        """In a recovery: why equal bits cannot be vouched for, if something changes and is not carried."""
        self._spots.frames.forget()
        self._follow_parts()
        if self._left_out_why:
            return self._left_out_why
        if caches := [name for name, drawn in self._caches().items() if drawn > self._drawn_before.get(name, 0)]:
            return (
                f"{', '.join(sorted(caches))}(): a cached function that draws random numbers. What it drew is not "
                "undone with a step, and a replacement draws anew. Call it before the loop, or keep what it returns "
                "in a variable"
            )
        places = [place for place in self._comparison.changed_since() if not self._is_covered(place)]
        self._spots.frames.forget()
        names = sorted({describe(place) for place in places} - self._ignored)
        if not names:
            return ""
        return (
            f"{', '.join(names[:_NAMED])}: changed by the script for the first time after its first steps, in a way "
            "that its code does not show, and so neither undone with a step nor carried to a replacement. If a step "
            "depends on it: training.carry(...); else training.carry(ignore=(...,))"
        )

    def leave(self) -> None:
        """The loop has ended: no frame is held any more."""
        self._loop.leave()
        self._comparison.leave()

    # --- the private state -----------------------------------------------------------------------------------
    def capture(self) -> dict[str, Any]:
        """The values now, as a tree for `encode_tree`. Empty: nothing is carried.

        Raises UsageError for a value that decides what a step computes and cannot be kept.
        """
        self._spots.frames.forget()
        if self._in_step:
            self._notice(between=False)
        self._follow_parts()
        if not self._kept:
            self._spots.frames.forget()
            return {}
        self._captures += 1
        weigh = self._captures <= 2 * FIRST_STEPS or self._captures % 16 == 0
        names: dict[str, Any] = {}
        of_calls: dict[str, Any] = {}  # read back later, once the functions run to which they are given
        writers, total = (Writer(self._homes, self._parts), Writer(self._homes, self._parts)), 0
        written = [(one, one.spot.get()) for one in self._kept.values() if one.is_written]
        for one, value in written:
            writers[one.is_of_a_call].look_at(value)
        for one, value in written:
            if isinstance(value, (set, frozenset)) and not (keeps_its_order(value) and only_grows(one.kept, value)):
                self._doubt_order(one)
            one.kept = self._remember(value, one)
            tree = self._written_down(one, value, weigh, writers[one.is_of_a_call])
            if tree is None:
                continue
            (of_calls if one.is_of_a_call else names)[one.key] = tree
            if weigh and one.feeds:
                total += size_of(tree)
                if total > MOST_BYTES:
                    raise one.refusal(f"over {MOST_BYTES >> 20} MiB with what else is carried")
        if not names and not of_calls:
            return {}
        unsettled = [one.key for one in self._kept.values() if one.feeds and one.late] if self._in_step else []
        lacking = [key for key in (*names, *of_calls) if self._in_step and self._kept[key].may_move_on]
        self._was_unsettled = bool(unsettled or lacking)
        self._spots.frames.forget()
        found = {"unsettled": unsettled, "lacking": lacking}  # what a step may change after this
        return {"names": names, "of_calls": of_calls, **found, "loop": self._loop.place}

    def look(self) -> int:
        """A number that is another one once something that decides a step has changed."""
        if self._kept:
            self._spots.frames.forget()
            for one in self._kept.values():
                if one.feeds:
                    value = one.spot.get()
                    if changed(one.looked, value):
                        one.looked = self._remember(value, one)
                        self._looks += 1
            self._spots.frames.forget()
        return self._looks

    @property
    def needs_keeping(self) -> bool:
        """At a turn of the loop: whether code between steps changed what was kept at the barrier, or may have."""
        self._follow_parts()
        if not self._kept:
            return False
        if not self._captures:
            return True
        self._spots.frames.forget()
        found = [one for one in self._kept.values() if one.is_written and changed(one.kept, one.spot.get())]
        for one in found:
            one.moves_on = not one.feeds
        self._spots.frames.forget()
        return self._was_unsettled or bool(found)

    @property
    def computes_above(self) -> bool:
        """Whether code stands between the loop's head and `with step`; also if that is not known."""
        return self._loop.computes_above

    @property
    def computes_outside(self) -> bool:
        """Whether the script's code may run between two steps; also if that is not known."""
        return self._loop.computes_outside

    @property
    def decides(self) -> bool:
        """Whether anything that is carried decides what a step computes."""
        return any(one.feeds for one in self._kept.values())

    @property
    def names(self) -> list[str]:
        """What is carried, for messages: `NAME (FILE:LINE)`."""
        return [one.shown for one in self._kept.values()]

    def adopt(self, tree: dict[str, Any] | None) -> str | None:
        """Values of another process, to be put in at the next turn. Returns why equal bits cannot be vouched for."""
        self._in_step = False
        self._pending = tree or None
        if not tree:
            return None
        if tree["unsettled"]:
            return (
                f"{_described(tree['unsettled'])}: carried by the script, changed after the block, and a rank was lost "
                "before that was kept. Change them inside `with step`"
            )
        if tree["lacking"]:
            return (
                f"{_described(tree['lacking'])}: only accumulated or shown, changed after the last write of a step, "
                "and a rank was lost just there: its replacement lacks what that step added. Change them before the "
                "write, or use step.report(...) and training.log_to(...)"
            )
        return None

    # --- finding -----------------------------------------------------------------------------------------------
    def _find(self, frame: FrameType, line: int = 0) -> None:
        """From the frame that has the block, at `line` if it does not stand there yet."""
        self._kept.clear()
        loop = self._loop
        iteration, frames = loop.find(frame, line)
        for index in range(len(loop.declared)):
            self._keep((("declared", str(index), f"object {index} of training.carry()"),), "", True, False)
        if iteration is None:
            self._say(
                "carried",
                f"{short(frame.f_code.co_filename)}:{frame.f_lineno}: the source of this loop cannot be read, so what "
                "it carries from step to step is looked for by its values alone: name the rest with training.carry()",
            )
        else:
            names = names_of(iteration, frames, self._is_foreign)
            self._shown_after = names.shown_after
            self._dead = {place if len(place) == 1 else loop.lasting(place) for place in names.dead}
            for found in names.found.values():
                self._keep_found(found)
        for text in self._declared_names:
            self._keep_named(text)
        loop.look_at(frame)
        self._drawn_before = self._caches()

    def _keep_found(self, found: Found) -> None:
        where = f"{short(found.file)}:{found.line}"
        if (holder := self._of_data(found.place)) is not None:
            self._refuse_of_data(found, where, holder)
            return
        one = self._keep(self._loop.lasting(found.place), where, found.feeds, found.late)
        if one is None:
            return
        if not found.is_counted:
            self._refuse_iterator(one)
            if one.feeds and isinstance(module := one.spot.get(), nn.Module):
                raise UsageError(
                    f"{where}: {one.name}, {name_of(module)}, changes from step to step, and was not handed over: "
                    f"relight.Training({_HAND_OVER.format(one.name)}"
                )
        elif one.feeds:
            raise UsageError(
                f"{where}: {one.name} is counted beside training.steps(), and a replacement would begin to count anew: "
                "use step.number"
            )
        else:
            self._leave_out(one, "it is counted beside training.steps(): use step.number")

    def _is_elsewhere(self, thing: Any) -> bool:
        return self._is_foreign(thing) or self._is_of_data(thing)

    def _of_data(self, place: Place) -> Place | None:
        """The first object on the way to a place that the data holds, if there is one."""
        for length in range(1, len(place)):
            spot = self._spots.find(place[:length])
            if spot is not None and spot.get() is not MISSING and self._is_of_data(spot.get()):
                return place[:length]
        return None

    def _refuse_of_data(self, found: Found, where: str, holder: Place) -> None:
        """What was read before cannot be read again alike, if it depends on this. Plain values are kept by the data."""
        name, owner = describe(found.place), self._spots.find(holder)
        reads = isinstance(owner.get() if owner is not None else None, (Dataset, Sampler, DataLoader))
        because = f"{where}: {name} is changed by steps, and belongs to {describe(holder)}, which the data holds"
        if reads or found.feeds:
            raise UsageError(
                f"{because} (as dataset, sampler, collate_fn, or in one of them), so that what was read before cannot "
                "be read again alike. Keep it in a variable, or in an object that the data does not hold"
            )
        self._say(f"carried {name}", f"{because}: a replacement may begin without it")

    def _keep_named(self, text: str) -> None:
        place = self._spots.frames.place_of_name(text)
        one = self._keep(place, "", True, False)
        if one is None or (one.spot.get() is MISSING and (len(place) > 1 or not self._spots.frames.have(place[0][2]))):
            raise UsageError(f"training.carry({text!r}): the loop of steps sees no such name")

    def _keep(
        self, place: Place, where: str, feeds: bool, late: bool, *, seen: bool = False, mark: Any = None
    ) -> Kept | None:
        """`mark`: of the value that it began with, if that is not the present one."""
        name, key = describe(place), key_of(place)
        if key in self._kept or key in self._left_out:
            return self._kept.get(key)
        if name in self._ignored or name.rpartition(".")[2] in self._ignored:
            return None
        spot = self._spots.find(place)
        if spot is None:
            return None
        one, value = Kept(key, name, where, spot, feeds, late, seen=seen), spot.get()
        if value is not MISSING:
            if self._is_foreign(value) and not late:  # nothing to carry until it stands for something else
                self._stands_for.setdefault(key, (one, self._remember(value, one) if mark is None else mark))
                return None
            if self._is_of_data(value):
                return None
        self._kept[key] = one
        self._homes.add(key, value if mark is None else mark)
        return one

    def _refuse_iterator(self, one: Kept) -> None:
        value = one.spot.get()
        if not is_iterator(value) or kind_of(value) == "stream":
            return
        if one.feeds:
            raise UsageError(
                f"{one.where}: {one.name}, {name_of(value)}, goes on from step to step, and a replacement would begin "
                "it anew: hand over the data (relight.Training(data=...)), or fetch it by step.number"
            )
        self._leave_out(one, f"{name_of(value)} cannot be carried")

    # --- by values -----------------------------------------------------------------------------------------
    def _notice(self, *, between: bool) -> None:
        """Carry also what changed although the code did not show it."""
        for change in self._comparison.changes(self._is_covered):
            if change.module is not None and change.nbytes > MOST_MODULE_BYTES:
                module = describe(change.module)
                raise UsageError(
                    f"{module} changes from step to step ({change.place[-1][1]}), and was not handed over: "
                    f"relight.Training({_HAND_OVER.format(module)}"
                )
            one = self._keep(change.place, "", True, between, seen=True, mark=change.mark)
            if one is not None:
                one.mark = change.mark
        if between:
            self._comparison.end()

    def _is_covered(self, place: Place) -> bool:
        """Whether what holds this place is carried as a whole, or is dead."""
        for length in range(1, len(place) + 1):
            if place[:length] in self._dead or key_of(place[:length]) in self._kept:
                return True
        return key_of(place) in self._left_out

    # --- values -----------------------------------------------------------------------------------------------
    def _remember(self, value: Any, one: Kept) -> Any:
        """For `one`. Tensors of what is left out are not copied: only which they are is put back."""
        is_part = functools.partial(is_part_of, self._parts)
        is_kept_otherwise = is_part if one.is_written else lambda thing: isinstance(thing, torch.Tensor)
        return remember(value, grows=not one.feeds, is_part=is_kept_otherwise)

    def _written_down(self, one: Kept, value: Any, weigh: bool, writer: Writer) -> Any:
        if value is MISSING:
            return _MISSING_TREE
        if not one.feeds:
            nbytes = tensor_bytes(value, self._parts) if weigh else 0
            one.has_tensors = has_tensors(value)
            if nbytes > MOST_SHOWN_BYTES:
                self._leave_out(one, f"its tensors take {nbytes >> 20} MiB")
                return None
            if not one.has_tensors and type(value) in (list, dict, set) and len(value) > MOST_LOG_LEAVES:
                self._leave_out(one, f"it has {len(value)} items")
                return None
        try:
            tree = writer.write(one.key, value)
            if weigh and any(map(self._is_id, keys_of(tree))):
                writer.take_back()
                raise Unsupported("the id() of a parameter as a key, which is another in each process (use its name)")
        except Unsupported as problem:
            if one.feeds and not one.seen and not self._is_foreign(value):
                raise one.refusal(f"it holds {problem}") from None
            self._leave_out(one, f"it holds {problem}")
            return None
        if weigh and (one.seen or not one.feeds):
            size, leaves = size_of(tree), leaves_of(tree)
            few = MOST_LEAVES if one.feeds or one.has_tensors else MOST_LOG_LEAVES
            most = MOST_SEEN_BYTES if one.feeds else MOST_SHOWN_BYTES if one.has_tensors else MOST_LOG_BYTES
            if size > most or leaves > few:
                writer.take_back()
                self._leave_out(one, f"it has grown to {leaves} values, {size} bytes")
                return None
        return tree

    def _caches(self) -> dict[str, int]:
        """How often each cached function of the script that draws random numbers has been computed."""
        frames = self._spots.frames
        return drawing_caches(names for _, names, _ in (frames.names(n) for n, f in enumerate(frames.frames) if f))

    def _doubt_order(self, one: Kept) -> None:
        """Doubt the bits if steps iterate over this set: its order depends on members that it no longer has."""
        if not self._left_out_why and is_iterated(one.name, [frame for frame in self._spots.frames.frames if frame]):
            self._left_out_why = (
                f"{one.shown}: steps go through a set, in an order that another process cannot repeat. Go through "
                "sorted(...), or use a dict"
            )

    def _follow_parts(self) -> None:
        """Carry the names that stand for another part of the state than at first, or for none."""
        if not self._stands_for:
            return
        self._spots.frames.forget()
        for key, (one, began) in list(self._stands_for.items()):
            if changed(began, one.spot.get()):
                one.mark = began
                self._kept[key] = one
                del self._stands_for[key]

    def _leave_out(self, one: Kept, why: str) -> None:
        if one.seen or one.feeds or is_iterator(one.spot.get()):
            self._forget(one)
        one.is_written = False  # but it is undone with its step
        if one.feeds or one.has_tensors:
            self._left_out_why = f"{one.shown} {CHANGES}, and is not carried: {why}"
        self._say(f"carried {one.name}", one.left_out(why))

    def _forget(self, one: Kept) -> None:
        self._kept.pop(one.key, None)
        self._left_out.add(one.key)

    def _put_back(self) -> None:
        self._spots.frames.forget()
        self._follow_parts()
        for one in self._kept.values():
            now = one.spot.get()
            if changed(one.mark, now):
                value = put_back(one.mark)
                if value is not now:
                    one.spot.set(value)
        self._spots.frames.forget()

    def _put_in(self) -> None:
        tree, self._pending = self._pending, None
        assert tree is not None
        self._missed = False
        self._put_in_all(tree["names"])
        if self._loop.is_found:
            self._put_in_all(tree["of_calls"])
        elif tree["of_calls"]:
            self._pending = {**tree, "names": {}}  # once the block is entered
        self._spots.frames.forget()

    def _put_in_all(self, trees: dict[str, Any]) -> None:
        reader = Reader(self._homes, self._parts)
        for key, part in trees.items():
            self._left_out.discard(key)
            place = place_of(key)
            one = self._kept.get(key) or self._keep(place, "", True, False, seen=True)
            if key in self._stands_for:
                one, _ = self._stands_for.pop(key)
                self._kept[key] = one
            spot = one.spot if one is not None else self._spots.find(place)
            if spot is None:
                raise UsageError(
                    f"{describe(place)} is carried from step to step, and this replacement has no such name: make it "
                    "on every rank, before the loop"
                )
            value = MISSING if part == _MISSING_TREE else reader.read(key, part)
            if one is not None and value is not spot.get():  # else it is kept otherwise there, or left out
                spot.set(value)


def _described(keys: Sequence[str]) -> str:
    return ", ".join(sorted({describe(place_of(key)) for key in keys}))
