"""Writes this rank's part of a checkpoint: copied between two steps, written by a thread beside training."""

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from relight.errors import CheckpointError
from relight.training.checkpoint import files
from relight.training.checkpoint.dcp import Piece
from relight.training.checkpoint.reader import prefix_of
from relight.training.checkpoint.schedule import CheckpointSchedule
from relight.training.process.runtime import Runtime
from relight.training.state.assignment import Assignment
from relight.training.state.tracked import TrackedState
from relight.training.torch_private.distributed.mesh import place_in_whole
from relight.transfer.io.codec import Flat, digest_of, spec_of
from relight.transfer.restore.offer import plan_state
from relight.transfer.tensors.weights import TensorReader

_POLL_SECONDS = 0.05
OTHERS_SECONDS = 120.0  # for the other ranks' parts


@dataclass(frozen=True)
class PartCopy:
    """One part of the state in host memory, not written yet."""

    version: int
    history: str
    rank: int
    flat: Flat
    tensors: list[torch.Tensor]
    part: files.Part

    def write(self, root: Path) -> None:
        """Write it, with its digest. Raises OSError or CheckpointError."""
        reader = TensorReader(self.tensors)
        digest = digest_of(self.flat, [reader.digest(bucket) for bucket in plan_state(self.flat.specs)])
        part = msgspec.structs.replace(self.part, digest=digest)
        files.write_part(root, self.version, self.history, self.rank, part, self.tensors)


class CheckpointWriter:
    """Writes one checkpoint at a time. Errors are reported, and fail no training."""

    def __init__(self, runtime: Runtime, state: TrackedState, assignment: Assignment) -> None:
        self._runtime = runtime
        self._state = state
        self._worker = runtime.worker
        self._assignment = assignment
        self._writers: dict[str, int] = {"": 0}  # by part of the state: the rank that writes it
        self._host: list[torch.Tensor] = []  # a copy of the state, used again by the next
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()  # the one being written is not completed any more
        self._left_out: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()  # versions, histories: not told yet
        self.version = -1  # of the newest one that was begun here
        self.has_epochs = False  # code follows the last step, and runs after the last checkpoint

    def assign(self, writers: Sequence[tuple[str, int]]) -> None:
        """Set, for this generation, which rank writes each part; empty if the state is not divided."""
        self._writers = dict(writers) or {"": 0}

    @property
    def history(self) -> str:
        """Name the history that parts of one checkpoint have in common; equal on all ranks."""
        return f"{self._runtime.settings.run_id}-{self._worker.history}"

    @property
    def writes_part(self) -> bool:
        """True if this rank writes a part of the state."""
        return self._runtime.rank in self._writers.values()

    def begin(self, schedule: CheckpointSchedule, version: int, is_last: bool = False) -> None:
        """Copy the state of `version`, and write it in a thread, unless that was done before a recovery.

        It is left out while another is being written. Every rank writes the last one, also one that had left it out.
        """
        if version == self.version:
            return
        if self._thread is not None and self._thread.is_alive():
            self._left_out.put((version, self.history))
            if not self._runtime.settings.is_trial:  # which writes to another disk
                self._runtime.notices.say(
                    "slow checkpoints",
                    f"no checkpoint of step {version}: the one of step {self.version} is still being written; raise "
                    "checkpoint(every=...). Said once",
                )
            return
        self.version = version
        private = self._runtime.page.read_private(version)
        try:
            copy = self.copy(version) if self.writes_part else None
        except (CheckpointError, RuntimeError, MemoryError) as error:  # too little memory, mostly
            self._runtime.notices.say("no checkpoints", f"no checkpoint can be written: {error}. Training goes on")
            self._left_out.put((version, self.history))
            self.version, private, copy = -1, None, None
        self._given_up = given_up = threading.Event()
        rank, history = self._runtime.rank, self.history
        meta = self.describe(version) if rank == 0 and self.version == version else None
        doubts = self.doubts() if rank and private is not None else files.Doubts()

        def write() -> None:
            try:
                self._tell_left_out(schedule.root)
                if rank == 0:
                    files.clear(schedule.root, version, history)
                if private is not None:
                    files.write_doubts(schedule.root, version, history, rank, doubts)
                    files.write_private(schedule.root, version, history, rank, private)
                if copy is not None:
                    copy.write(schedule.root)
                self._tell_left_out(schedule.root)
                if meta is None:
                    return
                if self._await_others(schedule.root, meta, history, given_up, is_last):
                    self.publish(schedule, meta, history)
                else:
                    self.version = -1
            except (OSError, CheckpointError, RuntimeError, MemoryError) as error:  # a full disk, mostly
                text = f"no checkpoint of step {version} in {schedule.root}: {error}. Training goes on"
                self._runtime.notices.say(text, text)
                files.withdraw(schedule.root, version, history, rank)

        self._thread = threading.Thread(target=write, name="relight-checkpoint", daemon=True)
        self._thread.start()

    def _tell_left_out(self, root: Path) -> None:
        """Say on the disk which checkpoints this rank has no part in. Raises OSError."""
        with contextlib.suppress(queue.Empty):
            while True:
                version, history = self._left_out.get_nowait()
                files.leave_out(root, version, history, self._runtime.rank)

    def leave_out_begun(self, schedule: CheckpointSchedule) -> None:
        """Have no rank wait for what the process that had this rank before had begun to write, and never will."""
        version = self._worker.version
        if not schedule.every or self._thread is not None:
            return
        rank, writes_part = self._runtime.rank, self.writes_part
        files.leave_out_older(schedule.root, version, self.history, rank, writes_part=writes_part)

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is being written. False if that takes longer."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def give_up(self) -> None:
        """Wait no longer for other ranks' parts of the checkpoint that is being written."""
        self._given_up.set()

    def copy(self, version: int) -> PartCopy:
        """Copy this rank's part of the state to host memory. Raises CheckpointError."""
        flat = self._state.replica.flat()
        if len(set(flat.paths)) < len(flat.paths):
            raise CheckpointError("two tensors of the state have the same name; give them names of their own")
        if [(t.shape, t.dtype) for t in self._host] != [(t.shape, t.dtype) for t in flat.tensors]:
            self._host = [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in flat.tensors]
        for copy, tensor in zip(self._host, flat.tensors, strict=True):
            copy.copy_(tensor)
        part = files.Part(
            key=self._assignment.shard,
            layout=self._state.replica.layout(),
            digest="",
            private_buffers=self._state.rank_private.named_buffers(),
            besides={**self._state.besides(), "missing_gradients": self._state.gradients.missing()},
            tree=flat.tree,
            pieces=_pieces(flat, prefix_of(self._state)),
            stored=[],
        )
        return PartCopy(version, self.history, self._runtime.rank, flat, self._host, part)

    def describe(self, version: int) -> files.Meta:
        """Return what the checkpoint of `version` says of itself."""
        doubts = self.doubts()
        return files.Meta(
            version=version,
            lineage=self._worker.lineage,
            world_size=self._runtime.world_size,
            derivable=self._runtime.holdings.is_derivable(),
            gradients_to_none=self._state.gradients.to_none,
            parts=self._writers,
            risk=doubts.risk,
            lacks_last_code=self.has_epochs and version == self._worker.until,
            doubts=doubts.doubts,
        )

    def doubts(self) -> files.Doubts:
        """Return why the bits, or those of a job that goes on from here, may not be those of an undisturbed run."""
        notices = self._runtime.notices
        said = tuple(dict.fromkeys((*notices.doubts_of_job, *notices.doubts)))
        return files.Doubts(said, self._runtime.holdings.standing_risk())

    def publish(self, schedule: CheckpointSchedule, meta: files.Meta, history: str) -> None:
        """Give a checkpoint its name: all parts are there. Remove older ones."""
        files.publish(schedule.root, history, meta)
        compares = self._runtime.settings.verify_every > 0
        files.prune(schedule.root, schedule.keep, self._worker.agreed if compares else None)

    def _await_others(
        self, root: Path, meta: files.Meta, history: str, given_up: threading.Event, is_last: bool
    ) -> bool:
        """Wait for every rank's files. False: given up, or a rank left this checkpoint out.

        A rank that was replaced in this step may never write them.
        """
        deadline = time.monotonic() + OTHERS_SECONDS
        missing = list(range(meta.world_size))
        while missing := [rank for rank in missing if not _is_written(root, meta, history, rank)]:
            if files.place_of(root, meta.version).exists():
                return True
            if not is_last and any(files.is_left_out(root, meta.version, history, rank) for rank in missing):
                return False
            if time.monotonic() > deadline:
                raise CheckpointError(f"rank {missing[0]} has not written its part of it")
            if given_up.wait(_POLL_SECONDS):
                return False
        return True


def _is_written(root: Path, meta: files.Meta, history: str, rank: int) -> bool:
    writes = rank in meta.parts.values()
    return files.has_private(root, meta.version, history, rank) and (
        not writes or files.has_part(root, meta.version, history, rank)
    )


def _pieces(flat: Flat, prefix: str) -> list[Piece]:
    pieces = []
    for path, leaf, tensor in zip(flat.paths, flat.leaves, flat.tensors, strict=True):
        whole, offset = place_in_whole(leaf)
        pieces.append(Piece(prefix + path, spec_of(tensor), whole, offset))
    return pieces
