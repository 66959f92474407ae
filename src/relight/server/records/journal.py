"""The journal: one JSON line for each thing that happened and each order given, written before the order is sent.

Replaying the lines through a fresh core repeats every decision, so a run that went wrong can be studied at a desk.
A restarted controller does the same, and so knows what its predecessor knew. With a full disk the job trains on.
"""

import contextlib
import datetime
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from relight.core.account.report import StorageWait
from relight.core.protocol.commands import Assign, Begin, Command, Stop
from relight.core.protocol.events import Event
from relight.core.protocol.record import Record
from relight.server.records.reserve import Reserve
from relight.wire.settings import JobSettings

FORMAT_VERSION = 1
JOURNAL = "journal.jsonl"
SILENT_SECONDS = 30.0  # six signs of life missed, by clocks that may differ a little: no controller
RESERVE_NAME = "journal.reserve"
MAX_UNWRITTEN_BYTES = 8 * 2**20  # kept in memory while the disk takes nothing
LONG_WRITE_SECONDS = 0.02  # worth a line in the report
MAX_LONG_WRITES = 1000
_CHUNK_BYTES = 64 * 1024


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


def records(lines: Iterable[JournalLine]) -> Iterator[Record]:
    """Return the events and expiries that a controller took in, without its commands."""
    return (Record(line.now, line.event) for line in lines if line.event is not None or line.expired)


class JournalInUse(Exception):
    """Another process writes this journal: two controllers would give two different orders."""


class Journal:
    """Appends lines to a file. A disk that takes nothing is reported once, and tried again with every line.

    Lines that could not be written are kept in memory, so nothing is missing once there is room again. Until then
    the *reserve* beside the journal says that something is missing, and which generation is the newest.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: JobSettings,
        say: Callable[[str, str], None],
        *,
        resume: bool = False,
        take_over: bool = False,
        give_way: Callable[[], None] = lambda: None,
        may_act: Callable[[], bool] = lambda: True,
    ) -> None:
        """Begin a journal, or `resume` one; `say(level, text)` tells people. Raises JournalInUse.

        With `take_over` a lock that another controller holds is no hindrance: what it has written is copied, and the
        copy takes the journal's place. Should that controller live, its own file is not the journal any more; it finds
        that out before its next line, and calls `give_way` before anything can come of the event.

        `may_act` is asked before each line, and after the lines of commands: a controller that holds a Lease and is
        stopped for longer than that gives an order only if the successor has read it in the journal.
        """
        self._may_act = may_act
        self._give_way = give_way
        self._path = run_dir / JOURNAL
        self._say = say
        self._encoder = msgspec.json.Encoder()
        self._unwritten = bytearray()
        self._gathers = False  # lines wait for each other
        self._failing = False
        self._synced_generation = 0  # the newest that is known to be on the disk
        self._missing = False  # too much could not be written: the end of the file is the end of the journal
        self._descriptor: int | None = None
        self._reserve: Reserve | None = None
        self._found_bytes = 0  # written by an earlier controller, if this resumes its journal
        self.storage_waits: list[StorageWait] = []  # writes of this controller that took long
        self.incomplete = False  # more happened under that controller than it could write
        try:
            self._open(settings, resume=resume, take_over=resume and take_over)
        except OSError as error:
            self._fail(error)

    def _open(self, settings: JobSettings, *, resume: bool, take_over: bool) -> None:
        try:
            self._descriptor = _open_locked(self._path, 0 if resume else os.O_EXCL)
        except FileExistsError:
            raise JournalInUse(f"{self._path} is there already: another run has just been started there") from None
        if take_over:  # also if the lock was free: on storage that is another host's it may be gone with a connection
            if self._descriptor is not None:
                os.close(self._descriptor)
            draft = self._path.with_suffix(".taken")
            shutil.copyfile(self._path, draft)
            self._descriptor = _open_locked(draft)
            if self._descriptor is not None:
                os.fsync(self._descriptor)
                draft.replace(self._path)
        if self._descriptor is None:
            raise JournalInUse(f"{self._path} is being written by another controller of this job")
        self._reserve = Reserve(self._path.parent / RESERVE_NAME)
        self.incomplete = self._reserve.incomplete
        whole = _whole_lines(self._descriptor)
        os.ftruncate(self._descriptor, whole)  # half a line is all that a dead controller may have left after them
        if whole:
            self._found_bytes = whole
            read_header(self._path)
        else:
            self._write(JournalHeader(format=FORMAT_VERSION, wall=_wall(), settings=settings))

    def found(self) -> Iterator[JournalLine]:
        """Yield the lines of an earlier controller, one after the other: a journal may be larger than the memory.

        Raises OSError, or msgspec.DecodeError with the number of the line that is not understood.
        """
        return read_lines(self._path, self._found_bytes) if self._found_bytes else iter(())

    def so_far(self) -> Iterator[JournalLine]:
        """All lines up to now. Raises OSError if some of them could not be written; else as `found`."""
        self._write_out()
        if self._descriptor is None or self._failing or self._missing:
            raise OSError(0, "not all of it could be written")
        return read_lines(self._path, os.fstat(self._descriptor).st_size)

    def event(self, now: float, event: Event) -> None:
        self._write(JournalLine(now=now, wall=_wall(), event=event))

    def expiry(self, now: float) -> None:
        self._write(JournalLine(now=now, wall=_wall(), expired=True))

    def note(self, now: float, text: str) -> None:
        self._write(JournalLine(now=now, wall=_wall(), note=text))

    def commands(self, now: float, commands: Sequence[Command]) -> str:
        """Record commands about to be sent; a generation is on the disk before a process can join it.

        Returns an empty string, or why a generation among them must not be used: a restarted controller would not
        know of it, and might use it again.
        """
        since = time.monotonic()
        refused = self._record(commands, now)
        waited = time.monotonic() - since
        if waited >= LONG_WRITE_SECONDS and len(self.storage_waits) < MAX_LONG_WRITES:
            self.storage_waits.append(StorageWait(at_seconds=now, seconds=waited))
        return refused

    def _record(self, commands: Sequence[Command], now: float) -> str:
        for command in commands:
            self._write(JournalLine(now=now, command=command))
        if self._gathers and commands:
            self._write_out()
        if commands and not self._may_act():
            self._give_way()
        generations = [command.generation for command in commands if isinstance(command, Stop | Assign | Begin)]
        if not generations or (max(generations) <= self._synced_generation and not self._failing):
            return ""  # ten thousand ranks are assigned in one generation: it is made durable once
        self._sync()
        if self._failing:
            return self._keep_generation(max(generations))
        self._synced_generation = max(generations)
        return ""

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Lines in here go to the file together, at its end, or before orders are given."""
        self._gathers = True
        try:
            yield
        finally:
            self._gathers = False
            self._write_out()

    def show_life(self) -> None:
        """Touch the file, so that every host that sees the run directory sees that the job has a controller."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None

    def _write(self, line: msgspec.Struct) -> None:
        if self._missing:
            return
        if not self._may_act():
            self._give_way()
        self._unwritten += self._encoder.encode(line) + b"\n"
        if not self._gathers:
            self._write_out()

    def _write_out(self) -> None:
        if self._descriptor is None or self._missing or not self._unwritten:
            return
        try:
            if os.fstat(self._descriptor).st_nlink == 0:
                self._give_way()
            while self._unwritten:
                written = os.write(self._descriptor, self._unwritten)
                del self._unwritten[:written]
            if self._failing:
                self._recover()
        except OSError as error:
            self._fail(error)
        if len(self._unwritten) > MAX_UNWRITTEN_BYTES:
            self._missing = True
            self._unwritten.clear()

    def _sync(self) -> None:
        if self._descriptor is None or self._failing:
            return
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if error.errno == errno.ESTALE:  # the same as no link, on storage that is another host's
            self._give_way()
        if self._failing:
            return
        self._failing = True
        if self._reserve is not None:
            with contextlib.suppress(OSError):  # then `_keep_generation` fails too, and says so
                self._reserve.keep(incomplete=True)
        self._say(
            "error",
            f"the journal {self._path} cannot be written ({error.strerror or error}); training goes on and failures "
            "are still handled, but if the controller died now, the job would have to end. Free some space: the "
            "missing lines are written then",
        )

    def _recover(self) -> None:
        """Note that all lines are in the file again. Raises OSError if the disk does not keep them."""
        if self._descriptor is None or self._reserve is None:
            return
        os.fdatasync(self._descriptor)
        self._reserve.keep(incomplete=False)
        self._failing = False
        self._say("info", f"the journal {self._path} is written again; nothing is missing")

    def _keep_generation(self, generation: int) -> str:
        try:
            if self._reserve is None:
                raise OSError(0, "there is no reserve either")
            if self._reserve.generation < generation:
                self._reserve.keep(generation=generation, incomplete=True)
        except OSError as error:
            return (
                f"generation {generation} cannot be made durable ({error.strerror or error}, and the journal cannot be "
                "written): a restarted controller might use it again, so it is refused. Resume from your "
                "last checkpoint once there is room on the disk"
            )
        return ""


def _open_locked(path: Path, more: int = 0) -> int | None:
    """Open a journal for one controller; None if another one has it. `more`: flags of open."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | more, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _whole_lines(descriptor: int) -> int:
    """Return where the last whole line ends, in bytes from the start of the file."""
    end = os.fstat(descriptor).st_size
    while end:
        begin = max(0, end - _CHUNK_BYTES)
        newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


def read_header(path: Path) -> JournalHeader:
    """The first line alone. Raises OSError or msgspec.DecodeError."""
    with path.open("rb") as file:
        header = msgspec.json.decode(file.readline(), type=JournalHeader)
    if header.format != FORMAT_VERSION:
        raise msgspec.ValidationError(f"{path} has format {header.format}; this relight reads {FORMAT_VERSION}")
    return header


def read_lines(path: Path, end: int | None = None) -> Iterator[JournalLine]:
    """All lines but the first, one after the other, up to `end` in bytes from the start of the file.

    A last line that was cut short by a crash or a full disk is left out. Raises as `read_journal` does.
    """
    with path.open("rb") as file:
        read = len(file.readline())
        for number, line in enumerate(file, start=2):
            read += len(line)
            if not line.endswith(b"\n") or (end is not None and read > end):
                return
            try:
                yield decode_line(line)
            except msgspec.DecodeError as error:
                raise msgspec.ValidationError(f"{path}, line {number}: {error}") from error


def read_journal(path: Path) -> tuple[JournalHeader, tuple[JournalLine, ...]]:
    """Read a journal. A last line that was cut short by a crash or a full disk is left out.

    Raises OSError, or msgspec.DecodeError with the number of the line that is not understood.
    """
    return read_header(path), tuple(read_lines(path))


def decode_line(line: bytes) -> JournalLine:
    """Any line but the first. Raises msgspec.DecodeError."""
    return msgspec.convert(_without_nan(msgspec.json.decode(line)), JournalLine)


def _without_nan(value: Any) -> Any:
    """JSON has no NaN, so "no loss yet" is written as null; leaving the field out gives the default back."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items() if not (key == "loss" and item is None)}
    return value


def _wall() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
