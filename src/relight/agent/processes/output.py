"""The output of workers: cut into lines, kept in log files, and shown with a label.

The loop that watches processes must never wait for a disk or a terminal, so all writing happens in threads with
bounded queues. What such a thread cannot take is dropped and counted; a worker is never held up by its output.
"""

import asyncio
import os
import re
import select
import threading
from collections import deque
from pathlib import Path
from typing import Protocol

MAX_LINE_BYTES = 64 * 1024  # a longer line is shown in pieces
_STANDARD_OUTPUT = 1
FILE_ONLY = b"\x1e"  # first byte of a line that goes to the log file alone
_MAX_SPOOLED_BYTES = 16 * 2**20
_READ_BYTES = 64 * 1024
_LAST_READS = 64  # of a pipe that descendants of a dead worker may keep filling forever
_LINE_END = re.compile(rb"\r\n|\n|\r")


class LineSplitter:
    """Bytes in, whole lines out. A progress bar's bare carriage return ends a line too."""

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._limit = limit
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        buffer = self._rest + data
        held = buffer[-1:] if buffer.endswith(b"\r") else b""  # its "\n" may still come
        *lines, rest = _LINE_END.split(buffer[: len(buffer) - len(held)])
        pieces = [piece for line in lines for piece in self._pieces(line)]
        *more, rest = self._pieces(rest)
        self._rest = rest + held
        return pieces + more

    def flush(self) -> list[bytes]:
        """The last line, if it has no end."""
        rest, self._rest = self._rest.removesuffix(b"\r"), b""
        return [rest] if rest else []

    def _pieces(self, line: bytes) -> list[bytes]:
        pieces = []
        mark = line[:1] if line.startswith(FILE_ONLY) else b""
        while len(line) > self._limit:
            cut = self._limit
            while cut > self._limit - 3 and line[cut] & 0xC0 == 0x80:  # inside a UTF-8 character
                cut -= 1
            pieces.append(line[:cut])
            line = mark + line[cut:]
        return [*pieces, line]


class Sink(Protocol):
    def write(self, data: bytes) -> None: ...


class Terminal:
    """The agent's own standard output, from where the launcher shows it."""

    def write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(_STANDARD_OUTPUT, data) :]
            except BlockingIOError:
                select.select([], [_STANDARD_OUTPUT], [])
            except OSError:  # no reader is left
                return


class LogFile:
    """Appends, until the disk refuses, which is reported once."""

    def __init__(self, path: Path, console: "Spool") -> None:
        self._path = path
        self._console = console
        self._broken = False

    def write(self, data: bytes) -> None:
        if self._broken:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(data)
        except OSError as error:
            self._broken = True
            text = f"relight: {self._path} cannot be written ({error.strerror}); its output is only shown from now on\n"
            self._console.put(TERMINAL, text.encode())


class Spool:
    """A thread that writes what it is given, in order. Full, it drops, and says so once there is room again."""

    def __init__(self, name: str, limit: int = _MAX_SPOOLED_BYTES) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._queue: deque[tuple[Sink, bytes]] = deque()
        self._queued_bytes = 0  # including what is being written
        self._dropped_bytes = 0
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, sink: Sink, data: bytes) -> None:
        """Never waits."""
        with self._changed:
            if self._queued_bytes + len(data) > self._limit:
                self._dropped_bytes += len(data)
                return
            if self._dropped_bytes:
                note = f"relight: {self._dropped_bytes} bytes of output are missing here: it came too fast\n".encode()
                self._dropped_bytes = 0
                self._append(sink, note)
            self._append(sink, data)
            self._changed.notify_all()

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all is written. False: it takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._queued_bytes == 0, timeout_seconds)

    def _append(self, sink: Sink, data: bytes) -> None:
        self._queue.append((sink, data))
        self._queued_bytes += len(data)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue))
                sink, data = self._queue.popleft()
            sink.write(data)
            with self._changed:
                self._queued_bytes -= len(data)
                self._changed.notify_all()


TERMINAL = Terminal()


class Printer:
    """Writes all output of one agent: to its own terminal, and to log files if there is a run directory."""

    def __init__(self, run_dir: str) -> None:
        self._logs = Path(run_dir) / "logs" if run_dir else None
        self._console = Spool("console")
        self._files = Spool("log-files")

    def say(self, text: str) -> None:
        """Print a line of the agent's own."""
        self._console.put(TERMINAL, f"{text}\n".encode())

    def log_file(self, name: str) -> LogFile | None:
        return LogFile(self._logs / f"{name}.log", self._console) if self._logs else None

    def show(self, label: str, file: LogFile | None, lines: list[bytes]) -> None:
        """Bytes that are not UTF-8 are replaced, so that neither a terminal nor a reader of the file chokes."""
        shown, kept = [], []
        for line in lines:
            text = line.removeprefix(FILE_ONLY).decode("utf-8", "replace")
            kept.append(f"{text}\n")
            if not line.startswith(FILE_ONLY):
                shown.append(f"[{label}] {text}\n")
        if file is not None and kept:
            self._files.put(file, "".join(kept).encode())
        if shown:
            self._console.put(TERMINAL, "".join(shown).encode())

    def flush(self, timeout_seconds: float) -> None:
        self._files.flush(timeout_seconds)
        self._console.flush(timeout_seconds)


class Output:
    """Standard output and standard error of one process, read as they come."""

    def __init__(self, process: str, rank: int | None, descriptors: tuple[int, ...], printer: Printer) -> None:
        self._process = process
        self._printer = printer
        self._splitters = {descriptor: LineSplitter() for descriptor in descriptors}
        self._loop = asyncio.get_running_loop()
        self._label, self._file = self._label_and_file(rank)
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
            self._loop.add_reader(descriptor, self._read, descriptor)

    def assign(self, rank: int) -> None:
        """The standby has taken a rank: its lines belong to that rank from now on."""
        self._label, self._file = self._label_and_file(rank)

    def finish(self) -> None:
        """Take what is there, and stop reading, even if another process still holds the other end."""
        for descriptor in list(self._splitters):
            for _ in range(_LAST_READS):
                if not self._read(descriptor):
                    break
            self._end(descriptor)

    def _label_and_file(self, rank: int | None) -> tuple[str, LogFile | None]:
        if rank is None:
            return f"standby {self._process}", self._printer.log_file(f"standby-{self._process}")
        return f"rank {rank}", self._printer.log_file(f"rank-{rank}")

    def _read(self, descriptor: int) -> bool:
        """Read once. False: there is nothing more for now."""
        if descriptor not in self._splitters:
            return False
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._end(descriptor)
            return False
        self._printer.show(self._label, self._file, self._splitters[descriptor].feed(data))
        return True

    def _end(self, descriptor: int) -> None:
        splitter = self._splitters.pop(descriptor, None)
        if splitter is not None:
            self._printer.show(self._label, self._file, splitter.flush())
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
