"""Words of relight in a worker, whatever the script has made of the standard streams: closed, or replaced."""

import contextlib
import sys


def tell(text: str) -> None:
    """Print on standard error; if the script's is closed or raises, on the one that the process began with."""
    for stream in (sys.stderr, sys.__stderr__):
        if stream is None:
            continue
        with contextlib.suppress(Exception):
            stream.write(f"{text}\n")  # not print: many scripts replace that, on all ranks but the first
            stream.flush()
            return


def flush() -> None:
    """Write out what standard output and standard error have kept."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
