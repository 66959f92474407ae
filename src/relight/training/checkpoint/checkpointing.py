"""Checkpoints of a training job: the last fallback tier, for when no replica lives, or the job is started again.

A finished version is never undone while a replica lives, so each rank may write its own part of one as soon as it has
committed it, without asking the others; the parts fit together because they are of the same version. Of a state that is
divided over ranks, the first holder of each part writes it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relight.core.protocol.commands import Save
from relight.errors import CheckpointError, RestoreError, UsageError
from relight.training.checkpoint import files
from relight.training.checkpoint.reader import CheckpointReader
from relight.training.checkpoint.schedule import CheckpointSchedule
from relight.training.checkpoint.start import CheckpointStart
from relight.training.checkpoint.writer import OTHERS_SECONDS, CheckpointWriter
from relight.training.connection.page import NO_PRIVATE
from relight.training.process.runtime import Runtime
from relight.training.state.assignment import Assignment
from relight.training.state.tracked import TrackedState
from relight.wire.messages import private_key

LAST_SECONDS = 600.0  # for the last checkpoint to be written before the job ends


class Checkpointing:
    """Checkpoints of this rank, from the start of the job to its end. Errors are reported, and fail no training."""

    def __init__(
        self,
        runtime: Runtime,
        state: TrackedState,
        reader: CheckpointReader,
        assignment: Assignment,
    ) -> None:
        self._runtime = runtime
        self._worker = runtime.worker
        self._reader = reader
        self._schedule = CheckpointSchedule()
        self._writer = CheckpointWriter(runtime, state, assignment)
        self._start = CheckpointStart(runtime, state, reader, assignment)
        self._useless: set[int] = set()  # complete ones that could not be read

    def ask(self, directory: str | Path, every: int, keep: int, resume: bool) -> None:
        """See `Training.checkpoint`."""
        if every < 1 or keep < 1:
            raise UsageError(f"checkpoint(every={every}, keep={keep}): at least 1 each")
        if self._runtime.settings.is_trial:  # which neither begins from the user's checkpoints nor adds to them
            directory = Path(self._runtime.settings.run_dir) / "checkpoints"
        self._schedule = CheckpointSchedule(Path(directory).absolute(), every, keep, resume)

    def expect_epochs(self) -> None:
        """The script has a loop of epochs: code follows the last step, and runs once all ranks have finished."""
        self._writer.has_epochs = True

    @property
    def every(self) -> int:
        """Steps from one checkpoint to the next; 0: there are none."""
        return self._schedule.every

    def assign(self, writers: Sequence[tuple[str, int]]) -> None:
        """Set, for this generation, which rank writes each part; empty if the state is not divided."""
        self._writer.assign(writers)
        self._writer.leave_out_begun(self._schedule)

    # --- while training -------------------------------------------------------------------------------------------
    def resume(self) -> bool:
        """Start from the newest checkpoint, if there is one. Raises CheckpointError if there are some, all useless."""
        if not self.every or not (version := self._start.run(self._schedule)):
            return False
        self._writer.version = version
        self.take_private(version)
        return True

    def between_steps(self) -> None:
        """Begin a checkpoint if one is due: the state is that of a finished version, and nothing writes."""
        version = self._worker.version
        if self._schedule.is_due(version):
            self._writer.begin(self._schedule, version)

    def finish(self) -> None:
        """Write the final version, which all ranks hold, as the last checkpoint."""
        if not self.every:
            return
        self._writer.wait(LAST_SECONDS)
        self._writer.begin(self._schedule, self._worker.version, is_last=True)
        if not self._writer.wait(LAST_SECONDS):
            text = f"the last checkpoint was not written within {LAST_SECONDS:g} s"
            self._runtime.notices.say(text, text)

    # --- before the job ends for want of ranks --------------------------------------------------------------------
    def save(self, order: Save) -> str:
        """Write this rank's part of a last checkpoint; the rank that completes it waits for all others.

        Files that are there already are not written again: that step's checkpoint was due anyway, or the controller
        died while it was written, and its successor orders all of it once more. Returns the directory on that rank, and
        nothing on others. Raises CheckpointError, OSError, TimeoutError, or StepInterrupted if the generation is
        closed.
        """
        runtime, writer, root, version = self._runtime, self._writer, self._schedule.root, order.target
        rank, history = runtime.rank, writer.history
        writer.give_up()  # a checkpoint of this very version, perhaps, that waits for a rank which is dead
        if not writer.wait(LAST_SECONDS):
            raise CheckpointError(f"the checkpoint of step {writer.version} was not written within {LAST_SECONDS:g} s")
        writer.assign(order.writers)
        if version in self._useless:
            raise CheckpointError(f"the checkpoint of step {version} is complete, but damaged")
        if version in files.published(root):
            return str(files.place_of(root, version)) if rank == order.rank else ""
        private = runtime.page.read_private(version)
        if private is None:
            raise CheckpointError(f"what only it has for step {version} is not there")
        if writer.writes_part and not files.has_part(root, version, history, rank):
            writer.copy(version).write(root)
        if rank != order.rank:
            files.write_doubts(root, version, history, rank, writer.doubts())
        files.write_private(root, version, history, rank, private)
        if rank != order.rank:
            runtime.store.set(order.generation, _written_key(rank), b"")
            return ""
        for other in order.absent:
            if not files.has_private(root, version, history, other):
                files.write_private(root, version, history, other, self._private_of(other, order))
        others = [r for r in range(runtime.world_size) if r != rank and r not in order.absent]
        runtime.store.wait(order.generation, tuple(map(_written_key, others)), LAST_SECONDS)
        writer.publish(self._schedule, writer.describe(version), history)
        return str(files.place_of(root, version))

    def _private_of(self, rank: int, order: Save) -> bytes:
        """Return the private state of a rank whose process is dead, from its agent."""
        if rank in order.derived:
            if why := self._runtime.holdings.doubt_if_lost():
                self._runtime.notices.doubt(f"rank {rank}: {why}")
            return NO_PRIVATE
        (payload,) = self._runtime.store.wait(order.generation, (private_key(rank),), OTHERS_SECONDS)
        return payload

    # --- in a recovery --------------------------------------------------------------------------------------------
    def seen(self) -> tuple[int, ...]:
        """Return the versions of complete checkpoints that this rank can read, newest first."""
        if not self.every:
            return ()
        return tuple(version for version in files.published(self._schedule.root) if version not in self._useless)

    def go_back(self, version: int) -> dict[str, Any]:
        """Read this rank's part in a recovery. Raises RestoreError; then `seen` leaves this checkpoint out."""
        try:
            return self._reader.read(self._schedule.root, version)
        except CheckpointError as error:
            self._useless.add(version)
            raise RestoreError(f"the checkpoint of step {version} cannot be used: {error}") from error

    def take_private(self, version: int) -> None:
        """Take on the private state of this rank from a checkpoint. Raises CheckpointError."""
        self._reader.take_private(self._schedule.root, version)

    def discard_after(self, version: int, distrust: int = -1) -> None:
        """Forget newer versions, which are undone and come again.

        Checkpoints of `distrust` and later ones may hold corrupted state; none of them may be read again. -1: all are
        good. Raises RestoreError if one is still being written, or cannot be removed.
        """
        self._writer.give_up()  # ranks write for another history from now on
        if self._writer.version > version:
            self._writer.version = -1
        if distrust >= 0 and self.every:
            if not self._writer.wait(OTHERS_SECONDS):
                raise RestoreError("a checkpoint of a version that is not trusted is still being written")
            self.discard(distrust)

    def discard(self, version: int) -> None:
        """Remove the checkpoints of this version and of later ones, on rank 0. Raises RestoreError."""
        if not self.every or self._runtime.rank != 0:
            return
        try:
            files.discard(self._schedule.root, version)
        except OSError as error:
            raise RestoreError(f"a checkpoint that is not trusted cannot be removed: {error}") from error


def _written_key(rank: int) -> str:
    """Key in the generation's store that says, during a last checkpoint, that a rank's files are complete."""
    return f"written/{rank}"
