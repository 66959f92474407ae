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
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not if the signal is ignored, as in a shell's background
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from relight.cli import main as run

    signal.signal(signal.SIGINT, handler)
    try:
        status = run()
    except KeyboardInterrupt:
        status = INTERRUPTED
    if status == INTERRUPTED:
        _leave()
    return status


def _leave() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
