"""Waits for other ranks, and how other processes see them."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol


class WaitingSign(Protocol):
    """Shows other processes whether this rank waits for others."""

    def show_waiting(self, waiting: bool) -> None: ...


class Waits:
    """Waits of this rank for others, shown in its position page.

    Where all ranks run the same modules, the number of collectives tells which rank the others wait for. Stages of a
    pipeline make different numbers of them. There the page shows instead whether an operation of this rank is under
    way: if all ranks are idle, the others wait for the one that has none.
    """

    def __init__(self, sign: WaitingSign | None = None) -> None:
        """`sign` shows every change; None: waits are not shown, until `show_on`."""
        self._sign = sign
        self._lock = threading.Lock()
        self._under_way: set[object] = set()

    @property
    def are_shown(self) -> bool:
        """True if there is a sign that shows them."""
        return self._sign is not None

    def show_on(self, sign: WaitingSign) -> None:
        """Show every change from now on."""
        self._sign = sign

    def begin(self) -> Callable[[], None]:
        """An operation is under way until the returned function is called, from whichever thread."""
        if self._sign is None:
            return _nothing
        token = object()
        with self._lock:
            self._under_way.add(token)
            self._sign.show_waiting(True)
        return lambda: self._end(token)

    def forget(self) -> None:
        """Drop the operations of an older generation; their ends may never come."""
        with self._lock:
            self._under_way.clear()
            if self._sign is not None:
                self._sign.show_waiting(False)

    def _end(self, token: object) -> None:
        with self._lock:
            if token in self._under_way:
                self._under_way.remove(token)
                if not self._under_way and self._sign is not None:
                    self._sign.show_waiting(False)


def _nothing() -> None:
    pass


class Waiters:
    """Expendable threads for what can be waited for but not be interrupted. Idle ones are used again."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Callable[[], None]]] = []

    def run(self, wait: Callable[[], None]) -> None:
        """Have a thread call `wait`, which must not raise."""
        try:
            tasks = self._idle.pop()
        except IndexError:
            tasks = SimpleQueue()
            threading.Thread(target=self._serve, args=(tasks,), name="relight-wait", daemon=True).start()
        tasks.put(wait)

    def _serve(self, tasks: "SimpleQueue[Callable[[], None]]") -> None:
        while True:
            tasks.get()()
            self._idle.append(tasks)
