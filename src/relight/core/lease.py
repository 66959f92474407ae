"""The right to be a job's controller: the process has it that holds a Lease, a record that the cluster keeps.

A value: times and the server's answers go in, requests come out (`relight.cluster.lease` carries them out). Two never
act at the same moment, whatever is lost, late or paused, because

- a write names the version of the record that it replaces, so that of two writers one fails;
- the holder acts for a part of the record's duration after it *sent* a write that succeeded, and no longer;
- another process takes over once it has known the same version for the whole duration, by its own clock. It first saw
  that version after the holder had sent it. So clocks need not agree, only run equally fast, to a third.

What a paused holder had begun is fenced by its journal: see `Journal` in `relight.server.records.journal`.
"""

from dataclasses import dataclass
from enum import StrEnum

TERM = 2 / 3  # of the duration: how long a holder acts after a write
RENEWALS = 7  # in a duration, as long as all goes well
LOOKS = 5  # in a duration, by those that wait
RETRIES = 15  # in a duration, after a request that failed


@dataclass(frozen=True)
class Record:
    """The Lease as it was read. The version is the server's, and changes with every write."""

    version: str
    holder: str  # empty: none
    duration_seconds: float


@dataclass(frozen=True)
class Read:
    """Ask for the record."""


@dataclass(frozen=True)
class Write:
    """Replace this version of the record."""

    version: str
    holder: str  # empty: the Lease is free


class Stage(StrEnum):
    """The progress of a process."""

    WAITING = "waiting"  # for the Lease to be free, or for its holder's silence
    HOLDING = "holding"
    OVER = "over"  # it has held the Lease, and may never act again


class Tenure:
    """One process's part in the Lease. Times are of a clock of its host that counts while the host sleeps."""

    def __init__(self, name: str, duration_seconds: float) -> None:
        """`name` is like no other process's, but may be that of a dead predecessor on the same host."""
        self.name = name
        self.duration_seconds = duration_seconds
        self.stage = Stage.WAITING
        self.holder = ""  # when the record was last read
        self._version = ""  # to be replaced by the next write; empty: it must be read first
        self._seen = ""  # a version, and when it was first seen here
        self._seen_at = 0.0
        self._seen_duration = 0.0
        self._sent_at = 0.0
        self._until = 0.0
        self._next_at = 0.0

    def may_act(self, now: float) -> bool:
        """True if this process is the controller. To be asked before each act, since time may have stood still."""
        return self.stage is Stage.HOLDING and now < self._until

    @property
    def next_at(self) -> float:
        """The time at which `advance` is to be called again."""
        return min(self._next_at, self._until) if self.stage is Stage.HOLDING else self._next_at

    def advance(self, now: float) -> Read | Write | None:
        """Return the request that is due; it is answered by one call of the methods below before the next one."""
        if self.stage is Stage.HOLDING and now >= self._until:
            self.stage = Stage.OVER
        if self.stage is Stage.OVER or now < self._next_at:
            return None
        if not self._version:
            return Read()
        if self.stage is Stage.WAITING and not self._is_free(now):
            return Read()
        self._sent_at = now
        return Write(self._version, self.name)

    def release(self) -> Write | None:
        """Give the Lease up, so that another process need not wait; None if it is not held, or not known well."""
        held, self.stage = self.stage is Stage.HOLDING and bool(self._version), Stage.OVER
        return Write(self._version, "") if held else None

    # --- answers --------------------------------------------------------------------------------------------------
    def take_record(self, record: Record, now: float) -> None:
        """Take in the record that was read."""
        self.holder, self._version = record.holder, record.version
        if record.version != self._seen:
            self._seen, self._seen_at, self._seen_duration = record.version, now, record.duration_seconds
        if self.stage is Stage.HOLDING:
            if record.holder == self.name:
                self._next_at = now
            else:
                self.stage = Stage.OVER
        elif self._is_free(now):
            self._next_at = now
        else:
            self._next_at = min(now + self.duration_seconds / LOOKS, self._seen_at + self._seen_duration)

    def take_success(self, version: str, now: float) -> None:
        """Take in that the write has replaced the record; `version` is the new one."""
        self._version, self.holder = version, self.name
        self._until = self._sent_at + self.duration_seconds * TERM
        self.stage = Stage.HOLDING if now < self._until else Stage.OVER
        self._next_at = max(now, self._sent_at + self.duration_seconds / RENEWALS)

    def take_conflict(self, now: float) -> None:
        """Take in that another write came first."""
        self._version, self._next_at = "", now

    def take_failure(self, now: float) -> None:
        """Take in that there was no answer. A write may have succeeded all the same, or may still do."""
        self._version, self._next_at = "", now + self.duration_seconds / RETRIES

    def _is_free(self, now: float) -> bool:
        if self.holder in ("", self.name):
            return True
        return self._version == self._seen and now >= self._seen_at + self._seen_duration
