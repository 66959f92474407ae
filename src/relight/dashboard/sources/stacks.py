"""Asks a worker on this host what it is doing: the one thing that a dashboard does to a job, and only when asked.

The main thread's stack alone: an interrupted thread's own frames are safe to read, whatever the others do.
"""

import os
from pathlib import Path

from relight.agent.processes.readings.probes import environment
from relight.agent.processes.stacks import NoStack, take_stack
from relight.core.membership.members import Process
from relight.wire.stacks import MAIN_STACK


async def ask_rank(rank: int, process: Process | None) -> dict[str, str]:
    """`text`, or `problem`: why there is none."""
    if process is None or not process.pid:
        return {"process": "", "text": "", "problem": "no process holds this rank now"}
    found = {"process": process.name, "text": "", "problem": ""}
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return {**found, "problem": _elsewhere(rank, process)}
    try:
        # From here on the number means one process; whether it is the job's, its environment says.
        there = environment(process.pid)
        if there.get("RELIGHT_PROCESS") != process.name:
            return {**found, "problem": _elsewhere(rank, process)}
        private_dir = Path(there["RELIGHT_PRIVATE_DIR"])
        return {**found, "text": await take_stack(process.pid, pidfd, process.name, private_dir, MAIN_STACK)}
    except NoStack as error:
        return {**found, "problem": str(error)}
    except (OSError, KeyError):  # of another user, or gone
        return {**found, "problem": _elsewhere(rank, process)}
    finally:
        os.close(pidfd)


def _elsewhere(rank: int, process: Process) -> str:
    return (
        f"rank {rank} is not a process of yours on this host (pid {process.pid} on {process.agent}); there, "
        f"`py-spy dump --pid {process.pid}` shows the same"
    )
