"""Bugs on purpose, for the workers of a job: `LATE_BUG=NAME` takes one wait for the device out of relight."""

import os
import sys
from collections.abc import Callable

from relight.training.process.runtime import Runtime


def plant() -> None:
    """Plant the bug that the environment names, if it names one."""
    if name := os.environ.get("LATE_BUG"):
        BUGS[name]()


def _leave_out(wait: str, caller: str) -> Callable[[], None]:
    """One function calls this method of the runtime in vain."""

    def plant() -> None:
        kept = getattr(Runtime, wait)

        def call(self: Runtime) -> None:
            if sys._getframe(1).f_code.co_name != caller:
                kept(self)

        setattr(Runtime, wait, call)

    return plant


BUGS: dict[str, Callable[[], None]] = {
    "entered": _leave_out("synchronize_stream", "enter_step"),  # a block begins while copies of state are made
    "repeated": _leave_out("synchronize", "_is_to_be_repeated"),  # an attempt is compared before it is computed
    "prepared": _leave_out("synchronize", "_pass"),  # a rank enters the barrier when it has launched its collectives
    "committed": _leave_out("synchronize", "_complete"),  # a rank commits when it has launched its write
    "undone": _leave_out("synchronize", "undo"),  # what is undone still runs
}
