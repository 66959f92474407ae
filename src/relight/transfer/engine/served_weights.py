"""The version that an engine answers with, and the moment at which an update may change its weights."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from relight.errors import StaleWeightsError
from relight.transfer.engine.update_lock import UpdateLock


class ServedWeights:
    """The version of an engine's weights, shared by its requests and its updates. May be used from any thread."""

    def __init__(self, pause: Callable[[], object], resume: Callable[[], object]) -> None:
        """`pause` and `resume` are the engine's own; an update in place calls them."""
        self.version, self.generation = -1, 0
        self.stale = ""  # why the weights are a mixture, if they are
        self._pause, self._resume = pause, resume
        self._lock = UpdateLock()
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_admitting = True  # requests
        self._is_paused = False  # `pause` was called, and not yet `resume`

    # --- for requests ---------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def serving(self) -> Iterator[int]:
        """Keep the weights as they are inside; yield their version. Raises StaleWeightsError."""
        with self._lock.serve():
            if self.stale:
                raise StaleWeightsError(self.stale)
            yield self.version

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the weights as they are inside, even if they are stale."""
        with self._lock.serve():
            yield

    def wait_for(self, version: int, timeout_seconds: float | None) -> bool:
        """Wait until the engine answers with `version` or a newer one. False: not within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.version >= version and not self.stale, timeout_seconds)

    def close(self) -> None:
        """Give up updates that wait for requests; there will be no more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._lock.end_updates()

    @property
    def is_closed(self) -> bool:
        """True if there will be no more updates."""
        return self._is_closed

    def wait_until_closed(self, timeout_seconds: float) -> None:
        """Wait for `close`, but no longer than this."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, timeout_seconds)

    # --- for updates, from the receiver's thread ------------------------------------------------------------------
    @property
    def is_admitting(self) -> bool:
        """True if requests are admitted: no update is changing the weights."""
        return self._is_admitting

    def stop_requests(self) -> None:
        """Admit no more requests; return when none is left. Raises ConnectionResetError if `close` was called."""
        self._is_admitting = False
        if not self._lock.close_door():
            raise ConnectionResetError("the receiver was closed")

    def pause_engine(self) -> None:
        """Call the engine's `pause`, and hold its weights to be a mixture until `set_version`."""
        if not self._is_paused:
            self._pause()
            self._is_paused = True
        self.stale = "an update in place is not complete"

    def set_version(self, version: int, generation: int) -> None:
        """The weights are those of `version`."""
        with self._changed:
            self.version, self.generation, self.stale = version, generation, ""
            self._changed.notify_all()

    def admit_requests(self) -> None:
        """Admit requests, which a stale engine refuses. Raises what the engine's `resume` raises, after that."""
        self._is_admitting = True
        try:
            if self._is_paused and not self.stale:
                self._is_paused = False
                self._resume()
        finally:
            self._lock.open_door()
