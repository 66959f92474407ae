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

_PYTHON = tuple(sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(sysconfig.get_path(name) + "/" for name in ("purelib", "platlib"))
_COPIES = shutil.copyfile.__code__  # gives the script no value of what it reads
_READERS = ("torch.serialization", "numpy.", "pandas.")  # modules that open a file which they get the name of
_DOUBT = (
    "{names}: a file that has changed since the loop began, and that the script has read since then. It is not undone "
    "with a step, and a replacement finds it as it is. Keep such values in a variable. training.carry(ignore=(...,)) "
    "with the file's name says that no step depends on it"
)


class Files:
    """Those that were read since the loop began, and had changed since then; `names` goes on in a replacement."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._ever: set[str] = set()  # also in steps that were undone
        self._written: set[str] = set()
        self._ignored: Collection[str] = ()
        self._since_ns = 0
        self._told: set[str] | None = None  # once a recovery has asked

    def begin(self, ignored: Collection[str]) -> None:
        """The loop begins. `ignored`: names of what no step depends on, as the script says."""
        self._ignored = ignored
        self._since_ns = time.time_ns()  # not the coarse clock: file systems may take a finer one
        _watch(self)

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
        return self.doubt_later()

    def doubt_later(self) -> str:
        """Return the same of files that were read since a recovery: the step that was undone may have changed them."""
        if self._told is None:
            return ""
        names = sorted(self._ever - self._told)
        self._told.update(names)
        return _DOUBT.format(names=", ".join(names)) if names else ""

    def opened(self, path: Any, flags: int, *, to_copy: bool) -> None:
        """The script has opened a file, or a function that copies files has."""
        if isinstance(path, int):
            return
        name, access = os.path.realpath(os.fsdecode(path)), flags & os.O_ACCMODE
        is_read = access != os.O_WRONLY and not flags & os.O_TRUNC and not to_copy
        if is_read and self._has_changed(name):
            self.take({*self.names, Path(name).name}.difference(self._ignored))
        if access != os.O_RDONLY:
            self._written.add(name)

    def _has_changed(self, name: str) -> bool:
        try:
            found = os.stat(name)
        except (OSError, ValueError):
            return False
        is_kept = stat.S_ISREG(found.st_mode) and found.st_size > 0  # files of /proc and /sys have no size
        return is_kept and (name in self._written or found.st_mtime_ns > self._since_ns)


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
