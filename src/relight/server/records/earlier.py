"""A run directory that was used before: the files of an ended run are kept aside, those of a live one are not touched.

So the same command can be started again, by hand or by a cluster's queue, whether or not it names its run directory.
"""

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from relight.core.protocol.commands import EndJob
from relight.errors import UsageError
from relight.server.records.journal import JOURNAL, RESERVE_NAME, SILENT_SECONDS, decode_line, read_header
from relight.wire.settings import JobSettings

# Everything that a run writes there by itself; checkpoints and whatever else lies there stay where they are.
_OF_A_RUN = (
    *("report.json", "coverage.json", RESERVE_NAME, "controller.json", "logs"),
    *("trace.jsonl", "trace.1.jsonl", "status.jsonl", "status.1.jsonl"),
    *("scalars.jsonl", "scalars.fed", "tensorboard"),
)
_LOOK_SECONDS = 0.5
_TAIL_BYTES = 64 * 1024


def keep_aside(run_dir: Path) -> Path | None:
    """Move the files of the run that `run_dir` holds into a directory in it, whose path is returned; None without one.

    Raises UsageError if that run may still be alive, or what lies there is not known to be a run; OSError.
    """
    journal = run_dir / JOURNAL
    if not journal.exists():
        return None
    try:
        read_header(journal)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"--run-dir {run_dir} already holds a {JOURNAL} that cannot be read ({error}); choose another directory"
        ) from error
    _require_end(run_dir, journal)
    aside = _next_directory(run_dir)
    for name in (*_OF_A_RUN, JOURNAL):  # the journal last: while it is there, the rest can be moved again
        if (run_dir / name).exists():
            (run_dir / name).rename(aside / name)
    return aside


def going_on(run_dir: Path) -> JobSettings | None:
    """Return the settings of a run in this directory that has not ended, whether or not it has a controller now."""
    try:
        settings = read_header(run_dir / JOURNAL).settings
        with (run_dir / JOURNAL).open("rb") as file:
            return None if _has_end(run_dir, file.fileno()) else settings
    except (OSError, msgspec.MsgspecError):
        return None


def has_ended(run_dir: Path) -> bool:
    """Return whether the newest run in this directory has ended, with an error or without."""
    try:
        with (run_dir / JOURNAL).open("rb") as file:
            return _has_end(run_dir, file.fileno())
    except OSError:
        return False


def has_finished(run_dir: Path) -> bool:
    """Return whether the newest run in this directory has ended without an error."""
    try:
        with (run_dir / JOURNAL).open("rb") as file:
            return any(end is not None and not end.error for end in map(_end, _last_lines(file.fileno())))
    except OSError:
        return False


def _next_directory(run_dir: Path) -> Path:
    """Return a new directory, or the newest one again if a move of files into it was interrupted."""
    number = 1
    while (run_dir / f"earlier-{number}" / JOURNAL).exists():
        number += 1
    aside = run_dir / f"earlier-{number}"
    aside.mkdir(exist_ok=True)
    return aside


def _require_end(run_dir: Path, journal: Path) -> None:
    """Raise UsageError unless the run is over: by its journal, or since that was not touched for long."""
    alive = f"--run-dir {run_dir} holds a run that is still alive (relight status {run_dir}); end it, or choose another"
    with journal.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(alive) from None
        if _has_end(run_dir, file.fileno()):
            return
        # Killed, or its controller is on another host, where a lock may not be seen from here.
        touched = os.stat(journal).st_mtime
        if _storage_time(run_dir) - touched < SILENT_SECONDS:
            print(f"relight: the run in {run_dir} has no end; waiting for a sign of life", file=sys.stderr, flush=True)
        while _storage_time(run_dir) - touched < SILENT_SECONDS:
            time.sleep(_LOOK_SECONDS)
            if os.stat(journal).st_mtime != touched:
                raise UsageError(alive)


def _storage_time(run_dir: Path) -> float:
    """Return the time by the clock that dates the files there, from which this host's may be hours away."""
    with tempfile.TemporaryFile(dir=run_dir) as file:
        os.utime(file.fileno())
        return os.fstat(file.fileno()).st_mtime


def _has_end(run_dir: Path, descriptor: int) -> bool:
    return (run_dir / "report.json").exists() or any(map(_end, _last_lines(descriptor)))


def _last_lines(descriptor: int) -> Iterator[bytes]:
    """Yield whole lines from the last one on."""
    size = os.fstat(descriptor).st_size
    return reversed(os.pread(descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).split(b"\n")[:-1])


def _end(line: bytes) -> EndJob | None:
    """Return the end of the job that a line tells of."""
    try:
        command = decode_line(line).command
    except msgspec.MsgspecError:  # the header, or cut off at the beginning
        return None
    return command if isinstance(command, EndJob) else None
