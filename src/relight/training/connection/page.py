"""The worker's side of its position page: plain stores into shared memory, readable after the worker's death."""

import contextlib
import mmap
import struct
import time
from typing import Any

import xxhash

from relight.core.protocol.position import (
    BATCH_MARK,
    BATCH_MARK_OFFSET,
    INHERITED_MARK_OFFSET,
    LEAVE_OFFSET,
    LIFE_LOCK_OFFSET,
    MAPPING_BYTES,
    PAGE_BYTES,
    PRIVATE_HEADER,
    PRIVATE_OFFSET,
    PRIVATE_SLOT_BYTES,
    TRACE_INDEX_OFFSET,
    TRACE_OFFSET,
    TRACE_RECORD,
    TRACE_RECORDS,
    WORD,
    Phase,
)
from relight.errors import RestoreError, UsageError
from relight.training.connection.work import WorkClock
from relight.transfer.io.codec import decode_tree, encode_tree
from relight.wire.memory import lifelock

# Of a rank whose data position and random streams follow from its number and the step's; and its rank-private state, as
# it is kept, if it has nothing else for itself: the usual case.
NO_PRIVATE = encode_tree({"buffers": {}, "per_rank": {}, "data": None, "rng": None}, "rank-private state")

_NO_PRIVATE_DIGEST = xxhash.xxh3_64_intdigest(NO_PRIVATE)

_LOSS = struct.Struct("<d")
_pack_record, _RECORD_BYTES = TRACE_RECORD.pack_into, TRACE_RECORD.size
_PRIVATE_WORDS = (WORD["private_version_0"], WORD["private_version_1"])  # by slot
_PHASE, _PROGRESS, _STAMP_NS = WORD["phase"], WORD["progress"], WORD["stamp_ns"]
_GENERATION, _STEP, _VERSION, _COLLECTIVES = WORD["generation"], WORD["step"], WORD["version"], WORD["collectives"]
_TORN, _COMMITS, _ATTEMPT, _PREPARED = WORD["torn"], WORD["commits"], WORD["attempt"], WORD["prepared"]
_TRACE_INDEX, _LEAVE = TRACE_INDEX_OFFSET // 8, LEAVE_OFFSET // 8
_NO_WORD = 0
_WORK_WORDS = tuple(WORD.get(f"{phase.name.lower()}_work_ns", _NO_WORD) for phase in Phase)  # by phase


class PositionPage:
    """Stamps (generation, step, phase, version, ...) and keeps the rank-private state of two versions.

    Not thread-safe: only the main thread stamps, except `count_collective`, `note_operation` and `show_waiting`, which
    the autograd thread may call while the main thread waits for it.
    """

    def __init__(self, file_descriptor: int, offset: int = 0) -> None:
        """Map the page that the agent made there. `file_descriptor` -1 makes one of this process's own.

        To be called on the main thread: its end is what the agent takes for the worker's.
        """
        self._map = mmap.mmap(file_descriptor, MAPPING_BYTES, offset=offset)
        self._words = memoryview(self._map)[:PAGE_BYTES].cast("q")
        self._work = WorkClock()
        if file_descriptor >= 0:
            self._hold_life_lock()
        self.phase = Phase.STARTING
        self.forget_private()
        self.show_prepared(-1)
        self._words[WORD["rank"]] = -1
        self.report_loss(float("nan"))

    def _hold_life_lock(self) -> None:
        with contextlib.suppress(OSError):  # then the pidfd alone tells of this process's death, a little later
            lifelock.hold(self._map, LIFE_LOCK_OFFSET)

    def stamp(self, phase: Phase) -> None:
        """Enter `phase` now."""
        words = self._words
        now = time.monotonic_ns()
        before, self.phase = self.phase, phase
        worked = self._work.turn(now, until_launch=before is Phase.BACKWARD)
        word = _WORK_WORDS[before]
        if word != _NO_WORD:
            words[word] += worked
        words[_PHASE] = phase
        words[_PROGRESS] += 1
        words[_STAMP_NS] = now
        index = words[_TRACE_INDEX]
        offset = TRACE_OFFSET + index % TRACE_RECORDS * _RECORD_BYTES
        _pack_record(self._map, offset, now, words[_GENERATION], words[_STEP], phase, words[_VERSION])
        words[_TRACE_INDEX] = index + 1

    def put(self, name: str, value: int) -> None:
        """Store one word by its name."""
        self._words[WORD[name]] = value

    def show_step(self, step: int, attempt: int) -> None:
        """`step` comes next: all before it are applied."""
        words = self._words
        words[_STEP] = words[_VERSION] = step
        words[_ATTEMPT] = attempt

    def show_prepared(self, step: int) -> None:
        """This rank waits at the barrier of `step`; -1: at none."""
        self._words[_PREPARED] = step

    def commit(self, version: int, commits: int) -> None:
        """A step is finished; `commits` counts those of this process."""
        words = self._words
        words[_VERSION] = version
        words[_TORN] = 0
        words[_COMMITS] = commits

    @property
    def is_torn(self) -> bool:
        """True if a write was begun, and has not ended."""
        return bool(self._words[_TORN])

    def count_collective(self) -> None:
        """One more collective was launched in this generation; that is progress."""
        words = self._words  # not by `note_operation`: one call less on the way of every bucket
        words[_COLLECTIVES] += 1
        words[_PROGRESS] += 1
        words[_STAMP_NS] = now = time.monotonic_ns()
        self._work.launched(now)

    def show_waiting(self, waiting: bool) -> None:
        """Instead of the count, where ranks make different numbers of them: 1 while this one waits for others."""
        self._words[_COLLECTIVES] = int(waiting)

    def note_operation(self) -> None:
        """An operation was launched; that is progress."""
        words = self._words
        words[_PROGRESS] += 1
        words[_STAMP_NS] = now = time.monotonic_ns()
        self._work.launched(now)

    def waited(self, nanoseconds: int) -> None:
        """Count a wait for other ranks in the present phase."""
        self._work.waited(nanoseconds)

    def worked_ns(self, phase: Phase) -> int:
        """Return the time this process has worked by itself in FORWARD, BACKWARD or OPTIMIZER, in all steps, in ns."""
        return self._words[_WORK_WORDS[phase]]

    @property
    def asked_to_leave(self) -> bool:
        """True if this process is to end between two steps."""
        return self._words[_LEAVE] != 0

    def report_loss(self, loss: float) -> None:
        """Show the last loss."""
        _LOSS.pack_into(self._map, 8 * WORD["loss"], loss)

    def mark_batch(self, step: int, digest: int) -> None:
        """Note the digest of a step's batch, for a replacement that has to draw it again."""
        BATCH_MARK.pack_into(self._map, BATCH_MARK_OFFSET, step, digest)

    def inherited_batch(self) -> tuple[int, int]:
        """(step, digest) of the batch that the predecessor at this rank drew last; step -1 if it is not known."""
        step, digest = BATCH_MARK.unpack_from(self._map, INHERITED_MARK_OFFSET)
        return (step, digest) if digest else (-1, 0)

    def forget_private(self) -> None:
        for word in _PRIVATE_WORDS:
            self._words[word] = -1

    def write_private(self, version: int, payload: bytes) -> None:
        """Keep `payload` as the rank-private state with which `version` starts; the version before stays."""
        if len(payload) > PRIVATE_SLOT_BYTES - PRIVATE_HEADER.size:
            raise UsageError(
                f"rank-private state of {len(payload)} bytes (buffers that change in forward, data position, per_rank "
                f"objects) is over the limit of {PRIVATE_SLOT_BYTES}; hand over less, or keep it replicated"
            )
        slot = version % 2
        word = _PRIVATE_WORDS[slot]
        offset = PRIVATE_OFFSET + slot * PRIVATE_SLOT_BYTES
        self._words[word] = -1
        start = offset + PRIVATE_HEADER.size
        self._map[start : start + len(payload)] = payload
        digest = _NO_PRIVATE_DIGEST if payload is NO_PRIVATE else xxhash.xxh3_64_intdigest(payload)
        PRIVATE_HEADER.pack_into(self._map, offset, version, len(payload), digest)
        self._words[word] = version

    def withdraw_private(self, version: int) -> None:
        """Say that the rank-private state of `version` is not kept here: the step that was to make it is repeated."""
        if self._words[_PRIVATE_WORDS[version % 2]] == version:
            self._words[_PRIVATE_WORDS[version % 2]] = -1

    def claim_private(self, version: int) -> None:
        """The state of `version` that the agent put here, a predecessor's, is this process's own from now on."""
        self._words[_PRIVATE_WORDS[version % 2]] = version

    def read_private(self, version: int) -> bytes | None:
        """Return the rank-private state kept for `version` (also one that the agent put there), or None."""
        offset = PRIVATE_OFFSET + (version % 2) * PRIVATE_SLOT_BYTES
        kept, length, checksum = PRIVATE_HEADER.unpack_from(self._map, offset)
        if kept != version or not 0 <= length <= PRIVATE_SLOT_BYTES - PRIVATE_HEADER.size:
            return None
        start = offset + PRIVATE_HEADER.size
        payload = self._map[start : start + length]
        return payload if xxhash.xxh3_64_intdigest(payload) == checksum else None

    def read_private_tree(self, version: int) -> dict[str, Any]:
        """Return the rank-private state kept for `version`, decoded. Raises RestoreError if it is not there."""
        payload = self.read_private(version)
        if payload is None:
            raise RestoreError(f"the rank-private state of version {version} is not beside this rank's page")
        tree: dict[str, Any] = decode_tree(payload)
        return tree
