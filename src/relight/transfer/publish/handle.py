"""An update under way, as its owner sees it. No torch."""

import threading
from collections.abc import Callable

from relight.transfer.plan.update.result import Published, UpdateProgress


def _say_nothing(_: str) -> None:
    pass


def _do_nothing() -> None:
    pass


class Handle:
    """An update under way."""

    def __init__(self) -> None:
        self._joined = threading.Event()
        self._read = threading.Event()
        self._over = threading.Event()
        self.on_confirm: Callable[[], None] = _do_nothing
        self.on_cancel: Callable[[str], None] = _say_nothing
        self.on_abandon: Callable[[str], None] = _say_nothing
        self._result: Published | None = None
        self._progress = UpdateProgress()  # replaced as a whole: may be read from any thread

    def wait_until_joined(self, timeout_seconds: float | None = None) -> bool:
        """Wait until every other source has said whether it takes part. False: not within the time."""
        return self._joined.wait(timeout_seconds)

    def wait_until_read(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the source's tensors are not read any more: they may change. False: not within the time."""
        return self._read.wait(timeout_seconds)

    def wait(self, timeout_seconds: float | None = None) -> Published | None:
        """Wait until every engine has taken the version, or will not. None: not within the time."""
        return self._result if self._over.wait(timeout_seconds) else None

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def progress(self) -> UpdateProgress:
        """Return how far the update is now, without waiting."""
        return self._progress

    def confirm(self) -> None:
        """The version will last (see `begin`); engines may take it."""
        self.on_confirm()

    def cancel(self, why: str) -> None:
        """Give the update up, unless engines were ordered to take the version already. Returns once nothing is read.

        A bucket that is being written meanwhile may be torn; no engine will ever take it.
        """
        self.on_cancel(why)
        self._read.wait()

    def abandon(self, why: str) -> None:
        """Like `cancel`, but also an update that all engines hold and that was not confirmed: it will not last."""
        self.on_abandon(why)
        self._read.wait()

    # --- for the publisher ----------------------------------------------------------------------------------------
    def note_joined(self) -> None:
        self._joined.set()

    def note_read(self) -> None:
        self._read.set()

    def note_progress(self, progress: UpdateProgress) -> None:
        self._progress = progress

    def finish(self, result: Published) -> None:
        self._result = result
        self._joined.set()
        self._read.set()
        self._over.set()
