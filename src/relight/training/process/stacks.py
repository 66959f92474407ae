"""Lets this process be asked for its Python stack, also while it hangs (wire/stacks.py)."""

import contextlib
import faulthandler
import os
import signal
from pathlib import Path

from relight.wire.stacks import ALL_STACKS, MAIN_STACK, stack_path


def answer_for_stacks(private_dir: Path, process: str) -> None:
    """From now on. Without a file to write to, this process cannot be asked, and trains all the same."""
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(stack_path(private_dir, process), flags, 0o600)
        # Python takes the handlers away when it ends, and puts back what was there before: a question that comes after
        # that must not end a process that has done its work.
        with contextlib.suppress(ValueError):  # not the main thread
            for number in (MAIN_STACK, ALL_STACKS):
                signal.signal(number, signal.SIG_IGN)
        # Not chained: a handler that may interrupt itself would also leave system calls interrupted.
        faulthandler.register(MAIN_STACK, file=descriptor, all_threads=False)
        faulthandler.register(ALL_STACKS, file=descriptor, all_threads=True)
