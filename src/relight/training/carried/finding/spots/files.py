"""Files that a script changes while its loop runs, and reads again: a step that is undone leaves them changed."""

import os
import shutil
import stat
import sys
import sysconfig
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from relight.script_files import is_script_file
from relight.training.carried.reading.flow import ASKED_FOR

_PYTHON = tuple(sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(sysconfig.get_path(name) + "/" for name in ("purelib", "platlib"))
_COPIES = shutil.copyfile.__code__  # gives the script no value of what it reads
_READERS = ("torch.serialization", "numpy.", "pandas.")  # modules that open a file which they get the name of
_DOUBT = (
    "{names}: a file that has changed since the loop began, and that the script has read since then. It is not undone "
    "with a step, and a replacement finds it as it is. Keep such values in a variable. training.carry(ignore=(...,)) "
    "with the file's name says that no step depends on it"
)
ASKED_FOR_KEY = f"setting\x1f\x1f{ASKED_FOR}"  # of its place
_INSTEAD = (
    "Let a variable say what was saved, which is set inside the block. "
    f"training.carry(ignore=({ASKED_FOR!r},)) says that no step depends on them"
)
NOT_MADE = (
    f"{ASKED_FOR}: made, changed or removed by code after the block, and a rank was lost just there. Its replacement "
    f"does not do so for that step. {_INSTEAD}"
)
FOUND_AGAIN = (
    f"{ASKED_FOR}: made, changed or removed by code between two epochs, and a rank was lost there. Its replacement has "
    f"run that code again, and may have found what the lost rank had left. {_INSTEAD}"
)
_NOT_UNDONE = (
    f"{ASKED_FOR} ({{where}}): made, changed or removed by steps, which ask whether they exist. A step that is undone "
    f"leaves them so, and those that a lost rank was about to make are missing. {_INSTEAD}"
)


class Files:
    """Those that were read since the loop began, and had changed since then; `names` goes on in a replacement."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._ever: set[str] = set()  # also in steps that were undone
        self._written: set[str] = set()
        self._in_step: set[str] = set()  # the same, in the step under way
        self._undone: set[str] = set()  # by a step that was undone, and not written anew since
        self._unsaid: set[str] = set()  # names of such files, once they were read
        self._ignored: Collection[str] = ()
        self._since_ns = 0
        self._told: set[str] | None = None  # once a recovery has asked
        self.changed_at = ""  # FILE:LINE in a step that asks whether files exist

    @property
    def since_ns(self) -> int:
        """The beginning of the loop, or of a predecessor's, in nanoseconds since 1970; 0: it has not begun."""
        return self._since_ns

    def begin(self, ignored: Collection[str]) -> None:
        """The loop begins. `ignored`: names of what no step depends on, as the script says."""
        self._ignored = ignored
        now = time.time_ns()  # not the coarse clock: file systems may take a finer one
        self._since_ns = min(self._since_ns or now, now)
        _watch(self)

    def begin_step(self) -> None:
        """A step begins."""
        self._in_step.clear()

    def roll_back(self) -> None:
        """The step under way is undone; its files stay as they are."""
        self._undone |= self._in_step

    def adopt(self, since_ns: int) -> None:
        """Take over from a process whose loop began then: what it has written since, this one finds changed."""
        self._since_ns = min(self._since_ns or since_ns, since_ns or self._since_ns)
        self._told = self._told or set()

    def leave(self) -> None:
        """The loop has ended."""
        _watch(None)

    def take(self, names: Iterable[str]) -> None:
        """Go on with these, which were read as far as it counts."""
        self.names = set(names)
        self._ever |= self.names

    def doubt(self) -> str:
        """Return why a recovery cannot vouch for equal bits, if there are any."""
        self._told = set()
        return self.doubt_later() or (_NOT_UNDONE.format(where=self.changed_at) if self.changed_at else "")

    def doubt_later(self) -> str:
        """Return the same of files that were read since a recovery: the step that was undone may have changed them."""
        if self._told is None:
            return ""
        names = self._ever - self._told
        self._told |= names
        return _doubt_of(names)

    def doubt_of_undone(self) -> str:
        """Return the same of files that were read since the last turn, and that only an undone step has written."""
        names = self._unsaid.difference(self._ignored)
        self._unsaid.clear()
        return _doubt_of(names)

    def opened(self, path: Any, flags: int, *, to_copy: bool) -> None:
        """The script has opened a file, or a function that copies files has."""
        if isinstance(path, int):
            return
        name, access = os.path.realpath(os.fsdecode(path)), flags & os.O_ACCMODE
        is_read = access != os.O_WRONLY and not flags & os.O_TRUNC and not to_copy
        if is_read and self._has_changed(name):
            self.take({*self.names, Path(name).name}.difference(self._ignored))
            self._unsaid |= {Path(name).name} if name in self._undone else set()
        if access != os.O_RDONLY:
            self._written.add(name)
            self._in_step.add(name)
        if flags & os.O_TRUNC:
            self._undone.discard(name)

    def _has_changed(self, name: str) -> bool:
        try:
            found = os.stat(name)
        except (OSError, ValueError):
            return False
        is_kept = stat.S_ISREG(found.st_mode) and found.st_size > 0  # files of /proc and /sys have no size
        return is_kept and (name in self._written or found.st_mtime_ns > self._since_ns)


def _doubt_of(names: Collection[str]) -> str:
    return _DOUBT.format(names=", ".join(sorted(names))) if names else ""


_watching: list[Files] = []  # a hook stays for the life of its process, once it is there
_hooked: list[bool] = []


def _watch(files: Files | None) -> None:
    _watching[:] = [] if files is None else [files]
    if _watching and not _hooked:
        _hooked.append(True)
        sys.addaudithook(_heard)


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _watching or threading.current_thread() is not threading.main_thread():
        return
    if _is_of_script(opener := sys._getframe(1)):
        _watching[0].opened(arguments[0], arguments[2], to_copy=opener.f_code is _COPIES)


def _is_of_script(frame: FrameType | None) -> bool:
    """Return whether the script opens a file itself, or with what Python or a reader of files offers."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib"):
            return False
        is_of_python = file.startswith(_PYTHON) and not file.startswith(_PACKAGES)
        if not (is_of_python or str(frame.f_globals.get("__name__")).startswith(_READERS)):
            return is_script_file(file)
        frame = frame.f_back
    return False
