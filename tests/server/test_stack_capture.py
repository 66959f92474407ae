"""A suspicion waits for stacks, and is told with them or without."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from relight.core.protocol.events import CommunicationStalled, ProcessSuspected
from relight.core.protocol.position import Position
from relight.server.sessions import stack_capture
from relight.server.sessions.stack_capture import StackCaptures, Suspicion
from relight.wire.messages import StackTaken

HANG = ProcessSuspected(
    process="w1", kind="hang", evidence="no progress for 30.0 s", position=Position(), noticed_ns=100
)
STALL = CommunicationStalled(evidence="no rank made progress", step=4, noticed_ns=100)
STACK = 'Stack (most recent call first):\n  File "/job/train.py", line 7 in load\n'


class Desk:
    """Questions for stacks and what came of them."""

    def __init__(self, *, reachable: bool = True) -> None:
        self.asked: list[str] = []
        self.told: list[Suspicion] = []
        self.heard = asyncio.Event()
        self.reachable = reachable
        self.captures = StackCaptures(self._ask, self._tell)

    def _ask(self, process: str) -> bool:
        self.asked.append(process)
        return self.reachable

    def _tell(self, suspicion: Suspicion) -> None:
        self.told.append(suspicion)
        self.heard.set()


def on_a_loop(test: Callable[[], Coroutine[None, None, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(bounded())


def test_a_hang_is_told_with_what_the_process_was_doing() -> None:
    async def test() -> None:
        desk = Desk()
        desk.captures.begin(HANG, {"w1": "rank 1"})
        assert (desk.asked, desk.told) == (["w1"], [])
        desk.captures.take(StackTaken(process="w0", text="of another"))
        assert desk.told == []
        desk.captures.take(StackTaken(process="w1", text=STACK))
        desk.captures.take(StackTaken(process="w1", text=STACK))  # no failure waits for it any more
        (told,) = desk.told
        assert told.evidence == "no progress for 30.0 s; rank 1 is at train.py, line 7 in load"
        assert told.stack == f"rank 1 (w1):\n{STACK}"
        assert told.noticed_ns >= HANG.noticed_ns

    on_a_loop(test)


def test_without_an_agent_nothing_is_waited_for() -> None:
    async def test() -> None:
        desk = Desk(reachable=False)
        desk.captures.begin(HANG, {"w1": "rank 1"})
        assert desk.told == [HANG]

    on_a_loop(test)


def test_an_agent_that_is_silent_is_not_waited_for_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(stack_capture, "PATIENCE_SECONDS", 0.02)
        desk = Desk()
        desk.captures.begin(STALL, {"w0": "rank 0", "w1": "rank 1"})
        desk.captures.take(StackTaken(process="w1", text=STACK))
        assert desk.told == []
        await desk.heard.wait()
        (told,) = desk.told
        assert told.evidence == "no rank made progress; rank 1 is at train.py, line 7 in load"
        assert told.stack == f"rank 0 (w0): it was not heard of in time\n\nrank 1 (w1):\n{STACK}"
        assert told.noticed_ns - STALL.noticed_ns >= 20_000_000  # asking is part of noticing

    on_a_loop(test)


def test_why_there_is_no_stack_is_told_and_many_are_not_all_asked() -> None:
    async def test() -> None:
        desk = Desk()
        desk.captures.begin(STALL, {f"w{rank}": f"rank {rank}" for rank in range(100)})
        assert len(desk.asked) == stack_capture.MAX_ASKED
        for process in desk.asked:
            desk.captures.take(StackTaken(process=process, problem="it is stopped"))
        (told,) = desk.told
        assert told.evidence == STALL.evidence
        assert told.stack.startswith("rank 0 (w0): it is stopped\n\nrank 1 (w1): it is stopped")

    on_a_loop(test)
