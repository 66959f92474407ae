"""Several processes that want to be a job's controller, and a Lease: pauses, deaths, lost answers, late writes.

Each process has a clock of its own, whose beginning and rate are its own too. Production code decides
(`core/lease.py`); the server of the cluster, the network and the processes are modelled.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

from relight.core.lease import Read, Record, Stage, Tenure, Write
from relight.sim.model.contents import Violation

DURATION = 15.0
PATIENCE = 3.0  # of a process, for an answer
QUIET = 120.0  # from then on nothing more goes wrong
END = QUIET + 5 * DURATION
RATES = (0.85, 1.15)  # of clocks
RELEASE = -1  # the number of a request whose answer is not waited for
LOOK = 0.25  # between two looks whether two may act
Build = Callable[[str, float], Tenure]


class Server:
    """The record, and whether the server can be reached."""

    def __init__(self) -> None:
        self._number = 1
        self.record = Record("1", "", DURATION)
        self.down_until = 0.0

    def answer(self, request: Read | Write) -> Record | str:
        """Return the record, the new version, or an empty string for a conflict."""
        if isinstance(request, Read):
            return self.record
        if request.version != self.record.version:
            return ""
        self._number += 1
        self.record = Record(str(self._number), request.holder, DURATION)
        return self.record.version


class Process:
    """One process, with its clock. It acts whenever it is awake and its tenure lets it."""

    def __init__(self, name: str, draw: random.Random, build: Build) -> None:
        self.name, self._build = name, build
        self._rate, self._offset = draw.uniform(*RATES), draw.uniform(0.0, 1000.0)
        self.asleep_until = 0.0
        self.alive = True
        self.tenure = build(name, DURATION)
        self.waits_for = 0  # the number of the request under way

    def clock(self, now: float) -> float:
        """Its own time."""
        return self._offset + self._rate * now

    def acts(self, now: float) -> bool:
        """Return whether it would act now."""
        return self.alive and now >= self.asleep_until and self.tenure.may_act(self.clock(now))

    def start_again(self) -> None:
        """Let a successor on the same host begin under the same name."""
        self.alive, self.tenure, self.waits_for = True, self._build(self.name, DURATION), 0


class LeaseWorld:
    """One run. Raises Violation if two act at a moment, or if none does though nothing goes wrong any more."""

    def __init__(self, seed: int, build: Build = Tenure) -> None:
        self._draw = random.Random(seed)
        self._numbers = itertools.count(1)
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.now = 0.0
        self.terms: list[str] = []  # who acted, one after the other
        self._server = Server()
        count = self._draw.randint(2, 4)
        self._processes = [Process(f"host-{number}", self._draw, build) for number in range(count)]
        for process in self._processes:
            self._after(self._draw.uniform(0.0, 2.0), self._step, process)
        self._after(self._draw.uniform(1.0, 20.0), self._disturb)

    def run(self) -> None:
        """Run to the end."""
        while self._queue and self._queue[0][0] < END:
            self.now, _, work, arguments = heapq.heappop(self._queue)
            work(*arguments)
            self._look()
        if any(process.alive for process in self._processes) and not self._acting():
            raise Violation(f"no process holds the Lease at the end: {self._server.record}")

    def _after(self, seconds: float, work: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._numbers), work, arguments))

    def _acting(self) -> list[str]:
        return [process.name for process in self._processes if process.acts(self.now)]

    def _look(self) -> None:
        acting = self._acting()
        if len(acting) > 1:
            raise Violation(f"two act after {self.now:.2f} s: {', '.join(acting)}; one after the other: {self.terms}")
        if acting and self.terms[-1:] != acting:
            self.terms += acting

    # --- processes ------------------------------------------------------------------------------------------------
    def _step(self, process: Process) -> None:
        """Let a process send what is due, and come back soon: it has other work as well."""
        self._after(self._draw.uniform(0.1, LOOK), self._step, process)
        if not process.alive or self.now < process.asleep_until or process.waits_for:
            return
        if process.tenure.stage is Stage.OVER:  # the process ends, and a successor may begin
            process.start_again()
        request = process.tenure.advance(process.clock(self.now))
        if request is None:
            return
        number = process.waits_for = next(self._numbers)
        quiet = self.now > QUIET
        travel = self._draw.uniform(0.01, 0.5)
        if not quiet and self._draw.random() < 0.1:
            travel = self._draw.uniform(2.0, 30.0)
        self._after(travel, self._arrive, process, number, request)
        self._after(PATIENCE, self._give_up, process, number)

    def _arrive(self, process: Process, number: int, request: Read | Write) -> None:
        if self.now < self._server.down_until:
            return
        answer = self._server.answer(request)
        if self.now > QUIET or self._draw.random() > 0.1:  # else it is lost, and the write has happened all the same
            self._after(self._draw.uniform(0.01, 0.5), self._hear, process, number, answer)

    def _hear(self, process: Process, number: int, answer: Record | str) -> None:
        if self.now < process.asleep_until:
            self._after(process.asleep_until - self.now, self._hear, process, number, answer)
        elif process.alive and process.waits_for == number:
            process.waits_for = 0
            now = process.clock(self.now)
            match answer:
                case Record():
                    process.tenure.take_record(answer, now)
                case "":
                    process.tenure.take_conflict(now)
                case _:
                    process.tenure.take_success(answer, now)

    def _give_up(self, process: Process, number: int) -> None:
        if self.now < process.asleep_until:
            self._after(process.asleep_until - self.now, self._give_up, process, number)
        elif process.alive and process.waits_for == number:
            process.waits_for = 0
            process.tenure.take_failure(process.clock(self.now))

    # --- faults ---------------------------------------------------------------------------------------------------
    def _disturb(self) -> None:
        """Pause, kill or start a process, most often the one that acts; or cut the server off."""
        if self.now > QUIET - 30.0:
            for process in self._processes:
                if not process.alive:
                    process.start_again()
            return
        acting = [process for process in self._processes if process.acts(self.now)]
        process = acting[0] if acting and self._draw.random() < 0.7 else self._draw.choice(self._processes)
        match self._draw.choice(("pause", "pause", "kill", "server", "release")):
            case "pause":
                process.asleep_until = self.now + self._draw.uniform(1.0, 40.0)
            case "kill" if process.alive:
                process.alive = False
            case "kill":
                process.start_again()
            case "server":
                self._server.down_until = self.now + self._draw.uniform(1.0, 30.0)
            case "release" if process.acts(self.now):
                request = process.tenure.release()
                if request is not None:
                    self._after(self._draw.uniform(0.01, 20.0), self._arrive, process, RELEASE, request)
        self._after(self._draw.uniform(1.0, 25.0), self._disturb)
