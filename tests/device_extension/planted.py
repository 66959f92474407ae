"""Bugs on purpose, for the workers of a job: `LATE_BUG=NAME` takes one synchronization out of relight."""

import os
import sys
from collections.abc import Callable

from relight.training.process.runtime import Runtime


def plant() -> None:
    """Plant the bug that the environment names, if it names one."""
    if name := os.environ.get("LATE_BUG"):
        BUGS[name]()


def prepared_before_gradients_are_reduced() -> None:
    """A rank enters the barrier when it has launched its collectives."""
    kept = Runtime.synchronize

    def synchronize(self: Runtime) -> None:
        if sys._getframe(1).f_code.co_name != "_pass":
            kept(self)

    Runtime.synchronize = synchronize  # type: ignore[method-assign]


BUGS: dict[str, Callable[[], None]] = {"prepared": prepared_before_gradients_are_reduced}
