"""The directory of a run, and the words for how its job stands: what the command line needs at once."""

import enum
from pathlib import Path

from relight.errors import UsageError
from relight.server.records.journal import JOURNAL

RUNS = Path("runs")


class State(enum.StrEnum):
    """The state of a job."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"  # it ended by itself, and said why
    LOST = "lost"  # it did not end, and no controller runs it


EXIT_STATUS = {State.FINISHED: 0, State.FAILED: 1, State.RUNNING: 3, State.LOST: 4}


def find_run(asked: Path | None) -> Path:
    """The directory of a run: the one asked for, or the newest under `runs/`. Raises UsageError."""
    if asked is not None:
        if not asked.is_dir():
            raise UsageError(f"there is no run directory {asked}; `relight run` prints the path of each run")
        if not (asked / JOURNAL).is_file():
            raise UsageError(f"{asked} holds no {JOURNAL}: it is no run's directory, or its job has not begun")
        return asked
    found = []
    for path in RUNS.glob(f"*/{JOURNAL}"):
        try:
            found.append((path.stat().st_mtime, path.parent))
        except OSError:  # removed meanwhile
            continue
    if not found:
        raise UsageError(f"there is no run under {RUNS.absolute()}; give the directory of one")
    return max(found)[1]
