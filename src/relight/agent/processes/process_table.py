"""The agent's memory of the processes it started, in a file that a successor reads after the agent's own death."""

import fcntl
import os
from pathlib import Path

import msgspec

from relight.errors import UsageError


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One process. A later record of the same process replaces an earlier one."""

    process: str
    pid: int
    start_time: int | None  # with the pid, the process's identity
    rank: int | None  # None: a standby
    pages: str = ""  # which memfd its page is in (see Pages)
    page: int = 0  # where it begins there
    forgotten: bool = False  # the controller has dealt with its end


class ProcessTable:
    """JSON lines, appended. Holding the file's lock means being the only agent of that name in this job."""

    def __init__(self, path: Path, *, keep: bool) -> None:
        """Open the table; `keep` the records of a predecessor, or begin anew."""
        self._path = path
        self._records: dict[str, Record] = {}
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            raise UsageError(f"{path} is locked: an agent of this name is already running in this job") from error
        if not keep:
            os.ftruncate(self._descriptor, 0)
        for line in path.read_bytes().splitlines():
            try:
                record = msgspec.json.decode(line, type=Record)
            except msgspec.DecodeError:  # blank, or cut short by the predecessor's death
                continue
            self._records[record.process] = record

    def get(self, process: str) -> Record | None:
        return self._records.get(process)

    def names(self) -> frozenset[str]:
        """All processes that were ever started, by predecessors; and by this agent, if they are not forgotten."""
        return frozenset(self._records)

    def unforgotten(self) -> tuple[Record, ...]:
        """Return the processes whose end the controller has not dealt with."""
        return tuple(record for _, record in sorted(self._records.items()) if not record.forgotten)

    def add(self, record: Record) -> None:
        """Raises OSError if the disk does not take it; the record then holds for this agent's life only."""
        self._records[record.process] = record
        os.write(self._descriptor, b"\n" + msgspec.json.encode(record) + b"\n")

    def assign(self, process: str, rank: int) -> None:
        record = self._records.get(process)
        if record is not None:
            self.add(msgspec.structs.replace(record, rank=rank))

    def forget(self, process: str) -> None:
        record = self._records.get(process)
        if record is not None:
            self.add(msgspec.structs.replace(record, forgotten=True))
            del self._records[process]

    def close(self, *, remove: bool) -> None:
        """`remove` it when no process is left that a successor could find."""
        if remove:
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
