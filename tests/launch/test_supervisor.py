"""A child that is started again after each end: real processes."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable

from relight.children import Child
from relight.launch.children.restart_policy import MAX_SHORT_LIVES, RestartPolicy
from relight.launch.children.supervisor import Supervisor
from relight.launch.progress import JobProgress, first_of
from relight.terminal import Screen

DEADLINE_SECONDS = 60.0


async def start(code: str) -> Child:
    return Child(await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", code))


async def killed() -> Child:
    child = await start("import time; time.sleep(1000)")
    child.signal(signal.SIGKILL)
    await child.wait()
    return child


async def failed() -> Child:
    child = await start("raise SystemExit(1)")
    await child.wait()
    return child


def keep(live: Callable[[bool], Awaitable[Child | None]], progress: JobProgress | None = None) -> str:
    """Supervise until `live` or the policy has enough."""

    async def run() -> str:
        screen = Screen(quiet=True)
        try:
            supervisor = Supervisor(
                "agent",
                RestartPolicy(0.0),
                progress or JobProgress(has_started=True),
                screen,
                1.0,
                lambda status: "starting another",
            )
            return await asyncio.wait_for(supervisor.keep(live), DEADLINE_SECONDS)
        finally:
            screen.close(1.0)

    return asyncio.run(run())


def test_a_killed_child_has_a_successor() -> None:
    lives: list[bool] = []

    async def live(again: bool) -> Child | None:
        lives.append(again)
        return await killed() if len(lives) < 3 else None

    assert keep(live) == ""
    assert lives == [False, True, True]


def test_a_child_that_cannot_run_is_given_up() -> None:
    lives: list[bool] = []

    async def live(again: bool) -> Child | None:
        lives.append(again)
        return await failed()

    assert keep(live) == f"the agent ended with status 1, {MAX_SHORT_LIVES} times at its start"
    assert len(lives) == MAX_SHORT_LIVES


def test_no_successor_is_started_once_the_job_ends() -> None:
    lives: list[bool] = []
    progress = JobProgress(has_started=True)

    async def live(again: bool) -> Child | None:
        lives.append(again)
        progress.ending.set()
        return await killed()

    assert keep(live, progress) == ""
    assert lives == [False]


def test_a_life_is_measured_to_its_end() -> None:
    async def run() -> float:
        child = await start("import time; time.sleep(0.2)")
        await child.wait()
        measured = child.lived_seconds
        await child.wait()
        assert child.lived_seconds == measured
        return measured

    assert asyncio.run(run()) >= 0.2


def test_waiting_for_the_first_of_several_leaves_tasks_of_the_caller_alone() -> None:
    async def run() -> bool:
        task: asyncio.Task[None] = asyncio.create_task(asyncio.sleep(1000))
        await first_of(task, asyncio.sleep(0))
        alive = not task.done()
        task.cancel()
        return alive

    assert asyncio.run(run())
