"""Runs small scripts up to the entry of their first step, and reads the code of their loops."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from relight.training.carried.code.iteration import iteration_of
from relight.training.carried.code.refs import describe
from relight.training.carried.code.source import Position, position_of, user_frames
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
        if iteration is not None:
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

    def is_foreign(self, thing: Any) -> bool:
        is_own = isinstance(thing, FirstStep) or getattr(thing, "gi_code", None) is Steps.__call__.__code__
        return is_own or any(thing is tracked for tracked in self.tracked)

    def __call__(self, *tracked: Any) -> Iterator[FirstStep]:
        self.tracked = tracked
        self.asked = {frame.f_code: position_of(frame) for frame in user_frames(sys._getframe(1))}
        yield FirstStep(self)


def read_script(source: str, directory: Path) -> Names | None:
    """The findings in a script, in which `steps(*tracked)` offers steps. None: its code could not be read."""
    path = directory / f"script{next(_NUMBERS)}.py"
    path.write_text(source)
    steps = Steps()
    try:
        exec(compile(source, str(path), "exec"), {"__name__": path.stem, "steps": steps})
    except Reached:
        return steps.names
    raise AssertionError("the script entered no step")


def shown(names: Names) -> dict[str, int]:
    """Each name with the line that writes it; `~` stands before what is only accumulated or shown."""
    found = {}
    for one in names.found.values():
        text = describe(one.place)
        found[text if one.feeds else f"~{text}"] = one.line
    return found
