"""A lock on an engine's weights: many requests at a time, or one update."""

import contextlib
import threading
from collections.abc import Iterator


class UpdateLock:
    """Many requests at once, or one update, which goes before requests that come later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._serving = 0
        self._updating = False
        self._is_over = False
        self._own = threading.local()

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        own = getattr(self._own, "serving", 0)
        with self._changed:
            # A thread that serves already is let in again: the update waits for it, so it must not wait for the update.
            self._changed.wait_for(lambda: not self._updating or (own > 0 and self._serving > 0))
            self._serving += 1
        self._own.serving = own + 1
        try:
            yield
        finally:
            self._own.serving = getattr(self._own, "serving", 1) - 1
            with self._changed:
                self._serving -= 1
                self._changed.notify_all()

    def close_door(self) -> bool:
        """Let no more requests in; return when none is left. False: there will be no more updates."""
        with self._changed:
            self._updating = True
            self._changed.wait_for(lambda: not self._serving or self._is_over)
            return not self._is_over

    def end_updates(self) -> None:
        """Make `close_door` return False from now on, also where it waits for requests."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def open_door(self) -> None:
        with self._changed:
            self._updating = False
            self._changed.notify_all()
