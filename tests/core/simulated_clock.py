"""Virtual time: what is due next, and all the chance that a simulated job has."""

import heapq
import random
from collections.abc import Callable


class Violation(AssertionError):
    """An invariant of docs/PROTOCOL.md does not hold."""


class Clock:
    """Runs actions in the order of their times; equal times in the order in which they were planned."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(f"delays {seed}")
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._planned += 1
        heapq.heappush(self._due, (time, self._planned, action))

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random.random()

    def coin(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    def next_time(self) -> float | None:
        """When something is due, or None."""
        return self._due[0][0] if self._due else None

    def run_next(self) -> None:
        self.now, _, action = heapq.heappop(self._due)
        action()
