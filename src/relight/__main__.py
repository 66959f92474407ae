"""`relight`, and `python -m relight`. Ctrl-C ends it quietly with status 130, also while it is still being imported.

`python -m` ends by the signal, whatever the program returns, if a KeyboardInterrupt was raised inside `exec` or `eval`
of a text, even though it was caught. Imports execute texts (dataclass, namedtuple). Hence a handler that is installed
before all imports, and an exit that does not pass through Python's own.
"""

import contextlib
import os
import signal
import sys
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT


def main() -> int:
    """Run the command line; return the exit status."""
    try:
        is_handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # ignored in a shell's background
        if is_handled:
            signal.signal(signal.SIGINT, _leave_at_once)
        from relight.cli import main as run

        # In this block, since `signal.signal` is partly Python and can be interrupted.
        if is_handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = run()
        if is_handled:
            signal.signal(signal.SIGINT, _leave_at_once)
    except KeyboardInterrupt:
        status = INTERRUPTED
    if status == INTERRUPTED:
        _leave()
    return status


def _leave_at_once(*_: object) -> NoReturn:
    os._exit(INTERRUPTED)


def _leave() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
