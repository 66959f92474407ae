"""A Lease in a file of the run directory, for clusters that keep no such records, as Slurm: `--lease file`.

The file lies on storage that all hosts of the job share, and is replaced as a whole by one host at a time, which holds
a lock on another file meanwhile. Each write has the next number, so a host that knows an older one has to read again.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from relight.cluster.lease import LeaseError, LeaseServer, Server
from relight.core.lease import Read, Record, Write

IN_FILE = "file"  # instead of the name of a Lease of Kubernetes
FILE = "lease.json"
LOCK = "lease.lock"
_TRY_SECONDS = 0.05


def find_server(
    lease: str, run_dir: str, duration_seconds: int, doubt: Callable[[], str], *, begins: bool = False
) -> Server:
    """Return the place where the Lease of a job is kept. `doubt`, `begins`: see LeaseFile."""
    if lease == IN_FILE:
        return LeaseFile(Path(run_dir), duration_seconds, doubt, begins=begins)
    return LeaseServer(lease, duration_seconds)


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """The file's content."""

    version: int
    holder: str
    duration_seconds: int


class LeaseFile:
    """One Lease, kept in a file."""

    def __init__(
        self, run_dir: Path, duration_seconds: int, doubt: Callable[[], str] = lambda: "", *, begins: bool = False
    ) -> None:
        """`doubt` gives, before each write, a reason for which this host must not hold the Lease, or an empty string.

        `begins`: make the file. A host that finds none does not share the storage, and must not take over.
        """
        self._run_dir = run_dir
        self._duration_seconds = duration_seconds
        self._doubt = doubt
        self._begins = begins

    @property
    def patience_seconds(self) -> float:
        """Seconds for which an answer is awaited."""
        return self._duration_seconds / 5

    def perform(self, request: Read | Write, known: dict[str, Any]) -> tuple[Record | str, dict[str, Any]]:
        """Carry out a request, and return what comes of it: see Server. Nothing more is known of a file."""
        try:
            if isinstance(request, Read):
                kept = self._read()
                return Record(str(kept.version), kept.holder, float(kept.duration_seconds)), known
            if request.holder and (doubt := self._doubt()):
                raise LeaseError(f"this host must not hold it: {doubt}")
            with self._locked():
                kept = self._read()
                if str(kept.version) != request.version:
                    return "", known
                self._write(kept.version + 1, request.holder)
                return str(kept.version + 1), known
        except (OSError, msgspec.MsgspecError) as error:
            if isinstance(error, LeaseError):
                raise
            raise LeaseError(f"the Lease {self._run_dir / FILE} cannot be used: {error}") from error

    def _read(self) -> _Kept:
        try:
            content = (self._run_dir / FILE).read_bytes()
        except FileNotFoundError:
            if not self._begins:
                raise LeaseError(f"there is no {self._run_dir / FILE}: do all hosts share this directory?") from None
            return _Kept(version=0, holder="", duration_seconds=self._duration_seconds)
        return msgspec.json.decode(content, type=_Kept)

    def _write(self, version: int, holder: str) -> None:
        kept = _Kept(version=version, holder=holder, duration_seconds=self._duration_seconds)
        draft = self._run_dir / f"{FILE}.{os.getpid()}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, msgspec.json.encode(kept))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        draft.replace(self._run_dir / FILE)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock. Raises TimeoutError if another host has it for long."""
        descriptor = os.open(self._run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            deadline = time.monotonic() + self.patience_seconds
            while not _lock(descriptor):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another host has locked {LOCK} for {self.patience_seconds:g} s")
                time.sleep(_TRY_SECONDS)
            yield
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
