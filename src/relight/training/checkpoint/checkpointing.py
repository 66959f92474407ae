"""Checkpoints of a training job: the last tier, for when no replica lives, or the job ends and is started again.

A finished version is never undone while a replica lives, so each rank may write its own of one as soon as it has
committed it, without asking anybody; it fits together because it is of the same version. Tensors are copied between two
steps (one pass over memory) and written by a thread while training goes on. Of a state that is divided over ranks, the
first holder of each part writes it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from relight.core.commands import Save
from relight.errors import CheckpointError, RestoreError, UsageError
from relight.training.checkpoint import files
from relight.training.checkpoint.dcp import Piece
from relight.training.checkpoint.reader import CheckpointReader, prefix_of
from relight.training.connection.page import NO_PRIVATE
from relight.training.process.progress import Progress
from relight.training.process.runtime import Runtime
from relight.training.state.assignment import Assignment
from relight.training.state.tracked import TrackedState
from relight.training.torch_private.mesh import place_in_whole
from relight.transfer.io.codec import Flat, digest_of, spec_of, unflatten
from relight.transfer.restore.fabric import Address
from relight.transfer.restore.offer import Offer, plan_state
from relight.transfer.tensors.weights import TensorReader
from relight.wire.messages import private_key

_KEY = "checkpoint"  # in the store of the generation: which one the job starts from
_POLL_SECONDS = 0.05
LAST_SECONDS = 600.0  # for the last checkpoint to be written before the job ends
OTHERS_SECONDS = 120.0  # for the other ranks' parts


class _Start(msgspec.Struct, frozen=True):
    """What rank 0 has chosen, for the others."""

    version: int  # 0: there is no checkpoint
    address: str = ""
    endpoint: str = ""
    error: str = ""


class Checkpointing:
    """What `Training.checkpoint` asked for. Nothing here can fail a training that runs; what goes wrong is told."""

    def __init__(
        self,
        runtime: Runtime,
        state: TrackedState,
        progress: Progress,
        reader: CheckpointReader,
        assignment: Assignment,
    ) -> None:
        self._runtime = runtime
        self._state = state
        self._progress = progress
        self._assignment = assignment
        self._reader = reader
        self.every = 0
        self._root = Path()
        self._keep = 0
        self._resume = True
        self._writers: dict[str, int] = {"": 0}  # of each part, who writes it
        self._version = -1  # of the newest one that was begun here
        self._host: list[torch.Tensor] = []  # a copy of the state, used again by the next
        self._useless: set[int] = set()  # complete ones that could not be read
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()  # of the one being written: nobody waits for other ranks' parts any more

    def ask(self, directory: str | Path, every: int, keep: int, resume: bool) -> None:
        """See `Training.checkpoint`."""
        if every < 1 or keep < 1:
            raise UsageError(f"checkpoint(every={every}, keep={keep}): at least 1 each")
        if self._runtime.settings.evidence:  # an experiment neither begins from the user's checkpoints nor adds to them
            directory = Path(self._runtime.settings.run_dir) / "checkpoints"
        self._root, self.every, self._keep, self._resume = Path(directory).absolute(), every, keep, resume

    def assign(self, writers: Sequence[tuple[str, int]]) -> None:
        """A generation begins. `writers`: of each part of the state, who writes it; nobody: it is not divided."""
        self._writers = dict(writers) or {"": 0}

    @property
    def _history(self) -> str:
        """The same on all ranks: parts of one checkpoint are of one history."""
        return f"{self._runtime.settings.run_id}-{self._progress.history}"

    # --- while training -------------------------------------------------------------------------------------------
    def between_steps(self) -> None:
        """The state is that of a finished version, and nobody writes: keep it if it is due."""
        version = self._progress.version
        if self.every and version and version % self.every == 0:
            self._begin(version)

    def finish(self) -> None:
        """All ranks hold the final version: it is the last checkpoint."""
        if not self.every:
            return
        self._wait(LAST_SECONDS)
        self._begin(self._progress.version)
        if not self._wait(LAST_SECONDS):
            self._tell(f"the last checkpoint was not written within {LAST_SECONDS:g} s")

    def save(self, order: Save) -> str:
        """This rank's part of a last checkpoint, before the job ends; the rank that completes it waits for all others.

        What is there already is not written again: that step's checkpoint was due anyway, or the controller died while
        it was written, and its successor orders all of it once more. Returns the directory on that rank, and nothing
        on others. Raises CheckpointError, OSError, TimeoutError, or StepInterrupted if the generation is closed.
        """
        runtime, version, rank, history = self._runtime, order.target, self._runtime.rank, self._history
        self._given_up.set()  # of this very version, perhaps, and waiting for a rank that is dead
        if not self._wait(LAST_SECONDS):
            raise CheckpointError(f"the checkpoint of step {self._version} was not written within {LAST_SECONDS:g} s")
        self._writers = dict(order.writers)
        if version in self._useless:
            raise CheckpointError(f"the checkpoint of step {version} is complete, but damaged")
        if version in files.published(self._root):
            return str(files.place_of(self._root, version)) if rank == order.rank else ""
        private = runtime.page.read_private(version)
        if private is None:
            raise CheckpointError(f"what only it has for step {version} is not there")
        if rank in self._writers.values() and not files.has_part(self._root, version, history, rank):
            self._take(version, history, rank)()
        files.write_private(self._root, version, history, rank, private)
        if rank != order.rank:
            runtime.store.set(order.generation, _written_key(rank), b"")
            return ""
        for other in order.absent:
            if not files.has_private(self._root, version, history, other):
                files.write_private(self._root, version, history, other, self._private_of(other, order))
        others = [r for r in range(runtime.world_size) if r != rank and r not in order.absent]
        runtime.store.wait(order.generation, tuple(map(_written_key, others)), LAST_SECONDS)
        files.publish(self._root, history, self._describe(version))
        self._prune()
        return str(files.place_of(self._root, version))

    def _private_of(self, rank: int, order: Save) -> bytes:
        """What a rank had for itself whose process is gone; its agent has it."""
        if rank in order.derived:
            return NO_PRIVATE
        runtime = self._runtime
        (payload,) = runtime.store.wait(order.generation, (private_key(rank),), OTHERS_SECONDS)
        return payload

    def _begin(self, version: int) -> None:
        if version == self._version:  # the same step again, after a recovery
            return
        if self._thread is not None and self._thread.is_alive():
            self._runtime.say(
                "slow checkpoints",
                f"no checkpoint of step {version}: the one of step {self._version} is still being written; raise "
                "checkpoint(every=...). Said once",
            )
            return
        self._version = version
        private = self._runtime.page.read_private(version)
        rank, history = self._runtime.rank, self._history
        try:
            write_part = self._take(version, history, rank) if rank in self._writers.values() else lambda: None
        except CheckpointError as error:
            self._runtime.say("no checkpoints", f"no checkpoint can be written: {error}. Training goes on")
            return
        self._given_up = threading.Event()
        complete = self._completion(version, history, self._given_up) if rank == 0 else lambda: None

        def write() -> None:
            try:
                if private is not None:
                    files.write_private(self._root, version, history, rank, private)
                write_part()
                complete()
            except (OSError, CheckpointError) as error:  # a full disk, mostly
                self._tell(f"no checkpoint of step {version} in {self._root}: {error}. Training goes on")

        self._thread = threading.Thread(target=write, name="relight-checkpoint", daemon=True)
        self._thread.start()

    def _take(self, version: int, history: str, rank: int) -> Callable[[], None]:
        """Copy this rank's part of the state; returns what writes the copy."""
        flat = self._state.replicated()
        if len(set(flat.paths)) < len(flat.paths):
            raise CheckpointError("two tensors of the state have the same name; give them names of their own")
        if [(t.shape, t.dtype) for t in self._host] != [(t.shape, t.dtype) for t in flat.tensors]:
            self._host = [torch.empty(t.shape, dtype=t.dtype) for t in flat.tensors]
        for copy, tensor in zip(self._host, flat.tensors, strict=True):
            copy.copy_(tensor)
        host = self._host
        part = files.Part(
            key=self._assignment.shard,
            layout=self._state.layout(),
            digest="",
            private_buffers=self._state.rank_private.named_buffers(),
            besides=self._state.besides(),
            tree=flat.tree,
            pieces=_pieces(flat, prefix_of(self._state)),
            stored=[],
        )

        def work() -> None:
            digested = msgspec.structs.replace(part, digest=_digest(flat, host))
            files.write_part(self._root, version, history, rank, digested, host)

        return work

    def _completion(self, version: int, history: str, given_up: threading.Event) -> Callable[[], None]:
        """What rank 0 does when all ranks have written theirs."""
        meta = self._describe(version)

        def work() -> None:
            if self._await_others(meta, history, given_up):
                files.publish(self._root, history, meta)
                self._prune()

        return work

    def _describe(self, version: int) -> files.Meta:
        return files.Meta(
            version=version,
            lineage=self._progress.lineage,
            world_size=self._runtime.world_size,
            derivable=self._runtime.holdings.is_derivable(),
            gradients_to_none=self._state.gradients_to_none,
            parts=self._writers,
            doubts=tuple(dict.fromkeys((*self._runtime.doubts_of_job, *self._runtime.doubts))),
        )

    def _prune(self) -> None:
        compares = self._runtime.settings.verify_every > 0
        files.prune(self._root, self._keep, self._progress.agreed if compares else None)

    def _await_others(self, meta: files.Meta, history: str, given_up: threading.Event) -> bool:
        """Every rank writes its own; one that was replaced in this very step may never do so. False: given up."""
        deadline = time.monotonic() + OTHERS_SECONDS
        missing = list(range(meta.world_size))
        while missing := [rank for rank in missing if not self._is_written(meta, history, rank)]:
            if files.place_of(self._root, meta.version).exists():
                return True
            if time.monotonic() > deadline:
                raise CheckpointError(f"rank {missing[0]} has not written its part of it")
            if given_up.wait(_POLL_SECONDS):
                return False
        return True

    def _is_written(self, meta: files.Meta, history: str, rank: int) -> bool:
        writes = rank in meta.parts.values()
        return files.has_private(self._root, meta.version, history, rank) and (
            not writes or files.has_part(self._root, meta.version, history, rank)
        )

    def _wait(self, seconds: float) -> bool:
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def _tell(self, text: str) -> None:
        self._runtime.say(text, text)

    # --- at the start ---------------------------------------------------------------------------------------------
    def resume(self) -> bool:
        """Start from the newest checkpoint, if there is one. Rank 0 says which.

        Where every rank holds all of the state, rank 0 reads it, and the others get it from rank 0; else each reads its
        own part. Raises CheckpointError if there are some and none can be used: starting anew would silently lose them.
        """
        if not self.every:
            return False
        runtime = self._runtime
        if runtime.rank == 0:
            start = self._load()
            runtime.store.set(runtime.generation, _KEY, msgspec.msgpack.encode(start))
        else:
            (answer,) = runtime.store.wait(runtime.generation, (_KEY,), runtime.settings.startup_timeout_seconds)
            start = msgspec.msgpack.decode(answer, type=_Start)
        if start.error:
            raise CheckpointError(start.error)
        if not start.version:
            return False
        if runtime.rank and self._assignment.shard:
            self._reader.read(self._root, start.version)
        elif runtime.rank:
            self._fetch(start)
        self._version = start.version
        self.take_private(start.version)
        return True

    def _load(self) -> _Start:
        errors = []
        try:
            files.prepare(self._root)
        except OSError as error:
            return _Start(0, error=f"no checkpoint can be written to {self._root}: {error.strerror or error}")
        versions = files.published(self._root)
        if versions and not self._resume:
            return _Start(
                0,
                error=f"{self._root} holds checkpoints of another run (the newest of step {versions[0]}), and "
                "checkpoint(resume=False) would mix its own with them: give it another directory",
            )
        for version in versions:
            try:
                meta = self._reader.read(self._root, version)
            except CheckpointError as error:
                errors.append(str(error))
                self._tell(f"the checkpoint of step {version} cannot be used: {error}")
                continue
            self._tell(f"training goes on from the checkpoint of step {version} in {self._root}")
            self._runtime.server.offer(Offer(self._runtime.generation, version, meta, self._state.replicated()))
            address = self._runtime.server.address
            return _Start(version, address.path, address.endpoint)
        if errors:
            text = f"no checkpoint in {self._root} can be used, the newest because {errors[0]}. Give it "
            text += "another directory, or move the damaged ones away: relight does not start anew over them by itself"
            return _Start(0, error=text)
        return _Start(0)

    def _fetch(self, start: _Start) -> None:
        """From rank 0, which has read it: each byte leaves the disk once. Raises RestoreError."""
        runtime, state = self._runtime, self._state
        client = runtime.fetcher(runtime.generation)
        address = Address(start.address, start.endpoint)
        fetched = client.fetch(runtime.generation, start.version, [address], state.destination().get)
        meta: dict[str, Any] = fetched.header.meta
        state.adopt(unflatten(fetched.header.tree, fetched.tensors), meta["private_buffers"])
        self._reader.adopt(start.version, meta)

    # --- in a recovery --------------------------------------------------------------------------------------------
    def seen(self) -> tuple[int, ...]:
        """Versions of complete checkpoints that this rank can read, newest first."""
        if not self.every:
            return ()
        return tuple(version for version in files.published(self._root) if version not in self._useless)

    def go_back(self, version: int) -> dict[str, Any]:
        """Read this rank's part in a recovery. Raises RestoreError; then this checkpoint is not named again."""
        try:
            return self._reader.read(self._root, version)
        except CheckpointError as error:
            self._useless.add(version)
            raise RestoreError(f"the checkpoint of step {version} cannot be used: {error}") from error

    def take_private(self, version: int) -> None:
        """What only this rank has, of the checkpoint that it went back to. Raises CheckpointError."""
        self._reader.take_private(self._root, version)

    def discard_after(self, version: int, distrust: int = -1) -> None:
        """Newer versions are undone: those of which a checkpoint was begun come again.

        Checkpoints of `distrust` and later ones may hold corrupted state; none of them may be read again. -1: all are
        good. Raises RestoreError if one is still being written, or cannot be removed.
        """
        self._given_up.set()  # what ranks write from now on is of another history
        if self._version > version:
            self._version = -1
        if distrust >= 0 and self.every:
            if not self._wait(OTHERS_SECONDS):
                raise RestoreError("a checkpoint of a version that is not trusted is still being written")
            self.discard(distrust)

    def discard(self, version: int) -> None:
        """Remove the checkpoints of this version and of later ones. Rank 0 does. Raises RestoreError."""
        if not self.every or self._runtime.rank != 0:
            return
        try:
            files.discard(self._root, version)
        except OSError as error:
            raise RestoreError(f"a checkpoint that is not trusted cannot be removed: {error}") from error


def _pieces(flat: Flat, prefix: str) -> list[Piece]:
    pieces = []
    for path, leaf, tensor in zip(flat.paths, flat.leaves, flat.tensors, strict=True):
        whole, offset = place_in_whole(leaf)
        pieces.append(Piece(prefix + path, spec_of(tensor), whole, offset))
    return pieces


def _digest(flat: Flat, tensors: list[torch.Tensor]) -> str:
    """That of the state whose copy this is."""
    reader = TensorReader(tensors)
    return digest_of(flat, [reader.digest(bucket) for bucket in plan_state(flat.specs)])


def _written_key(rank: int) -> str:
    """In the store of the generation, while a last checkpoint is written: that rank's files are complete."""
    return f"written/{rank}"
