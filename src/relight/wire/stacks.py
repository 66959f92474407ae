"""Signals that ask a worker what it is doing, and the file into which it writes the answer.

Real-time signals, which scripts leave alone. The handlers are faulthandler's, in C: they need neither the GIL nor a
main thread that gets anywhere, and a system call that they interrupt is started again. A process that has no handler
would be killed by them, so an agent looks first (agent/processes/stacks.py).
"""

import signal
from pathlib import Path

MAIN_STACK = int(signal.SIGRTMIN) + 9  # the main thread's: of a process that shall train on
ALL_STACKS = int(signal.SIGRTMIN) + 10  # every thread's: their frames are read while they run, which may go wrong


def stack_path(private_dir: Path, process: str) -> Path:
    """Return the file in which a worker writes its stacks, one after the other."""
    return private_dir / f"stack-{process}.txt"
