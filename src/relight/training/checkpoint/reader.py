"""Reads this rank's part of a checkpoint into its state, and verifies it."""

from pathlib import Path
from typing import Any

import msgspec

from relight.errors import CheckpointError, RestoreError
from relight.training.checkpoint import files
from relight.training.checkpoint.dcp import Piece
from relight.training.data.batches import Batches
from relight.training.process.private import PrivateState
from relight.training.process.runtime import Runtime
from relight.training.state.assignment import Assignment
from relight.training.state.tracked import TrackedState
from relight.training.torch_private.distributed.mesh import place_in_whole
from relight.transfer.io.codec import decode_tree, local_part, unflatten
from relight.transfer.restore.client import destination_for

_INHERITED = "the checkpoint that it went on from is of a job that said: "


class CheckpointReader:
    """Reads complete checkpoints into the state that was handed over."""

    def __init__(
        self,
        runtime: Runtime,
        state: TrackedState,
        batches: Batches,
        assignment: Assignment,
        private: PrivateState,
    ) -> None:
        self._runtime = runtime
        self._state = state
        self._worker = runtime.worker
        self._batches = batches
        self._assignment = assignment
        self._private = private

    def read(self, root: Path, version: int) -> dict[str, Any]:
        """This rank's part, from the disk. Returns what a copy of it needs to know. Raises CheckpointError.

        If the state was divided in the same way its digest is verified; else its pieces are put together from those
        that were written, each of which the file format guards.
        """
        state, runtime, prefix = self._state, self._runtime, prefix_of(self._state)
        meta = files.read_meta(root, version)
        if meta.world_size != runtime.world_size and not meta.derivable:
            raise CheckpointError(
                f"it was written by {meta.world_size} ranks, each with something of its own (statistics of BatchNorm, "
                f"the place in the data, random streams), and cannot be divided among {runtime.world_size}"
            )
        writer = meta.parts.get(self._assignment.shard)
        if writer is None and prefix:
            raise CheckpointError(
                f"its state is divided into {', '.join(meta.parts)}, and this rank holds {self._assignment.shard}: "
                "stages of a pipeline and parts of ZeRO can only go on divided as they were"
            )
        part = files.read_part(root, version, min(meta.parts.values()) if writer is None else writer)
        if part.layout != state.replica.layout():
            raise CheckpointError("it is of another model or optimizer (names, shapes or settings differ)")
        own = state.replica.destination()
        pieces = part.pieces if writer is not None else self._own_pieces(part)
        try:
            tensors = [destination_for(own.get(piece.path.removeprefix(prefix)), piece.spec) for piece in pieces]
        except RestoreError as error:
            raise CheckpointError(str(error)) from error
        files.read_tensors(root, version, pieces, tensors)
        described = {
            "lineage": meta.lineage,
            "until": self._worker.until,
            "private_buffers": part.private_buffers,
            "gradients_to_none": meta.gradients_to_none,
            **part.besides,
        }
        if why := state.adopt(unflatten(part.tree, tensors), described):
            runtime.notices.doubt(why)
        self.adopt(meta.version, described)
        if writer is not None and (found := state.replica.digest()) != part.digest:
            raise CheckpointError(f"its digest is {found}, and was {part.digest} when it was written")
        for reason in () if runtime.protection.started else meta.doubts:  # one of this job says nothing new
            runtime.notices.doubt(reason if reason.startswith(_INHERITED) else f"{_INHERITED}{reason}")
        if meta.risk:
            runtime.notices.doubt(meta.risk)
        if meta.lacks_last_code and self._worker.until > meta.version:
            runtime.notices.doubt(
                f"the checkpoint of step {meta.version} was the last one of a job with fewer epochs: it lacks what the "
                "code after the steps of that job's last epoch has changed"
            )
        if writer is None or meta.world_size != runtime.world_size:
            runtime.notices.doubt(
                f"the checkpoint of step {meta.version} was written by {meta.world_size} ranks, divided in another way "
                "than here: no undisturbed run adds up in this order"
            )
        return described

    def _own_pieces(self, part: files.Part) -> list[Piece]:
        """Return this rank's block of each tensor of a checkpoint that was divided in another way."""
        like = self._state.replica.parameters_in(part.tree, len(part.pieces))
        pieces = []
        for number, piece in enumerate(part.pieces):
            parameter = like.get(number)
            if parameter is None and piece.spec.shape != piece.whole:
                raise CheckpointError(f"{piece.path} is a DTensor of an object, which can only go on divided as it was")
            if parameter is None or tuple(parameter.shape) != piece.whole:
                offset, shape = (0,) * len(piece.whole), piece.whole
            else:
                (_, offset), shape = place_in_whole(parameter), tuple(local_part(parameter).shape)
            spec = msgspec.structs.replace(piece.spec, shape=shape)
            pieces.append(Piece(piece.path, spec, piece.whole, offset))
        return pieces

    def adopt(self, version: int, meta: dict[str, Any]) -> None:
        """Note that the state is that of this version, and adopt what its copy carries besides tensors."""
        self._worker.version, self._worker.lineage = version, meta["lineage"]
        if why := self._state.adopt_besides(meta):
            self._runtime.notices.doubt(why, version)
        self._state.adopt_attributes(meta)
        self._state.gradients.adopt_missing(meta.get("missing_gradients", ()))

    def take_private(self, root: Path, version: int) -> None:
        """Take on this rank's private state. With another number of ranks there is none: it follows from rank and step.

        What the script carries is in it. At the start of a job it is not known yet whether there is any.

        Raises:
            CheckpointError: it cannot be read.
        """
        runtime, place = self._runtime, self._assignment.batch_index
        self._batches.start(version, place)
        if files.read_meta(root, version).world_size != runtime.world_size:
            return
        payload = files.read_private(root, version, runtime.rank)
        runtime.page.write_private(version, payload)
        self._private.adopt(decode_tree(payload), version)
        self._batches.restore(version, place)


def prefix_of(state: TrackedState) -> str:
    """Return the prefix for names of tensors in files: stages of a pipeline and parts of ZeRO have equal names."""
    namesakes = state.division.namesakes()
    return f"{namesakes}: " if namesakes else ""
