"""Checkpoints of a training job: the last rung, for when no replica lives, or the job ends and is started again.

A finished version is never undone, so each rank may write its part of one as soon as it has committed it, without
asking anybody; the parts fit together because they are of the same version. Tensors are copied between two steps (one
pass over memory) and written by a thread while training goes on.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from relight.errors import CheckpointError, RestoreError, UsageError
from relight.training import checkpoint_files as files
from relight.training.batches import Batches
from relight.training.progress import Progress
from relight.training.runtime import Runtime
from relight.training.state import TrackedState
from relight.transfer.codec import Flat, decode_tree, digest_of, unflatten
from relight.transfer.fabric import Address
from relight.transfer.offer import Offer, plan_state
from relight.transfer.restore import destination_for
from relight.transfer.weights import TensorReader

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

    def __init__(self, runtime: Runtime, state: TrackedState, progress: Progress, batches: Batches) -> None:
        self._runtime = runtime
        self._state = state
        self._progress = progress
        self._batches = batches
        self._root = Path()
        self._every = 0
        self._keep = 0
        self._resume = True
        self._version = -1  # of the newest one that was begun here
        self._host: list[torch.Tensor] = []  # a copy of the state, used again by the next
        self._thread: threading.Thread | None = None

    def ask(self, directory: str | Path, every: int, keep: int, resume: bool) -> None:
        """See `Training.checkpoint`."""
        if every < 1 or keep < 1:
            raise UsageError(f"checkpoint(every={every}, keep={keep}): at least 1 each")
        self._root, self._every, self._keep, self._resume = Path(directory).absolute(), every, keep, resume

    # --- while training -------------------------------------------------------------------------------------------
    def between_steps(self) -> None:
        """The state is that of a finished version, and nobody writes: keep it if it is due."""
        version = self._progress.version
        if self._every and version and version % self._every == 0:
            self._begin(version)

    def finish(self) -> None:
        """All ranks hold the final version: it is the last checkpoint."""
        if not self._every:
            return
        self._wait(LAST_SECONDS)
        self._begin(self._progress.version)
        if not self._wait(LAST_SECONDS):
            self._tell(f"the last checkpoint was not written within {LAST_SECONDS:g} s")

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
        rank = self._runtime.rank
        try:
            work = self._write_all() if rank == 0 else lambda: None
        except CheckpointError as error:
            self._runtime.say("no checkpoints", f"no checkpoint can be written: {error}. Training goes on")
            return

        def write() -> None:
            try:
                if private is not None:
                    files.write_private(self._root, version, rank, private)
                work()
            except (OSError, CheckpointError) as error:  # a full disk, mostly
                self._tell(f"no checkpoint of step {version} in {self._root}: {error}. Training goes on")

        self._thread = threading.Thread(target=write, name="relight-checkpoint", daemon=True)
        self._thread.start()

    def _write_all(self) -> Callable[[], None]:
        """Copy the state; returns what writes the copy, and then makes the checkpoint complete."""
        flat = self._state.replicated()
        if len(set(flat.paths)) < len(flat.paths):
            raise CheckpointError("two tensors of the state have the same name; give them names of their own")
        if [(t.shape, t.dtype) for t in self._host] != [(t.shape, t.dtype) for t in flat.tensors]:
            self._host = [torch.empty(t.shape, dtype=t.dtype) for t in flat.tensors]
        for copy, tensor in zip(self._host, flat.tensors, strict=True):
            copy.copy_(tensor)
        version, ranks, host = self._progress.version, self._runtime.world_size, self._host
        meta = files.Meta(
            version=version,
            lineage=self._progress.lineage,
            world_size=ranks,
            layout=self._state.layout(),
            digest="",
            derivable=self._runtime.derivable(),
            private_buffers=[list(key) for key in sorted(self._state.private_buffers)],
            gradients_to_none=self._state.gradients_to_none,
            tree=flat.tree,
            paths=flat.paths,
            specs=flat.specs,
        )

        def work() -> None:
            files.write_tensors(self._root, version, dict(zip(flat.paths, host, strict=True)))
            self._await_others(version, ranks)
            files.publish(self._root, msgspec.structs.replace(meta, digest=_digest(flat, host)))
            files.prune(self._root, self._keep)

        return work

    def _await_others(self, version: int, ranks: int) -> None:
        """Every rank writes its own part; one that was replaced in this very step may never do so."""
        deadline = time.monotonic() + OTHERS_SECONDS
        missing = list(range(ranks))
        while missing := [rank for rank in missing if not files.has_private(self._root, version, rank)]:
            if files.place_of(self._root, version).exists():
                return
            if time.monotonic() > deadline:
                raise CheckpointError(f"rank {missing[0]} has not written its part of it")
            time.sleep(_POLL_SECONDS)

    def _wait(self, seconds: float) -> bool:
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def _tell(self, text: str) -> None:
        self._runtime.say(text, text)

    # --- at the start ---------------------------------------------------------------------------------------------
    def resume(self) -> bool:
        """Start from the newest checkpoint, if there is one: rank 0 reads it, and the others get it from rank 0.

        Raises CheckpointError if there are some and none can be used: starting anew would silently lose them.
        """
        if not self._every:
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
        if runtime.rank:
            self._fetch(start)
        self._version = start.version
        self._take_private(start.version)
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
                self._read(version)
            except CheckpointError as error:
                errors.append(str(error))
                self._tell(f"the checkpoint of step {version} cannot be used: {error}")
                continue
            self._tell(f"training goes on from the checkpoint of step {version} in {self._root}")
            address = self._runtime.server.address
            return _Start(version, address.path, address.endpoint)
        if errors:
            text = f"no checkpoint in {self._root} can be used, the newest because {errors[0]}. Remove it, or mend it"
            return _Start(0, error=text)
        return _Start(0)

    def _read(self, version: int) -> None:
        """From the disk into this rank, which serves it from then on. Raises CheckpointError."""
        runtime, state = self._runtime, self._state
        meta = files.read_meta(self._root, version)
        if meta.layout != state.layout():
            raise CheckpointError("it is of another model or optimizer (names, shapes or settings differ)")
        if meta.world_size != runtime.world_size and not meta.derivable:
            raise CheckpointError(
                f"it was written by {meta.world_size} ranks, each with something of its own (statistics of BatchNorm, "
                f"the place in the data, random streams), and cannot be divided among {runtime.world_size}"
            )
        own = state.destination()
        try:
            tensors = [destination_for(own.get(p), spec) for p, spec in zip(meta.paths, meta.specs, strict=True)]
        except RestoreError as error:
            raise CheckpointError(str(error)) from error
        files.read_tensors(self._root, version, dict(zip(meta.paths, tensors, strict=True)))
        state.adopt(unflatten(meta.tree, tensors), meta.private_buffers)
        if (found := state.digest()) != meta.digest:
            raise CheckpointError(f"its digest is {found}, and was {meta.digest} when it was written")
        self._adopt(meta.version, meta.lineage, meta.gradients_to_none)
        header = {
            "lineage": meta.lineage,
            "private_buffers": meta.private_buffers,
            "gradients_to_none": meta.gradients_to_none,
        }
        runtime.server.offer(Offer(runtime.generation, version, header, state.replicated()))

    def _fetch(self, start: _Start) -> None:
        """From rank 0, which has read it: each byte leaves the disk once. Raises RestoreError."""
        runtime, state = self._runtime, self._state
        client = runtime.fetcher(runtime.generation)
        address = Address(start.address, start.endpoint)
        fetched = client.fetch(runtime.generation, start.version, [address], state.destination().get)
        meta: dict[str, Any] = fetched.header.meta
        state.adopt(unflatten(fetched.header.tree, fetched.tensors), meta["private_buffers"])
        self._adopt(start.version, meta["lineage"], meta["gradients_to_none"])

    def _adopt(self, version: int, lineage: str, gradients_to_none: bool) -> None:
        self._progress.version, self._progress.lineage = version, lineage
        self._state.gradients_to_none = gradients_to_none

    def _take_private(self, version: int) -> None:
        """What only this rank has; nothing, if ranks have nothing of their own and are more than there were."""
        runtime = self._runtime
        if self._runtime.derivable() and not self._state.private_buffers:
            self._batches.start(version, runtime.rank)
            return
        payload = files.read_private(self._root, version, runtime.rank)
        runtime.page.write_private(version, payload)
        self._state.adopt_private(decode_tree(payload))
        self._batches.restore(version, runtime.rank)


def _digest(flat: Flat, tensors: list[torch.Tensor]) -> str:
    """That of the state whose copy this is."""
    reader = TensorReader(tensors)
    return digest_of(flat, [reader.digest(bucket) for bucket in plan_state(flat.specs)])
