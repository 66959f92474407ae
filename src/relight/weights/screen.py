"""Shows the progress of `relight weights publish` on standard error: one bar on a terminal, now and then a line
elsewhere. No torch.
"""

import contextlib
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from relight.timeline.draw.terminal import duration
from relight.transfer.plan.manifest import describe_bytes
from relight.transfer.plan.update.result import UpdateProgress
from relight.weights.summary import printable, rate

PLAIN_SECONDS = 10.0  # between two lines of progress where there is no bar


class Screen:
    """`say` may be called from any thread; the rest is for one, and `close` must end it."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        # What can be coloured on request (FORCE_COLOR) is no terminal yet: a bar in a log file is of no use.
        self._is_live = sys.stderr.isatty() and self._console.is_terminal and not self._console.is_dumb_terminal
        self._bar: Progress | None = None
        self._told = ""
        self._told_at = time.monotonic()

    def say(self, text: str) -> None:
        """A line that stays."""
        line = printable(f"relight: {text}", sys.stderr.encoding or "utf-8")
        with contextlib.suppress(OSError):  # the reader went away (`2>&1 | head`): engines still want the weights
            if self._is_live:
                self._console.print(Text(line), soft_wrap=True)  # above the bar
            else:
                print(line, file=sys.stderr, flush=True)

    def waiting(self, here: int, wanted: int, noun: str) -> None:
        """Nothing can begin before they are here. Elsewhere than on a terminal: a line whenever one has come."""
        words = f"{here} of {wanted} {noun}s are here"
        self._show("waiting", here, wanted, words, is_due=words != self._told)

    def moving(self, progress: UpdateProgress, seconds: float) -> None:
        """The update has been running for so long."""
        self._show("publishing", progress.held_bytes, progress.total_bytes, describe_progress(progress, seconds))

    def taking(self, have: int, engines: int) -> None:
        """Everything is moved; engines first finish what they are answering with the version before."""
        self._show("publishing", have, engines, f"in every engine; {have} of {engines} answer with it")

    def clear(self) -> None:
        """Take the bar away; lines stay."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()
            self._bar = None

    def close(self) -> None:
        """Leave the terminal as it was, even if `clear` was interrupted."""
        self.clear()
        if self._is_live:
            with contextlib.suppress(OSError):
                self._console.show_cursor(True)

    def _show(self, doing: str, done: int, total: int, words: str, *, is_due: bool = False) -> None:
        if not self._is_live:
            if is_due or time.monotonic() - self._told_at >= PLAIN_SECONDS:
                self._told, self._told_at = words, time.monotonic()
                self.say(f"{doing}: {words}")
            return
        with contextlib.suppress(OSError):  # the terminal is gone: a signal says so, if that is to end it
            self._draw(doing, done, total, words)

    def _draw(self, doing: str, done: int, total: int, words: str) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[words]}", markup=False),
                console=self._console,
                auto_refresh=False,  # no thread: who waits draws
                transient=True,
                expand=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bar.add_task(doing, words=words)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], description=doing, completed=done, total=total, words=words)
        self._bar.refresh()


def describe_progress(progress: UpdateProgress, seconds: float) -> str:
    """ "12.0 MiB of 25.6 MiB, 1.6 GiB/s, 3 s left": what every engine holds, and the mean rate since the start."""
    words = [f"{describe_bytes(progress.held_bytes)} of {describe_bytes(progress.total_bytes)}"]
    if progress.held_bytes and seconds > 0:
        left_seconds = seconds * (progress.total_bytes - progress.held_bytes) / progress.held_bytes
        words += [rate(progress.held_bytes, seconds), f"{_whole(left_seconds)} left"]
    return ", ".join(words)


def _whole(seconds: float) -> str:
    """A guessed time, with no more digits than it deserves, and none that flicker."""
    return duration(seconds) if seconds >= 99.5 else f"{max(1, round(seconds))} s"
