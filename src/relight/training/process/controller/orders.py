"""The controller's orders, which the link thread receives and the main thread waits for."""

import threading
import time
from collections.abc import Callable
from typing import Any

from relight.core.worker.actions import Actions, CloseGeneration
from relight.core.worker.events import Event
from relight.core.worker.worker import Worker
from relight.errors import RestoreError
from relight.training.collectives.generation_group import Forming, GenerationGroups


class Superseded(Exception):
    """A newer Stop arrived while the main thread obeyed an older generation's orders."""


class Orders:
    """Hands events of both threads to the worker's decisions, one at a time."""

    def __init__(self, worker: Worker, tell: Callable[[str, Exception], None]) -> None:
        """`tell` is called with the name of what failed when a generation was closed, and the error."""
        self._worker = worker
        self._tell = tell
        self.lock = threading.Condition()  # to be held where an order must not arrive in between
        self.stop_arrived_ns = 0
        self.at_close: list[Callable[[], None]] = []  # for the link thread to call when a generation is closed

    def receive(self, order: Any) -> None:
        """Take an order in, on the link thread."""
        with self.lock:
            for action in self._worker.handle(order):
                assert isinstance(action, CloseGeneration)
                self.stop_arrived_ns = time.monotonic_ns()
                for call in self.at_close:
                    self._call(call)
            self.lock.notify_all()

    def _call(self, call: Callable[[], None]) -> None:
        """Contain what fails: without its link thread a worker obeys no order, and the job is lost."""
        try:
            call()
        except Exception as error:
            self._tell(getattr(call, "__qualname__", repr(call)), error)

    def handle(self, event: Event) -> Actions:
        """Hand an event in, while no order arrives."""
        with self.lock:
            return self._worker.handle(event)

    def await_ready(self) -> None:
        """Wait until an order is here that the worker waits for in its state."""
        with self.lock:
            self.lock.wait_for(lambda: self._worker.is_ready)

    def await_stop(self, seconds: float | None = None) -> bool:
        """Wait until the generation is closed. Returns False if it is not, after so many seconds."""
        with self.lock:
            return self.lock.wait_for(lambda: self._worker.closed, seconds)

    def is_current(self, generation: int) -> bool:
        """Return whether no newer Stop has arrived."""
        with self.lock:
            return self._worker.newest <= generation

    def await_formed(self, forming: Forming, generation: int) -> GenerationGroups:
        """Return the formed groups. Raises Superseded if the generation is closed first, RestoreError if it failed."""
        worker = self._worker
        forming.result.add_done_callback(lambda _: self._notify())
        with self.lock:
            self.lock.wait_for(lambda: forming.result.done() or worker.newest > generation)
            if worker.newest > generation:
                raise Superseded
        try:
            return forming.result.result()
        except Exception as error:
            raise RestoreError(f"the new process groups could not be formed: {error}") from error

    def _notify(self) -> None:
        with self.lock:
            self.lock.notify_all()
