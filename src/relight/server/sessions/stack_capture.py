"""Captures the stacks of processes that are suspected of a hang, before they are killed for it.

A suspicion waits for the answer, usually for milliseconds, for three seconds at most. Nothing is decided here.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from relight.core.detection.stack import describe_place
from relight.core.protocol.events import CommunicationStalled, ProcessSuspected
from relight.wire.messages import StackTaken

PATIENCE_SECONDS = 3.0  # an agent waits two for its worker
MAX_ASKED = 16  # of a job in which everyone waits for everyone
MAX_CHARACTERS = 16 * 1024  # of one process

Suspicion = ProcessSuspected | CommunicationStalled


@dataclass
class _Capture:
    suspicion: Suspicion
    asked: dict[str, str]  # process to its name for people
    begun: float
    answers: dict[str, StackTaken] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


class StackCaptures:
    """Suspicions that wait for stacks."""

    def __init__(self, ask: Callable[[str], bool], tell: Callable[[Suspicion], None]) -> None:
        """`ask` a process for its stack (False: its agent is away); `tell` the suspicion, with what was learned."""
        self._ask = ask
        self._tell = tell
        self._open: list[_Capture] = []

    def begin(self, suspicion: Suspicion, names: dict[str, str]) -> None:
        """Ask these processes, whose names for people are given, and tell the suspicion once they have answered."""
        asked = {process: name for process, name in list(names.items())[:MAX_ASKED] if self._ask(process)}
        if not asked:
            self._tell(suspicion)
            return
        capture = _Capture(suspicion, asked, time.monotonic())
        capture.timer = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._end, capture)
        self._open.append(capture)

    def take(self, answer: StackTaken) -> None:
        """An agent's answer."""
        for capture in [each for each in self._open if answer.process in each.asked]:
            capture.answers.setdefault(answer.process, answer)
            if len(capture.answers) == len(capture.asked):
                self._end(capture)

    def _end(self, capture: _Capture) -> None:
        if capture not in self._open:
            return
        self._open.remove(capture)
        if capture.timer is not None:
            capture.timer.cancel()
        asking_ns = round((time.monotonic() - capture.begun) * 1e9)
        self._tell(with_stacks(capture.suspicion, capture.asked, capture.answers, asking_ns))


def with_stacks(
    suspicion: Suspicion, asked: dict[str, str], answers: dict[str, StackTaken], asking_ns: int
) -> Suspicion:
    """Add to a suspicion where each process was: in a sentence of the evidence, and in full. Pure.

    The time that was spent on asking belongs to noticing the failure.
    """
    places, texts = [], []
    for process, name in asked.items():
        answer = answers.get(process)
        problem = "it was not heard of in time" if answer is None else answer.problem
        text = "" if answer is None else answer.text[:MAX_CHARACTERS]
        place = describe_place(text)
        if place:
            places.append(f"{name} is at {place}")
        texts.append(f"{name} ({process}): {problem}" if problem else f"{name} ({process}):\n{text}")
    evidence = suspicion.evidence + (f"; {_list(places)}" if places else "")
    noticed_ns = suspicion.noticed_ns + asking_ns
    return msgspec.structs.replace(suspicion, evidence=evidence, noticed_ns=noticed_ns, stack="\n\n".join(texts))


def _list(places: Sequence[str]) -> str:
    shown = places[:4]
    return ", ".join(shown) + (f" and {len(places) - len(shown)} more" if len(places) > len(shown) else "")
