"""`relight top`: the ranks of a job, live in the terminal. `q` leaves; arrows and page keys move through many ranks."""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from relight.dashboard.sources.memory import Memory
from relight.watch import tables
from relight.watch.run import Run
from relight.watch.run_dir import State
from relight.watch.status import Status, status_of

REFRESH_SECONDS = 0.5
_KEYS = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\x1b[H": "home"}
_KEYS |= {b"k": "up", b"j": "down", b" ": "page down", b"g": "home", b"q": "quit", b"Q": "quit", b"\x03": "quit"}


class Looker:
    """Reads a run and says how it stands."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._memory = Memory()

    def look(self) -> Status:
        """The status of this moment."""
        run = self._run
        run.read()
        job, silent = run.job, run.silent_seconds()
        pids = {process.name: process.pid for process in job.processes().values()} if job.ended is None else {}
        return status_of(
            job, str(run.run_dir), job.now_ns(time.time_ns()), silent, self._memory.rss_bytes(pids) if pids else {}
        )


def page(status: Status, first: int, console: Console) -> RenderableType:
    """Return the lines that fit onto the screen, with the ranks from `first` on."""
    head_lines = len(console.render_lines(tables.head(status)))
    room = max(1, console.height - head_lines - 3)  # an empty line, the grid's title, the foot
    shown = status.ranks[first : first + room]
    foot = "q leaves"
    if len(shown) < len(status.ranks):
        foot += f"; ranks {first} to {first + len(shown) - 1} of {len(status.ranks)}: arrows, page up, page down"
    return Group(tables.head(status), Text(), tables.grid(shown), Text(foot, "dim"))


def scrolled(first: int, key: str, count: int, page_lines: int) -> int:
    """The first rank to show after a key."""
    moves = {"up": -1, "down": 1, "page up": -page_lines, "page down": page_lines, "home": -count}
    return max(0, min(first + moves.get(key, 0), count - 1))


def show(run: Run) -> None:
    """Until `q`. Needs a terminal on standard input and output."""
    looker, console = Looker(run), Console()
    first = 0
    with _keys() as read_key, _ended_by_signal(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            status = looker.look()
            live.update(page(status, first, console), refresh=True)
            until = time.monotonic() + REFRESH_SECONDS
            while (left := until - time.monotonic()) > 0:
                key = read_key(left)
                if key == "quit":
                    return
                if key:
                    first = scrolled(first, key, len(status.ranks), max(1, console.height - 12))
                    live.update(page(status, first, console), refresh=True)


def is_terminal() -> bool:
    """Return whether both ends are terminals."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def print_once(run: Run, console: Console) -> State:
    """Without a terminal: how it stands now, with every rank."""
    status = Looker(run).look()
    console.print(tables.whole(status, most=len(status.ranks)), highlight=False)
    return status.state


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Keys as they are pressed, without Enter; the terminal is as before afterwards."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def read_key(seconds: float) -> str:
        """The name of a key, or an empty string: none was pressed, or one without a meaning."""
        if not select.select([descriptor], [], [], seconds)[0]:
            return ""
        data = os.read(descriptor, 64)
        return "quit" if not data else _KEYS.get(data, _KEYS.get(data[:1], ""))

    try:
        yield read_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _ended_by_signal() -> Iterator[None]:
    """SIGTERM leaves as Ctrl-C does, so that the terminal is put back."""

    def leave(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
