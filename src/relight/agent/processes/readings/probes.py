"""Reads what the kernel knows about a process: state, memory, waiting time, and kills for lack of memory."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_STATE, _START_TIME, _RSS_PAGES, _EXIT_CODE = 3, 22, 24, 52  # numbers of fields in proc_pid_stat(5)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_READ_BYTES = 4096
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Reading:
    state: str  # R, S, D, T, Z, ...
    run_delay_ns: int  # time the main thread has waited for a CPU
    rss_bytes: int


class Probe:
    """Reads one process. The open files stay with that process, also when its number is given to another."""

    def __init__(self, pid: int) -> None:
        self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._schedstat = os.open(f"/proc/{pid}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # a kernel without scheduler statistics
            self._schedstat = -1

    def read(self) -> Reading | None:
        """None: the process is gone."""
        try:
            fields = _stat_fields(os.pread(self._stat, _READ_BYTES, 0))
            return Reading(_field(fields, _STATE), self._run_delay_ns(), int(_field(fields, _RSS_PAGES)) * _PAGE_BYTES)
        except (OSError, IndexError, ValueError):
            return None

    def close(self) -> None:
        for descriptor in (self._stat, self._schedstat):
            if descriptor >= 0:
                os.close(descriptor)
        self._stat = self._schedstat = -1

    def _run_delay_ns(self) -> int:
        if self._schedstat < 0:
            return 0
        return int(os.pread(self._schedstat, _READ_BYTES, 0).split()[1])


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot: with the pid, its identity. None: gone, or a zombie."""
    try:
        fields = _stat_fields(Path(f"/proc/{pid}/stat").read_bytes())
        return None if _field(fields, _STATE) in "ZX" else int(_field(fields, _START_TIME))
    except (OSError, IndexError, ValueError):
        return None


def state(pid: int) -> str | None:
    """Return the letter of a process's state (R, S, D, T, Z, ...). None: gone."""
    try:
        return _field(_stat_fields(Path(f"/proc/{pid}/stat").read_bytes()), _STATE)
    except (OSError, IndexError, ValueError):
        return None


def exit_status(pid: int) -> int | None:
    """Return the status of a process that has ended but is not reaped, negative for a signal. None: not known."""
    try:
        fields = _stat_fields(Path(f"/proc/{pid}/stat").read_bytes())
        return os.waitstatus_to_exitcode(int(_field(fields, _EXIT_CODE))) if _field(fields, _STATE) == "Z" else None
    except (OSError, IndexError, ValueError):
        return None


def environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with. Raises OSError."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


class MemoryKills:
    """Counts what the out-of-memory killer has done in this process's memory cgroup."""

    def __init__(self, files: tuple[Path, ...] | None = None) -> None:
        self._files = _memory_event_files() if files is None else files
        self._seen = self._count()

    def rose(self) -> int:
        """Growth of the counter since the last call; 0 where there is no such counter."""
        before, self._seen = self._seen, self._count()
        return max(0, self._seen - before)

    def _count(self) -> int:
        for file in self._files:
            with contextlib.suppress(OSError, ValueError):
                for line in file.read_text().splitlines():
                    name, _, value = line.partition(" ")
                    if name == "oom_kill":
                        return int(value)
        return 0


def _memory_event_files() -> tuple[Path, ...]:
    """Return the files in which this process's memory cgroup may count, by cgroup version 2 and then version 1."""
    version_1, version_2 = [], []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                version_2.append(_CGROUPS / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                version_1.append(_CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    return (*version_2, *version_1)


def _stat_fields(stat: bytes) -> list[bytes]:
    """The fields from the third on: the second is a name that may contain anything."""
    return stat.rpartition(b")")[2].split()


def _field(fields: list[bytes], number: int) -> str:
    return fields[number - _STATE].decode("ascii")
