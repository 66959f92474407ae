"""One process of the user's script: started, watched through a pidfd, killed, and its end put into words."""

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from relight.agent.processes.readings.page import Page, Pages
from relight.agent.processes.readings.probes import MemoryKills, Probe
from relight.agent.processes.template import Template
from relight.device.leftovers import remove_names_of
from relight.wire.settings import JobSettings

WORKER_COMMAND = (sys.executable, "-P", "-m", "relight.training.bootstrap")
STATUS_UNKNOWN = "exited; its status is not known because its agent had been restarted"
_PIPE_BYTES = 2**20  # room for output while the agent is busy, or being replaced


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The common part of all processes that one agent starts."""

    settings: JobSettings
    private_dir: Path
    node: str = "node-0"
    socket_path: Path
    command: tuple[str, ...] = WORKER_COMMAND

    @property
    def slots(self) -> int:
        """Ranks of this host at the start."""
        return max(1, self.settings.world_size // self.settings.nodes)


@dataclass(frozen=True)
class End:
    """The end of a process. `status` as in subprocess: negative is a signal; None is not known."""

    status: int | None
    evidence: str


class Child(Protocol):
    """A process whose status is found in a way that depends on its parent."""

    pid: int

    def status(self) -> int | None:
        """The exit status, with the zombie left in place: until it is released, its number is not given to another."""

    def release(self) -> None:
        """Let go of the zombie."""

    def kill(self) -> None:
        """End a process that nothing else watches yet."""


class OwnChild:
    """A process that this agent has started itself."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.pid = child.pid
        self._child = child

    def status(self) -> int | None:
        """See Child."""
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def release(self) -> None:
        """See Child."""
        self._child.wait()

    def kill(self) -> None:
        """See Child."""
        self._child.kill()


class Process:
    """A live or dead process. `child` is None for one that a predecessor of this agent started."""

    def __init__(
        self,
        *,
        name: str,
        pid: int,
        pidfd: int,
        page: Page,
        outputs: tuple[int, ...],
        rank: int | None,
        child: Child | None = None,
    ) -> None:
        self.name = name
        self.pid = pid
        self.pidfd = pidfd
        self.page = page
        self.outputs = outputs  # read ends of its pipes
        self.rank = rank  # None: a standby
        self.probe = Probe(pid)
        self._child = child
        self._killed_because = ""

    @property
    def is_child(self) -> bool:
        """True if this agent is its parent: then a signal tells the agent that it was stopped."""
        return isinstance(self._child, OwnChild)

    def kill(self, why: str) -> None:
        """SIGKILL, which also ends a stopped process: it must not run on for a moment. `why` is evidence."""
        self._killed_because = self._killed_because or why
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self, memory_kills: MemoryKills) -> End:
        """Collect the status of a process that has ended; call it once.

        Processes that a failed worker has started (data loaders, say) still hold its sockets and its device, so they
        are killed too. A worker that finished may leave processes that continue.
        """
        status = None if self._child is None else self._child.status()
        if status != 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        remove_names_of(self.pid)
        if self._child is not None:
            self._child.release()
        os.close(self.pidfd)
        self.probe.close()
        return End(status, self._evidence(status, memory_kills.rose()))

    def _evidence(self, status: int | None, memory_kills: int) -> str:
        if status is None:
            evidence = STATUS_UNKNOWN
        elif status < 0:
            evidence = f"was killed by {_signal_name(-status)}"
        else:
            evidence = f"exited with code {status}"
        if status in (None, -signal.SIGKILL):
            if self._killed_because:
                evidence += f", as ordered: {self._killed_because}"
            elif memory_kills:
                evidence += f" (the out-of-memory killer struck {memory_kills} time(s) in its memory cgroup)"
        return evidence


def spawn(
    launch: Launch,
    name: str,
    rank: int | None,
    slot: int,
    pages: Pages,
    shared_barrier: int | None = None,
    template: Template | None = None,
) -> Process:
    """Start a worker, or a standby if `rank` is None. Raises OSError if that fails; nothing is left then.

    It gets a page of `pages`. `shared_barrier` is a descriptor that all workers of this host inherit. With a
    `template` it is forked of that process.

    A worker also gets the read ends of its own output pipes: should this agent die, the pipes neither break nor
    lose anything, and the agent's successor finds them in the worker.
    """
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as write_ends:
        page = pages.add()
        undo.callback(page.clear)
        pipes = []
        for _ in range(2):
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            undo.callback(os.close, read_end)
            write_ends.callback(os.close, write_end)
            with contextlib.suppress(OSError):  # over the user's quota: the usual 64 KiB will do
                fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            pipes.append((read_end, write_end))
        outputs = tuple(read_end for read_end, _ in pipes)
        passed = (pages.descriptor, *outputs, *([] if shared_barrier is None else [shared_barrier]))
        environment = worker_environment(
            os.environ, launch, name, rank, slot, (pages.descriptor, page.offset), outputs, shared_barrier
        )
        written = (pipes[0][1], pipes[1][1])
        child: Child = (
            _start(launch.command, environment, written, passed)
            if template is None
            else template.fork(environment, written, passed)
        )
        undo.callback(child.release)
        undo.callback(child.kill)
        pidfd = os.pidfd_open(child.pid)
        undo.callback(os.close, pidfd)
        process = Process(name=name, pid=child.pid, pidfd=pidfd, page=page, outputs=outputs, rank=rank, child=child)
        undo.pop_all()
        return process


def _start(
    command: tuple[str, ...], environment: Mapping[str, str], output: tuple[int, int], passed: tuple[int, ...]
) -> OwnChild:
    return OwnChild(
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output[0],
            stderr=output[1],
            pass_fds=passed,
            start_new_session=True,  # Ctrl-C in a terminal is for the launcher
        )
    )


def worker_environment(
    inherited: Mapping[str, str],
    launch: Launch,
    name: str,
    rank: int | None,
    slot: int,
    page: tuple[int, int],
    outputs: tuple[int, ...],
    shared_barrier: int | None = None,
) -> dict[str, str]:
    """The agent's own environment, what relight's part in the worker needs, and torchrun's variables.

    `page` says where its page is: a descriptor, and an offset. A standby has no rank yet; it shows itself to the
    script as the last one.
    """
    world_size = launch.settings.world_size
    shown_rank = world_size - 1 if rank is None else rank
    local_rank = min(slot, launch.slots - 1)
    number = launch.node.removeprefix("node-")
    environment = {
        **inherited,
        "RELIGHT_PRIVATE_DIR": str(launch.private_dir),
        "RELIGHT_PROCESS": name,
        "RELIGHT_AGENT_SOCKET": str(launch.socket_path),
        "RELIGHT_PAGE_FD": str(page[0]),
        "RELIGHT_PAGE_OFFSET": str(page[1]),
        "RELIGHT_OUTPUT_FDS": ",".join(str(descriptor) for descriptor in outputs),
        "RELIGHT_SHARED_BARRIER_FD": "" if shared_barrier is None else str(shared_barrier),
        "RELIGHT_ROLE": "standby" if rank is None else "rank",
        "RELIGHT_SLOT": str(slot),
        "RANK": str(shown_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(launch.slots),
        "GROUP_RANK": number if number.isdecimal() else str(launch.settings.nodes),
        "GROUP_WORLD_SIZE": str(launch.settings.nodes),
        "ROLE_RANK": str(shown_rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": launch.settings.master_address,
        "MASTER_PORT": str(launch.settings.master_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": launch.settings.job,
        "PYTHONUNBUFFERED": "1",
    }
    if environment.get("PYTHONHASHSEED", "random") == "random":
        environment["PYTHONHASHSEED"] = "0"  # a set of strings has the same order in a replacement
    if world_size > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def template_environment(launch: Launch) -> dict[str, str]:
    """The environment of the process of which workers are forked: theirs, without what tells them apart."""
    environment = worker_environment(os.environ, launch, "", 0, 0, (0, 0), ())
    return {name: value for name, value in environment.items() if not name.startswith("RELIGHT_")}


def has_ended(pidfd: int) -> bool:
    """Return whether the process of a pidfd is dead."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
