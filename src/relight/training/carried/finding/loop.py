"""The loop of steps in a running process: which frames take part in a turn, and where the names of each are."""

from collections.abc import Sequence
from inspect import CO_GENERATOR
from types import CodeType, FrameType
from typing import Any

from relight.errors import UsageError
from relight.training.carried.code.epochs import variables_of_epoch, with_epochs
from relight.training.carried.code.iteration import Iteration, block_ahead, iteration_of
from relight.training.carried.code.refs import Place
from relight.training.carried.code.source import Head, Position, frames_outside, is_user_frame, position_of
from relight.training.carried.finding.places import Frames, Spots, locals_of, set_local
from relight.training.carried.reading.names import Needed, is_of_a_call
from relight.training.carried.values.parts import Parts
from relight.training.state.values.kinds import kind_of


class Loop:
    """Found at its head if the code there shows the block, else at the entry of the first step."""

    def __init__(self, parts: Parts | None = None) -> None:
        self.spots = Spots(parts)
        self.declared: list[Any] = []  # objects that the user named
        self.is_found = False
        self.computes_outside = True  # the script's code may run after `with step`, before the next one is entered
        self._held: list[Any] = []  # objects that functions with the block get in each turn
        self._iteration: Iteration | None = None
        self._asks_through = False  # a function between the loop and `training.steps()` asks for steps
        self._epochs: Head | None = None  # of the loop of epochs around the loop, if there is one
        self._length = 1
        self.needed_between: list[Needed] | None = None  # as in `Names`
        self.ends_late = False  # the same
        self._code: CodeType | None = None  # of the function that holds the loop
        self._depth = 0  # so many frames lie between that and `with step`
        self._generators: list[FrameType] = []  # through which the loop asks for steps: `for step in log_every(steps)`
        self._asked: list[tuple[FrameType, Position]] = []  # until it is found: frames that asked for a step, and where

    def ask(self, frame: FrameType) -> None:
        """A step is asked for, and the loop is not found yet."""
        self._asked = [(here, position_of(here)) for here in frames_outside(frame)]

    @property
    def ahead(self) -> tuple[FrameType, int] | None:
        """The frame of the loop, and the line of the block that it comes to, if the code at its head shows that."""
        for frame, _ in self._asked:
            if (line := block_ahead(frame)) is not None:
                return frame, line
        return None

    def find(self, frame: FrameType, line: int = 0) -> tuple[Iteration | None, list[FrameType]]:
        """From the frame of `with step`, at `line` if it does not stand there yet: the code of a turn, and its frames.

        None: the code cannot be read.
        """
        self.is_found = True
        self._iteration = iteration_of(frame, {here.f_code: at for here, at in self._asked}, line)
        if self._iteration is not None and self._epochs is not None:
            self._iteration = with_epochs(self._iteration, _up(frame, self._iteration.loop), self._epochs)
        asked = {id(here) for here, _ in self._asked}
        asking = [here for here, _ in self._asked]
        innermost = self._asked[0][0] if self._asked else None
        self._asked = []
        frames = [frame]
        while frames[-1].f_back is not None and (
            id(frames[-1]) not in asked if self._iteration is None else len(frames) < self._iteration.frames
        ):
            frames.append(frames[-1].f_back)
        self._depth = len(frames) - 1 if self._iteration is None else self._iteration.loop
        self._code = frames[self._depth].f_code
        self._generators = _generators_below(asking, self._code)
        self._asks_through = innermost is not None and innermost is not frames[self._depth]
        is_only_block = self._iteration is not None and self._iteration.is_only_block
        self.computes_outside = not (innermost is frame and is_only_block)
        self._show([*frames, *self._generators])
        return self._iteration, frames

    def show_epochs(self, head: Head, length: int) -> None:
        """The loop of steps stands in a loop of epochs, which has this head; `length`: steps in an epoch."""
        self._epochs, self._length = head, length

    def ends_epoch(self, version: int) -> bool:
        """Return whether the step to this version is the last one of an epoch; also if there is no loop of epochs."""
        return version % self._length == 0

    @property
    def of_generators(self) -> list[Place]:
        """Variables of generators between the loop and `training.steps()`: they count steps, for instance."""
        first, found = len(self.spots.frames.frames) - len(self._generators), list[Place]()
        for number, frame in enumerate(self._generators, first):
            names = locals_of(frame).items()
            found += [(("frame", str(number), name),) for name, one in names if kind_of(one) != "opaque"]
        return found

    def set_epoch(self, frame: FrameType, number: int) -> None:
        """Give the variables of the epoch's number this one, to which a recovery leads; `frame` asks for a step."""
        if self._epochs is not None:
            for variable in variables_of_epoch(frames_outside(frame)[0], self._epochs):
                set_local(variable.frame, variable.name, number)
            self.spots.frames.forget()

    @property
    def of_epoch(self) -> list[Place]:
        """Variables that stand for the number of the epoch; in a replacement they get it from the loop of epochs."""
        found: list[Place] = []
        for number, name in self._iteration.of_epoch if self._iteration is not None else ():
            module, _, is_global = self.spots.frames.names(number)
            found.append((("module", module, name),) if is_global else (("frame", str(number), name),))
        return found

    def look_at(self, frame: FrameType) -> None:
        """Look at the loop's frame, which is this one or has called it."""
        here: FrameType | None = frame
        while here is not None and here.f_code is not self._code:
            here = here.f_back
        self._generators = _generators_below(frames_outside(frame), self._code) or self._generators
        if here is None:
            raise UsageError(
                "the loop of steps asks for a step from another function than for the first one: iterate over "
                "training.steps() in one place"
            )
        self._show([*[None] * self._depth, *self._around(here), *self._generators])

    def _around(self, loop: FrameType) -> list[FrameType]:
        """Return the frame with the loop, and those that called it up to the one with the loop of epochs."""
        frames = [loop]
        while self._epochs is not None and frames[-1].f_code is not self._epochs.code:
            if (caller := frames[-1].f_back) is None:
                return [loop]
            frames.append(caller)
        return frames

    def look_for(self, frame: FrameType, name: str, depth: int) -> None:
        """Look at the loop's frame before the loop is found, by its `place` in another process."""
        named = [here for here in frames_outside(frame) if here.f_code.co_qualname == name]
        self._code, self._depth = (named or [frame])[0].f_code, depth
        self.look_at(frame)

    def leave(self) -> None:
        """Hold no frame any more."""
        self.spots.frames, self._generators = Frames(()), []
        self.spots.settings.files.leave()
        self._asked = []

    @property
    def place(self) -> tuple[str, int]:
        """The loop's function, and how far `with step` is from it."""
        return self._code.co_qualname if self._code is not None else "", self._depth

    @property
    def computes_above(self) -> bool:
        """True if code runs between the loop's head and the block; also if that is not known."""
        return self._iteration is None or self._iteration.computes_above or self._asks_through

    @property
    def may_leave(self) -> bool:
        """True if the code of a turn may leave the loop; also if it cannot be read."""
        return self._iteration is None or self._iteration.may_leave

    def lasting(self, place: Place) -> Place:
        """Return the place as it is in the next turn: functions that are called anew get the same objects."""
        if not is_of_a_call(place, self._depth):
            return self._in_loop(place)
        (_, number, name), *rest = place
        value = self.spots.frames.read(int(number)).get(name)
        if not any(held is value for held in self._held):
            self._held.append(value)
        index = next(index for index, held in enumerate(self._held) if held is value)
        return (("held", str(index), name), *rest)

    def _in_loop(self, place: Place) -> Place:
        """Return a part of an object that the function with the loop got under the same name as it has there."""
        (kind, number, name), *rest = place
        if kind == "frame" and rest and int(number) > self._depth:
            frames, missing = self.spots.frames, object()
            if frames.read(self._depth).get(name, missing) is frames.read(int(number)).get(name):
                return ((kind, str(self._depth), name), *rest)
        return place

    def _show(self, frames: Sequence[FrameType | None]) -> None:
        self.spots.frames = Frames(frames, self.declared, self._held)


def _generators_below(frames: Sequence[FrameType], loop: CodeType | None) -> list[FrameType]:
    """Return the frames of generators among these, up to that with the loop: they go on as it does."""
    found: list[FrameType] = []
    for frame in frames:
        if frame.f_code is loop:
            return found
        found += [frame] if frame.f_code.co_flags & CO_GENERATOR and is_user_frame(frame) else []
    return []


def _up(frame: FrameType, count: int) -> FrameType:
    """Return the frame that has called this one through so many calls."""
    for _ in range(count):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame
