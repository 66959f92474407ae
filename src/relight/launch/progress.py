"""The progress of a job towards its end, for all parts of `relight run`."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class JobProgress:
    """Facts that the parts of `relight run` share."""

    def __init__(self, *, has_started: bool) -> None:
        self.has_started = has_started  # there has been a controller
        self.signal = 0  # that asked to end the job
        self.ending = asyncio.Event()  # the job is over, or is being ended
        self.at_once = asyncio.Event()  # do not wait for anything any longer

    async def is_over_within(self, seconds: float) -> bool:
        """Wait `seconds`, or until the job ends or has to end at once; return whether it does."""
        await first_of(self.ending.wait(), self.at_once.wait(), asyncio.sleep(seconds))
        return self.ending.is_set() or self.at_once.is_set()


async def first_of(*works: Coroutine[Any, Any, Any] | asyncio.Task[None]) -> None:
    """Wait until one of them is done; the others are cancelled, except tasks, which the caller owns."""
    tasks = [work if isinstance(work, asyncio.Task) else asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, work in zip(tasks, works, strict=True):
            if task is not work and not task.done():
                task.cancel()
