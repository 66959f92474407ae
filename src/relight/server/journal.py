"""The journal: one JSON line for each thing that happened and each order given, written before the order is sent.

Replaying the lines through a fresh core repeats every decision, so a run that went wrong can be studied at a desk.
It is a record and not a crutch: with a full disk the job trains on without it, and says so once.
"""

import datetime
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from relight.core.commands import Assign, Begin, Command, Stop
from relight.core.events import Event
from relight.wire.settings import JobSettings

FORMAT_VERSION = 1


class JournalHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line."""

    format: int
    wall: str  # ISO time at which it was opened
    settings: JobSettings


class JournalLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Any other line; exactly one of the last four fields is set."""

    now: float  # seconds since the job's start, the `now` that the core was given
    wall: str = ""
    event: Event | None = None
    command: Command | None = None
    expired: bool = False  # the core's deadline passed: `expire(now)` was called
    note: str = ""  # said by the server itself; no part of a replay


class Journal:
    """Appends lines to a file. Never raises: `on_failure` is told once, with the reason in words."""

    def __init__(self, path: Path, settings: JobSettings, on_failure: Callable[[str], None]) -> None:
        self._path = path
        self._on_failure = on_failure
        self._encoder = msgspec.json.Encoder()
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._fail(error)
        self._write(JournalHeader(format=FORMAT_VERSION, wall=_wall(), settings=settings))

    def event(self, now: float, event: Event) -> None:
        self._write(JournalLine(now=now, wall=_wall(), event=event))

    def expiry(self, now: float) -> None:
        self._write(JournalLine(now=now, wall=_wall(), expired=True))

    def note(self, now: float, text: str) -> None:
        self._write(JournalLine(now=now, wall=_wall(), note=text))

    def commands(self, now: float, commands: Sequence[Command]) -> None:
        """Record orders about to be sent; a generation is on the disk before anyone can be in it."""
        for command in commands:
            self._write(JournalLine(now=now, command=command))
        if any(isinstance(command, Stop | Assign | Begin) for command in commands):
            self._sync()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, line: msgspec.Struct) -> None:
        if self._descriptor is None:
            return
        rest = memoryview(self._encoder.encode(line) + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            self._fail(error)

    def _sync(self) -> None:
        if self._descriptor is None:
            return
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.close()
        self._on_failure(
            f"the journal {self._path} cannot be written ({error.strerror or error}); training goes on without it, "
            "but this run can neither be replayed nor be shown as a timeline from here on"
        )


def read_journal(path: Path) -> tuple[JournalHeader, tuple[JournalLine, ...]]:
    """Read a journal. A last line that was cut short by a crash or a full disk is left out.

    Raises OSError, or msgspec.DecodeError with the number of the line that is not understood.
    """
    lines = path.read_bytes().split(b"\n")
    header = msgspec.json.decode(lines[0], type=JournalHeader)
    if header.format != FORMAT_VERSION:
        raise msgspec.ValidationError(f"{path} has format {header.format}; this relight reads {FORMAT_VERSION}")
    found = []
    for number, line in enumerate(lines[1:], start=2):
        if number == len(lines):  # after the last newline: nothing, or half a line
            break
        try:
            found.append(msgspec.convert(_without_nan(msgspec.json.decode(line)), JournalLine))
        except msgspec.DecodeError as error:
            raise msgspec.ValidationError(f"{path}, line {number}: {error}") from error
    return header, tuple(found)


def _without_nan(value: Any) -> Any:
    """JSON has no NaN, so "no loss yet" is written as null; leaving the field out gives the default back."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items() if not (key == "loss" and item is None)}
    return value


def _wall() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
