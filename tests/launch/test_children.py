"""Processes of the launcher that end before it has looked at them."""

import asyncio
import contextlib
import os
import signal
import sys

from relight.children import Child

DEADLINE_SECONDS = 30.0


async def start(code: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", code)


def test_one_whose_exit_was_taken_already() -> None:
    """An agent that ends at once: the launcher did not notice, and waited forever."""

    async def look() -> None:
        process = await start("raise SystemExit(3)")
        await asyncio.wait_for(process.wait(), DEADLINE_SECONDS)
        child = Child(process)
        child.signal(signal.SIGKILL)
        assert child.status == 3
        assert await asyncio.wait_for(child.wait(), DEADLINE_SECONDS) == 3

    asyncio.run(look())


def test_one_that_has_just_ended() -> None:
    async def look() -> None:
        process = await start("raise SystemExit(3)")
        with contextlib.suppress(ChildProcessError):  # asyncio may have taken its exit status: as well
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        child = Child(process)
        assert await asyncio.wait_for(child.wait(), DEADLINE_SECONDS) == 3
        child.signal(signal.SIGKILL)

    asyncio.run(look())


def test_one_that_lives_gets_its_signal() -> None:
    async def look() -> None:
        child = Child(await start("import time; time.sleep(600)"))
        child.signal(signal.SIGKILL)
        assert await asyncio.wait_for(child.wait(), DEADLINE_SECONDS) == -signal.SIGKILL

    asyncio.run(look())
