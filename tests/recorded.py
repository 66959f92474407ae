"""The journal of a job that was simulated, or recorded, as a file: written by the server's own journal."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from relight.server.records.journal import Journal
from relight.sim.timed.job import JournalEntry
from relight.wire.settings import JobSettings


def write_journal(
    run_dir: Path,
    settings: JobSettings,
    entries: Iterable[JournalEntry],
    on_notice: Callable[[str, str], None] = lambda level, text: pytest.fail(text),
) -> None:
    """As the server does: the fact first, then the orders that it led to."""
    journal = Journal(run_dir, settings, on_notice)
    for entry in entries:
        if entry.event is None:
            journal.expiry(entry.now)
        else:
            journal.event(entry.now, entry.event)
        journal.commands(entry.now, entry.commands)
    journal.close()
