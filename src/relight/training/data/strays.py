"""A script that draws from a DataLoader by itself: relight does not know how far, and a replacement would begin anew.

An iterator that is made and used up within one turn of the loop (an evaluation) is none of relight's business. One that
was made earlier and is read on, a batch in each step, carries a position from step to step.
"""

import threading
import weakref
from typing import Any

from relight.errors import UsageError

STRICT_TURNS = 3  # of the loop, in each process: what a script does it does early


class Watch:
    """Counts the turns of the loop, and looks at each read of an iterator that is not the training's own."""

    def __init__(self) -> None:
        self._turn = 0
        self._last = 0  # turn, counted, up to which it is an error
        self._active = False
        self._births: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.seen = ""  # what was seen, perhaps too late to refuse it: then a recovery makes the bits doubtful

    def begin(self) -> None:
        """The loop begins."""
        self._turn += 1
        if not self._active:
            self._active = True
            self._last = self._turn + STRICT_TURNS

    def turn(self) -> None:
        """A step is over, and the next turn begins."""
        self._turn += 1

    def end(self) -> None:
        """The loop has ended."""
        self._active = False

    def made(self, iterator: Any) -> None:
        self._births[iterator] = self._turn

    def advanced(self, iterator: Any) -> None:
        """Raises UsageError in the first steps, if this iterator was made in an earlier turn of the loop."""
        born = self._births.get(iterator, -1)
        if not self._active or born == self._turn or threading.current_thread() is not threading.main_thread():
            return
        self.seen = (
            "the script draws from a DataLoader that relight.Training does not know: it reads on in an iterator that "
            "an earlier step made, and neither a repeated step nor a replacement could find its place in it"
        )
        if self._turn < self._last:
            raise UsageError(
                f"{self.seen}. Hand the DataLoader over, relight.Training(data=loader), and take the batch from `with "
                "step as batch`; several as data=(loader, other) or data={'labelled': loader, 'unlabelled': other}. To "
                "evaluate, make the iterator in the step that reads it (`for batch in loader`). Where a framework's "
                "Trainer has the loop: let one dataset give both, or read items of the other one by an index that is "
                "made of the number of the step (state.global_step, trainer.global_step)"
            )


watch = Watch()
