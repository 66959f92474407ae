"""A process that holds the lock of its life, and dies as it is told."""

import faulthandler
import mmap
import os
import signal
from collections.abc import Callable

from relight.wire.memory import lifelock


def fork_holder(mapping: mmap.mmap, offset: int, die: Callable[[], object]) -> int:
    """A process that takes the lock, says so, and dies."""
    ready, say_ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # a child that dies on purpose shall not print how
        lifelock.hold(mapping, offset)
        os.write(say_ready, b"x")
        die()
        os._exit(9)
    os.read(ready, 1)
    os.close(ready)
    os.close(say_ready)
    return pid


def wait_for_a_signal() -> None:
    signal.pause()
