"""Take over processes that a predecessor of this agent started, after proof that they belong to this job."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from relight.agent.processes.process import Process, has_ended
from relight.agent.processes.process_table import Record
from relight.agent.processes.readings import probes
from relight.agent.processes.readings.page import Pages
from relight.errors import ProtocolError
from relight.wire.memory.shared_barrier import MAX_RANKS, SharedBarrier


def adopt(name: str, pid: int, private_dir: Path, record: Record | None) -> Process:
    """Watch process `pid` as worker `name` from here on.

    Its shared mapping and its output are opened anew through /proc/PID/fd. Raises ProtocolError if it is not that
    worker, and OSError if it is gone or cannot be looked into.
    """
    with contextlib.ExitStack() as undo:
        # First: whatever is read about this number below is about this process if it is alive at the end.
        pidfd = os.pidfd_open(pid)
        undo.callback(os.close, pidfd)
        if record is not None and (record.pid, record.start_time) != (pid, probes.start_time(pid)):
            raise ProtocolError(f"{name} is process {record.pid}, not process {pid}")
        environment = probes.environment(pid)
        expected = {"RELIGHT_PROCESS": name, "RELIGHT_PRIVATE_DIR": str(private_dir)}
        found = {key: environment.get(key) for key in expected}
        if found != expected:
            raise ProtocolError(f"process {pid} is not {name} of this job: its environment says {found}")
        try:
            output_descriptors = [int(number) for number in environment["RELIGHT_OUTPUT_FDS"].split(",")]
            with contextlib.closing(open_pages(pid)) as pages:
                page = pages.at(int(environment["RELIGHT_PAGE_OFFSET"]))
        except (KeyError, ValueError) as error:
            raise ProtocolError(f"process {pid} has no position page: {error!r}") from error
        undo.callback(page.close)
        outputs = []
        for number in output_descriptors:
            outputs.append(os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            undo.callback(os.close, outputs[-1])
        process = Process(
            name=name,
            pid=pid,
            pidfd=pidfd,
            page=page,
            outputs=tuple(outputs),
            rank=_rank(record, environment),
        )
        undo.callback(process.probe.close)
        if has_ended(pidfd):
            raise ProcessLookupError(f"process {pid} has ended")
        undo.pop_all()
        return process


def adopt_all(records: Iterable[Record], private_dir: Path) -> tuple[list[Process], list[tuple[Record, str]]]:
    """Adopt the processes of a predecessor; return also those that cannot be adopted, and why."""
    adopted: list[Process] = []
    others: list[tuple[Record, str]] = []
    for record in records:
        try:
            adopted.append(adopt(record.process, record.pid, private_dir, record))
        except (OSError, ProtocolError) as error:
            others.append((record, str(error)))
    return adopted, others


def find_shared_barrier(adopted: Iterable[Process], ranks: int) -> int | None:
    """Return a descriptor of the shared barrier of this host's workers, old or new; None: they do without one."""
    for process in adopted:
        with contextlib.suppress(OSError, ValueError):
            return open_shared_barrier(process.pid)
    with contextlib.suppress(OSError):
        return SharedBarrier.create(ranks) if ranks <= MAX_RANKS else None
    return None


def open_shared_barrier(pid: int) -> int:
    """Open the shared barrier of worker `pid`; return its descriptor. Raises OSError or ValueError if it has none."""
    number = int(probes.environment(pid).get("RELIGHT_SHARED_BARRIER_FD", ""))
    return os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)


def open_pages(pid: int) -> Pages:
    """Open the pages of this host through worker `pid`. Raises OSError, ValueError or KeyError if it has none."""
    return Pages.open(f"/proc/{pid}/fd/{int(probes.environment(pid)['RELIGHT_PAGE_FD'])}")


def kill_unadoptable(record: Record, pages: Pages, why: str) -> Process | None:
    """Kill a recorded process that cannot be adopted, so that its rank can be given to another. None: it is gone."""
    with contextlib.ExitStack() as undo:
        try:
            pidfd = os.pidfd_open(record.pid)
            undo.callback(os.close, pidfd)
            if probes.start_time(record.pid) != record.start_time:
                return None
            page = pages.add()
            undo.callback(page.clear)
            process = Process(name=record.process, pid=record.pid, pidfd=pidfd, page=page, outputs=(), rank=record.rank)
        except OSError:
            return None
        undo.pop_all()
    process.kill(f"it could not be taken over ({why})")
    return process


def _rank(record: Record | None, environment: dict[str, str]) -> int | None:
    """The rank by what was written down, else as the process was started."""
    if record is not None:
        return record.rank
    return int(environment["RANK"]) if environment.get("RELIGHT_ROLE") == "rank" else None
