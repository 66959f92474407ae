"""State that no object shows: positions of files read by their numbers, levels of loggers, filters, other processes.

Few steps depend on it, and libraries change it when they are imported. So it counts only where the script asks for it.
"""

import logging
import os
import stat
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from relight.training.carried.code.source import mentioned
from relight.training.carried.finding.told.received import received

_NUMBERS = Path("/proc/self/fd")


def _positions() -> Iterator[tuple[str, Any]]:
    """Positions of the regular files that are open."""
    for link in _NUMBERS.iterdir():
        try:
            number = int(link.name)
            if stat.S_ISREG(os.fstat(number).st_mode):
                yield f"the position of {link.readlink().name} (file {number})", os.lseek(number, 0, os.SEEK_CUR)
        except OSError:  # it was the list's own, or is closed
            continue


def _levels() -> Iterator[tuple[str, Any]]:
    for name, logger in [("root", logging.root), *logging.root.manager.loggerDict.items()]:
        if isinstance(logger, logging.Logger):
            yield f"the level of logger {name!r}", logger.level


def _filters() -> Iterator[tuple[str, Any]]:
    yield "the filters of warnings", tuple(warnings.filters)


def _answers() -> Iterator[tuple[str, Any]]:
    yield f"{_MULTIPROCESSING} (what other processes hold, from which steps receive messages)", received()


_MULTIPROCESSING = "multiprocessing"  # the word with which a script says that no step depends on them
_ASKS: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
    r"\bos\.(?:read|readv|sendfile)\b|^\s*from os import": _positions,
    r"\bisEnabledFor\b|\bgetEffectiveLevel\b|\.level\b": _levels,
    r"\bwarnings\.filters\b|\b(?:simplefilter|filterwarnings)\(\s*.error": _filters,
}


class OfProcess:
    """Compares it with that at the beginning of the loop, and of the step that was looked at last."""

    def __init__(self) -> None:
        self._asked_for: list[Callable[[], Iterator[tuple[str, Any]]]] = []
        self._first: dict[str, Any] = {}
        self._last: dict[str, Any] = {}

    def begin(self, modules: Iterable[str], ignored: Collection[str] = ()) -> None:
        """The loop begins; these are the script's modules, and the words for what no step depends on."""
        self._asked_for = [look for pattern, look in _ASKS.items() if mentioned(modules, pattern)]
        self._asked_for += [] if _MULTIPROCESSING in ignored else [_answers]
        self._first = self._now()

    def see(self) -> None:
        """A step begins that is looked at."""
        self._last = self._now()

    def changed(self) -> list[str]:
        """Return names of what has changed since the loop began."""
        now = self._now()
        return [*_differing(self._first, now), *_differing(self._last, now)]

    def changed_in_step(self) -> list[str]:
        """Return names of what has changed since the last look."""
        return list(_differing(self._last, self._now()))

    def _now(self) -> dict[str, Any]:
        return {name: value for look in self._asked_for for name, value in look()}


def _differing(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    return (name for name, value in before.items() if name in now and now[name] != value)
