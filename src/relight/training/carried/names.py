"""Which names a loop of steps carries from one step to the next, found in its code before the first step.

An iteration is read from the entry of `with step` to its next entry, with the functions of the user that it calls. A
name is carried if some way through the iteration reads it before it writes it, and some way writes it. Names are
places: locals, globals, variables of closures, attributes of objects; a change of a container's contents counts as a
write of the place that holds it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from relight.training.carried.flow import Flow
from relight.training.carried.reader import Reader
from relight.training.carried.refs import Key, Place
from relight.training.carried.scope import Scope
from relight.training.carried.source import Iteration


@dataclass(frozen=True)
class Found:
    """One name that is carried from step to step."""

    place: Place
    file: str
    line: int  # where it is written
    feeds: bool  # it decides what a step computes; False: it is only accumulated, or shown
    in_block: bool  # it is written inside `with step`
    is_counted: bool = False  # by something around `training.steps()`: enumerate, zip


@dataclass
class Names:
    """What the code of an iteration says."""

    found: dict[Key, Found] = field(default_factory=dict)
    dead: set[Place] = field(default_factory=set)  # written before they are read: nothing of them is carried


def names_of(iteration: Iteration, frames: Sequence[FrameType], is_foreign: Callable[[Any], bool]) -> Names:
    """What the iteration carries. `is_foreign`: of an object whose attributes are not the script's to carry."""
    flow = Flow()
    scopes = [Scope.of_frame(frame, number) for number, frame in enumerate(frames)]
    reader = Reader(flow, scopes, is_foreign)
    for index, piece in enumerate(iteration.pieces):
        flow.in_block = index == 0
        if index == iteration.turn:
            reader.end_turn()
        reader.read(scopes[piece.frame], piece.statements, returns=index + 1 < len(iteration.pieces))
    feeding = flow.feeding()
    names = Names()
    for key, (file, line) in flow.writes.items():
        if key[0] == "temporary" or is_foreign(flow.values.get(key)):
            continue
        place = flow.places.get(key)
        if place is None:
            continue
        if key not in flow.exposed:
            names.dead.add(place)
        else:
            is_counted = len(place) == 1 and place[0][2] in iteration.counted
            names.found[key] = Found(place, file, line, key in feeding, key in flow.written_in_block, is_counted)
    return names
