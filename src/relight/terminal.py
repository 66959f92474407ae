"""The screen of `relight run`: the workers' output, notices, and one live line that never gets in their way.

The workers' output goes to standard output, everything of relight's own to standard error, so a script's output can
be redirected as before. All writing happens in one thread: a reader that stalls (`| less`) must not keep the
launcher from hearing Ctrl-C.
"""

import asyncio
import contextlib
import math
import os
import queue
import select
import sys
import threading
import time

from relight.transfer.plan.update.progress import describe_publishing, describe_restores
from relight.wire.messages import StatusUpdate
from relight.words import count

PLAIN_SECONDS = 10.0  # between two progress lines where there is no live one
MAX_QUEUED_BYTES = 2**20
_CLEAR = b"\r\x1b[K"


class Screen:
    """Thread-safe enough for one event loop: every method is called from the loop, only the writing is elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._live = sys.stdout.isatty() and sys.stderr.isatty() and not quiet
        self._line = ""  # the live line, or the newest progress
        self._at_line_start = True  # of the workers' output
        self._told_at = -math.inf
        self._told: tuple[int, int] | None = None
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._queued_bytes = 0
        self._room: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._write_loop, name="terminal", daemon=True)
        self._thread.start()

    async def output(self, chunk: bytes) -> None:
        """Show what workers printed. Waits while the reader of our standard output is too slow."""
        self._hide()
        self._put(1, chunk)
        self._at_line_start = chunk.endswith(b"\n")
        self._show()
        while self._queued_bytes > MAX_QUEUED_BYTES:
            self._loop, self._room = asyncio.get_running_loop(), asyncio.Event()
            await self._room.wait()

    def say(self, text: str, level: str = "info") -> None:
        """A line of relight's own."""
        if self._quiet and level == "info":
            return
        self._hide()
        if not self._at_line_start and self._live:
            self._put(2, b"\n")
            self._at_line_start = True
        self._put(2, f"relight: {printable(text)}\n".encode())
        self._show()

    def say_block(self, text: str) -> None:
        """Several lines as they are, such as the traceback of the user's script."""
        self._hide()
        self._put(2, (printable(text.rstrip("\n"), keep="\n\t") + "\n").encode())

    def show_text(self, text: str) -> None:
        """Text of relight's own with its colours, such as the report."""
        self._hide()
        self._put(2, text.encode())

    def progress(self, update: StatusUpdate) -> None:
        """Renew the live line; without one, print the progress now and then and whenever something happened."""
        self._line = progress_line(update)
        if self._live:
            self._hide()
            self._show()
            return
        now, key = time.monotonic(), (update.generation, update.failures)
        changed = self._told is not None and key != self._told
        if self._quiet or not (changed or now - self._told_at >= PLAIN_SECONDS):
            return
        self._told, self._told_at = key, now
        self._put(2, f"relight: {self._line}\n".encode())

    def end_progress(self) -> None:
        """No live line from here on."""
        self._hide()
        self._live, self._line = False, ""

    def close(self, timeout_seconds: float) -> None:
        """Let what was said reach the terminal, unless its reader has stalled."""
        self.end_progress()
        self._queue.put(None)
        self._thread.join(timeout_seconds)

    def _hide(self) -> None:
        if self._live and self._line:
            self._put(2, _CLEAR)

    def _show(self) -> None:
        if self._live and self._line and self._at_line_start:
            self._put(2, fit_line(self._line).encode())

    def _put(self, descriptor: int, data: bytes) -> None:
        self._queued_bytes += len(data)
        self._queue.put((descriptor, data))

    def _write_loop(self) -> None:
        closed = set()
        while (item := self._queue.get()) is not None:
            descriptor, data = item
            if descriptor not in closed:
                try:
                    _write_all(descriptor, data)
                except OSError:  # the reader went away (`| head`): training goes on without it
                    closed.add(descriptor)
            self._queued_bytes -= len(data)
            loop, room = self._loop, self._room
            if loop is not None and room is not None and self._queued_bytes <= MAX_QUEUED_BYTES:
                with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                    loop.call_soon_threadsafe(room.set)


def progress_line(update: StatusUpdate) -> str:
    """`step 118/1000 · loss 2.31 · 8.4 steps/s · 2 failures survived · generation 3 · 1 standby ready`"""
    positions = [item.position for item in update.ranks if item.position.stamp_ns]
    step = max((position.version for position in positions), default=0)
    parts = [f"step {step}/{update.until}" if update.until else update.stage]
    losses = [position.loss for position in positions if not math.isnan(position.loss)]
    if losses:
        parts.append(f"loss {losses[0]:.4g}")
    if update.until:
        parts.append(f"{update.steps_per_second:.1f} steps/s")
    if update.stage not in ("training", "starting"):
        parts.append(update.stage)
    parts += [describe_restores(update.restoring) or update.waiting, describe_publishing(update.publishing)]
    if update.failures:
        parts.append(f"{count(update.failures, 'failure')} survived")
    parts.append(f"generation {update.generation}")
    if update.standbys_ready:
        parts.append(f"{count(update.standbys_ready, 'standby')} ready")
    return " · ".join(part for part in parts if part)


def fit_line(text: str) -> str:
    """Cut to the terminal's width: a live line that wraps cannot be cleared."""
    try:
        width = os.get_terminal_size(2).columns or 80
    except OSError:
        width = 80
    return text if len(text) < width else text[: max(0, width - 2)] + "…"


def printable(text: str, keep: str = "") -> str:
    """Text from elsewhere must not move the cursor or ring the bell."""
    return "".join(c if c.isprintable() or c in keep else " " if c.isspace() else "\ufffd" for c in text)


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # another process that shares the terminal made it non-blocking
            select.select([], [descriptor], [])
