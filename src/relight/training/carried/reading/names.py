"""Names that a loop of steps carries from one step to the next, found in its code before the first step.

An iteration is read from where the loop asks for a step to where it asks for the next one, with the functions of the
user that it calls. A name is carried if some way through the iteration reads it before it writes it, and some way
writes it; or if it is read after the loop, and some way leaves what an earlier iteration wrote (the best weights so
far): what is made above the block is made anew by every process. Names are places: locals, globals, variables of
closures, attributes of objects; a change of a container's contents counts as a write of the place that holds it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from relight.training.carried.code.iteration import Iteration
from relight.training.carried.code.refs import Key, Place, describe, may_hold_state
from relight.training.carried.code.scope import Scope
from relight.training.carried.reading.flow import FILES, Flow
from relight.training.carried.reading.making import Made
from relight.training.carried.reading.reading import Reading

_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")  # functions of their own up to Python 3.11
_LOOK_UP = {"globals", "vars", "locals", "__dict__"}  # they reach variables of a module without naming them

# A name may stand for another one of these in a later step; other objects of ours (an iterator) only change.
_PARTS = (torch.Tensor, nn.Module, torch.optim.Optimizer, LRScheduler, list, tuple, dict)


@dataclass(frozen=True)
class Found:
    """One name that is carried from step to step."""

    place: Place
    file: str
    line: int  # where it is written
    feeds: bool  # it decides what a step computes; False: it is only accumulated, or shown
    late: bool  # it is written after the block
    after_write: bool = False  # it is written after the last call of an optimizer's `step`
    at_end_of_epoch: bool = False  # only between two epochs is it written so late: after the block, or that call
    late_at_end: bool = False  # only between two epochs is it written after the block
    is_left: bool = False  # each step that reads it has written it before: only code after the loop may see it
    is_counted: bool = False  # by something around `training.steps()`: enumerate, zip
    is_of_epoch: bool = False  # only `set_epoch` sets it, to the number of the epoch
    made: Made | None = None  # a module, optimizer or scheduler that some step makes and keeps there
    grows: bool = False  # of lists in it only the end changes
    is_only_added_to: bool = False  # nothing in the steps reaches what was added before


class Needed(NamedTuple):
    """One name that steps set, and that only code between two epochs reads."""

    place: Place
    late: bool  # it is written after the block
    after_write: bool  # it is written after the last call of an optimizer's `step`


@dataclass
class Names:
    """Names that the code of an iteration carries, and those that it does not."""

    found: dict[Key, Found] = field(default_factory=dict)
    dead: set[Place] = field(default_factory=set)  # written before they are read: nothing of them is carried
    # Attributes of tensors, perhaps of parameters; whether they are set after the last call of an optimizer's `step`.
    set_on_tensors: dict[str, bool] = field(default_factory=dict)
    of_libraries: list[Place] = field(default_factory=list)  # objects of which steps use what their methods return
    shown_after: list[str] = field(default_factory=list)  # those that code after the loop may read
    new_layer: Made | None = None  # that some step makes and puts into a module which was handed over
    files_changed: tuple[str, int] | None = None  # where steps do so, if they ask whether files exist
    unfrozen: list[tuple[Made, list[torch.Tensor]]] = field(default_factory=list)  # parameters that steps unfreeze
    # Those that steps set, that code between epochs reads, and of which nothing is carried. None: there are no epochs.
    needed_between: list["Needed"] | None = None

    @property
    def ends_late(self) -> bool:
        """True if steps set these, or what is carried, after the last call of an optimizer's `step`."""
        is_carried = any(one.after_write and not one.at_end_of_epoch for one in self.found.values())
        return self.needed_between is not None and (is_carried or any(one.after_write for one in self.needed_between))


def is_of_a_call(place: Place, loop: int) -> bool:
    """True if it begins with a local variable of a function that the loop, in frame `loop`, calls anew in each turn."""
    kind, number, _ = place[0]
    return kind == "frame" and int(number) < loop


def names_of(iteration: Iteration, frames: Sequence[FrameType], is_foreign: Callable[[Any], bool]) -> Names:
    """Find the names that an iteration carries. `is_foreign`: whether an object's attributes are not the script's."""
    reading, in_turns = _read(iteration, frames, is_foreign)
    flow = reading.flow
    feeding = flow.feeding()

    def is_local(place: Place) -> bool:
        return len(place) == 1 and is_of_a_call(place, iteration.loop)

    of_loop = frames[iteration.loop]
    read_after = iteration.read_after | _kept_by_functions(of_loop.f_code)
    read_by_any = read_after | _read_by_functions(of_loop.f_code)
    own_module = of_loop.f_globals.get("__name__") if of_loop.f_code.co_name == "<module>" else None
    looks_up = own_module is not None and not _LOOK_UP.isdisjoint(read_by_any)

    def may_be_read_after(place: Place) -> bool:
        is_of_loop = place[0][0] == "frame" or (own_module is not None and place[0][:2] == ("module", own_module))
        return len(place) > 1 or not is_of_loop or looks_up or place[0][2] in read_by_any

    names = Names(
        files_changed=flow.files_changed if FILES.key in feeding else None,
        set_on_tensors=flow.attributes_of_tensors(),
        new_layer=reading.making.new_layer(),
        unfrozen=reading.unfreezing.found(),
        of_libraries=[place for place in _of_libraries(flow, feeding, is_foreign) if not is_local(place)],
    )
    shown_after = []
    for key, (file, line) in flow.writes.items():
        value = flow.values.get(key)
        if (
            key[0] == "temporary"
            or (key == FILES.key and key not in feeding)
            or (is_foreign(value) and not isinstance(value, _PARTS))
        ):
            continue
        place = flow.places.get(key)
        if place is None or is_local(place):
            continue
        is_read_after = may_be_read_after(place)
        if key in flow.exposed or (is_read_after and flow.may_remain(key)):
            is_counted = len(place) == 1 and place[0][2] in iteration.counted
            late, after_write = key in flow.written_late, flow.is_after_step(key)
            is_left, made = key not in flow.exposed, reading.making.kept_at(key)
            at_end = in_turns is not None and key not in in_turns.late
            late_at_end = in_turns is not None and key not in in_turns.after_block
            sets_epoch = flow.is_of_epoch(key)
            kinds = key in feeding, late, after_write, at_end, late_at_end, is_left, is_counted, sets_epoch
            grows = not flow.is_rearranged(place), key not in flow.used
            names.found[key] = Found(place, file, line, *kinds, made, *grows)
            continue
        if not is_foreign(value):
            names.dead.add(place)
        if is_read_after:
            shown_after.append(place)
    made_anew = {place[0] for place in names.dead if len(place) == 1 and place[0][2] not in read_after}
    names.shown_after = [describe(place) for place in shown_after if place[0] not in made_anew]
    if in_turns is not None:
        between, _ = _read(iteration, frames, is_foreign, first=iteration.in_each_turn or 0)
        names.needed_between = _needed(between.flow, flow, in_turns, {*names.found}, is_foreign)
    return names


def _of_libraries(flow: Flow, feeding: set[Key], is_foreign: Callable[[Any], bool]) -> list[Place]:
    keys = sorted(flow.used & feeding & flow.places.keys(), key=str)
    members = ((flow.places[key], _members_of(flow.values.get(key))) for key in keys)
    return [place for place, own in members if any(may_hold_state(one) and not is_foreign(one) for one in own)]


class _InTurns(NamedTuple):
    """Places that each turn of the loop of steps may write, where it stands in one of epochs."""

    late: set[Key]  # after its last write, or after its block
    after_block: set[Key]
    written: set[Key]  # anywhere


def _needed(
    between: Flow, flow: Flow, in_turns: _InTurns, carried: set[Key], is_foreign: Callable[[Any], bool]
) -> list[Needed]:
    """Return what the flow `between` epochs reads before it writes it, of what the turns write."""
    of_parts = {key for key in flow.changed_in_place if is_foreign(flow.values.get(key))}
    found = (between.exposed & in_turns.written & flow.places.keys()) - carried - of_parts
    places = ((flow.places[key], key) for key in sorted(found, key=str))
    return [Needed(place, key in in_turns.after_block, key in in_turns.late) for place, key in places]


def _read(
    iteration: Iteration, frames: Sequence[FrameType], is_foreign: Callable[[Any], bool], first: int = 0
) -> tuple[Reading, _InTurns | None]:
    """Read an iteration, from its piece `first` on. Returns also what its turns write; None: there are no epochs."""
    flow = Flow()
    scopes = [Scope.of_frame(frame, number) for number, frame in enumerate(frames)]
    reading = Reading(flow, scopes, is_foreign, iteration.enters)
    reading.epochs = {key for n, name in iteration.of_epoch if (key := scopes[n].lookup(name).key) is not None}
    flow.late = iteration.begins_late
    in_turns: _InTurns | None = None
    for index, piece in enumerate(iteration.pieces[first:], first):
        if index == iteration.in_each_turn:
            in_turns = _InTurns(flow.written_after_write(), {*flow.written_late}, {*flow.writes})
        reading.read(scopes[piece.frame], piece.statements, returns=index + 1 < len(iteration.pieces))
    flow.end_turn()
    flow.hold_the_same()
    flow.expose_members()
    return reading, in_turns


def _kept_by_functions(code: CodeType) -> set[str]:
    """Return the variables of a function that functions defined in it may read later: not those that comprehensions
    alone read, which run where they stand. (A generator expression may be kept.)"""

    def inner_of(one: CodeType) -> Iterator[CodeType]:
        for inner in (const for const in one.co_consts if isinstance(const, CodeType)):
            if inner.co_name in _COMPREHENSIONS:
                yield from inner_of(inner)
            else:
                yield inner

    return {*code.co_cellvars} & {name for inner in inner_of(code) for name in inner.co_freevars}


def _read_by_functions(code: CodeType) -> set[str]:
    """Return the variables of a module that functions defined in it may read, and words by which code looks them up."""
    found = set[str]()
    if code.co_name == "<module>":
        found |= _LOOK_UP & {*code.co_names}
        left = [one for one in code.co_consts if isinstance(one, CodeType)]
        while left:
            inner = left.pop()
            found.update(inner.co_names)
            left += [one for one in inner.co_consts if isinstance(one, CodeType)]
    return found


def _members_of(value: Any) -> Sequence[Any]:
    return value if type(value) in (list, tuple) else (value,)
