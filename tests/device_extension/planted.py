"""Bugs on purpose: each takes one synchronization or one hold out of relight. Tests show that each is noticed.

`LATE_BUG=NAME` plants one in the workers of a job.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

BUGS: dict[str, Callable[[], None]] = {}


def bug(call: Callable[[], None]) -> Callable[[], None]:
    """Register a bug by its function's name."""
    BUGS[call.__name__] = call
    return call


def plant() -> None:
    """Plant the bug that the environment names, if it names one."""
    if name := os.environ.get("LATE_BUG"):
        BUGS[name]()


def _without_synchronizing(caller: str) -> None:
    from relight.training.process.runtime import Runtime

    kept = Runtime.synchronize

    def synchronize(self: Runtime) -> None:
        if sys._getframe(1).f_code.co_name != caller:
            kept(self)

    Runtime.synchronize = synchronize  # type: ignore[method-assign]


@bug
def prepared_before_gradients_are_reduced() -> None:
    """A rank enters the barrier when it has launched its collectives."""
    _without_synchronizing("_pass")


@bug
def committed_before_the_write_is_done() -> None:
    """A rank commits when it has launched its write."""
    _without_synchronizing("_complete")


@bug
def groups_formed_on_another_device() -> None:
    """The thread that forms groups has the first device as its current one."""
    from relight.device.generic import Generic

    kept = Generic.use

    def use(self: Generic, device: Any) -> None:
        if sys._getframe(1).f_code.co_name != "make_generation_group":
            kept(self, device)

    Generic.use = use  # type: ignore[method-assign]


@bug
def collectives_not_aborted() -> None:
    """Nothing ends the collectives of a device whose peer is lost."""
    from relight.training.collectives import generation_group

    generation_group.abort_backend = lambda group, device: None  # type: ignore[attr-defined]
