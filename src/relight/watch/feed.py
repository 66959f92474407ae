"""Writes the events of a run, as far as they are known, or as they come."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from relight.dashboard.sources.tail import Tail
from relight.errors import UsageError
from relight.server.records.journal import JOURNAL, SILENT_SECONDS
from relight.watch.event_feed import EventFeed
from relight.watch.events import Event
from relight.wire.status import decode_line

POLL_SECONDS = 0.2


def write_events(run_dir: Path, write: Callable[[bytes], object], *, follow: bool) -> bool:
    """Give one line of JSON for each event to `write`. With `follow` until the job has ended.

    Returns False if it was followed in vain: no controller runs the job. Raises UsageError if the journal is not
    understood; OSError of `write` is passed on.
    """
    feed, journal, encoder = EventFeed(), Tail(run_dir / JOURNAL), msgspec.json.Encoder()
    status = Tail(run_dir / "status.jsonl", run_dir / "status.1.jsonl")

    def tell(events: Iterable[Event]) -> None:
        for event in events:
            write(encoder.encode(event) + b"\n")

    try:
        while True:
            while lines := status.read():  # first: what the journal says before these lines is there by now
                _add_statuses(feed, lines)
            while lines := journal.read():
                for line in lines:
                    tell(feed.take(line))
            tell(feed.flush())
            if not follow or feed.ended:
                return True
            if _silent_seconds(run_dir) > SILENT_SECONDS:
                return False
            time.sleep(POLL_SECONDS)
    except msgspec.DecodeError as error:
        path = run_dir / JOURNAL
        raise UsageError(f"{path} cannot be read further (written by another version of relight?): {error}") from error
    finally:
        journal.close()
        status.close()


def _add_statuses(feed: EventFeed, lines: Iterable[bytes]) -> None:
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            feed.add_status(decode_line(line))


def _silent_seconds(run_dir: Path) -> float:
    """Since a sign of life; a job whose journal is not there yet has not begun."""
    try:
        return time.time() - os.stat(run_dir / JOURNAL).st_mtime
    except OSError:
        return 0.0
