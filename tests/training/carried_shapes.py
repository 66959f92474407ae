"""Runs small scripts up to the entry of their first step, and reads the code of their loops."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from relight.training.carried.code.epochs import with_epochs
from relight.training.carried.code.iteration import iteration_of
from relight.training.carried.code.misuse import leaves_epoch, loops_around
from relight.training.carried.code.refs import describe
from relight.training.carried.code.source import Head, Position, position_of, user_frames
from relight.training.carried.reading.names import Names, names_of

_NUMBERS = itertools.count()


class Reached(Exception):
    """The first step was entered."""


class FirstStep:
    """Stands for a step; its entry ends the script."""

    def __init__(self, steps: "Steps") -> None:
        self._steps = steps
        self.number = 0
        self.committed = True

    def __enter__(self) -> Any:
        frame = sys._getframe(1)
        self._steps.frame = frame
        iteration = iteration_of(frame, self._steps.asked)
        if iteration is not None and (head := self._steps.head) is not None:
            iteration = with_epochs(iteration, frame, head)
        if iteration is not None:
            self._steps.of_epoch = iteration.of_epoch
            frames: list[FrameType] = []
            here: FrameType | None = frame
            while here is not None and len(frames) < iteration.frames:
                frames.append(here)
                here = here.f_back
            self._steps.names = names_of(iteration, frames, self._steps.is_foreign)
        raise Reached

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def report(self, *values: Any) -> None: ...


class Steps:
    """Offers one step, and keeps what was found."""

    def __init__(self) -> None:
        self.names: Names | None = None
        self.frame: FrameType | None = None
        self.tracked: tuple[Any, ...] = ()
        self.asked: dict[CodeType, Position] = {}
        self.head: Head | None = None  # of a loop of epochs around that of the steps
        self.of_epoch: tuple[tuple[int, str], ...] = ()
        self.leaves: str | None = None  # where the loop of steps is left in the middle of an epoch
        self.around: str | None = None  # a loop around it, in that of epochs

    def is_foreign(self, thing: Any) -> bool:
        generators = (Steps.__call__.__code__, Steps.epochs.__code__)
        is_own = isinstance(thing, FirstStep) or getattr(thing, "gi_code", None) in generators
        return is_own or any(thing is tracked for tracked in self.tracked)

    def __call__(self, *tracked: Any) -> Iterator[FirstStep]:
        self.tracked = tracked
        frame = sys._getframe(1)
        self.asked = {here.f_code: position_of(here) for here in user_frames(frame)}
        if self.head is not None:
            self.leaves, self.around = leaves_epoch(frame, self.head), loops_around(frame, (), self.head)
        yield FirstStep(self)

    def epochs(self, count: int) -> Iterator[int]:
        """Offer epochs, of which each has a loop of steps."""
        frame = next(user_frames(sys._getframe(1)))
        self.head = Head(frame.f_code, position_of(frame))
        yield from range(count)


def read_script(source: str, directory: Path) -> Names | None:
    """The findings in a script, in which `steps(*tracked)` offers steps. None: its code could not be read."""
    return enter_script(source, directory).names


def enter_script(source: str, directory: Path) -> Steps:
    """Run a script until it enters a step of `steps(*tracked)`, perhaps in a loop over `epochs(count)`."""
    path = directory / f"script{next(_NUMBERS)}.py"
    path.write_text(source)
    steps = Steps()
    try:
        exec(compile(source, str(path), "exec"), {"__name__": path.stem, "steps": steps, "epochs": steps.epochs})
    except Reached:
        return steps
    raise AssertionError("the script entered no step")


def shown(names: Names) -> dict[str, int]:
    """Each name with the line that writes it; `~` stands before what is only accumulated or shown."""
    found = {}
    for one in names.found.values():
        text = describe(one.place)
        found[text if one.feeds else f"~{text}"] = one.line
    return found
