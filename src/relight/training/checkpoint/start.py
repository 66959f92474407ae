"""The start of a job from a checkpoint: rank 0 chooses it, and the others follow."""

from typing import Any

import msgspec

from relight.errors import CheckpointError
from relight.training.checkpoint import files
from relight.training.checkpoint.reader import CheckpointReader
from relight.training.checkpoint.schedule import CheckpointSchedule
from relight.training.process.runtime import Runtime
from relight.training.state.assignment import Assignment
from relight.training.state.tracked import TrackedState
from relight.transfer.io.codec import unflatten
from relight.transfer.restore.fabric import Address
from relight.transfer.restore.offer import Offer

_KEY = "checkpoint"  # in the store of the generation: the checkpoint that the job starts from


class _Choice(msgspec.Struct, frozen=True):
    """The checkpoint that rank 0 has chosen."""

    version: int  # 0: there is no checkpoint
    address: str = ""
    endpoint: str = ""
    error: str = ""


class CheckpointStart:
    """Brings this rank to the newest checkpoint that can be read."""

    def __init__(self, runtime: Runtime, state: TrackedState, reader: CheckpointReader, assignment: Assignment) -> None:
        self._runtime = runtime
        self._state = state
        self._reader = reader
        self._assignment = assignment

    def run(self, schedule: CheckpointSchedule) -> int:
        """Return the version that this rank starts from; 0 if there is no checkpoint.

        Where every rank holds all of the state, rank 0 reads it, and the others get it from rank 0; else each reads its
        own part. Raises CheckpointError if there are some and none can be used: starting anew would silently lose them.
        """
        runtime = self._runtime
        if runtime.rank == 0:
            choice = self._choose(schedule)
            runtime.store.set(runtime.generation, _KEY, msgspec.msgpack.encode(choice))
        else:
            (answer,) = runtime.store.wait(runtime.generation, (_KEY,), runtime.settings.startup_timeout_seconds)
            choice = msgspec.msgpack.decode(answer, type=_Choice)
        if choice.error:
            raise CheckpointError(choice.error)
        if choice.version and runtime.rank and self._assignment.shard:
            self._reader.read(schedule.root, choice.version)
        elif choice.version and runtime.rank:
            self._fetch(choice)
        return choice.version

    def _choose(self, schedule: CheckpointSchedule) -> _Choice:
        """Read the newest checkpoint that can be read, and serve it."""
        root, errors = schedule.root, []
        try:
            files.prepare(root)
        except OSError as error:
            return _Choice(0, error=f"no checkpoint can be written to {root}: {error.strerror or error}")
        versions = files.published(root)
        if versions and not schedule.resume:
            return _Choice(
                0,
                error=f"{root} holds checkpoints of another run (the newest of step {versions[0]}), and "
                "checkpoint(resume=False) would mix its own with them: give it another directory",
            )
        for version in versions:
            try:
                meta = self._reader.read(root, version)
            except CheckpointError as error:
                errors.append(str(error))
                self._say(f"the checkpoint of step {version} cannot be used: {error}")
                continue
            self._say(f"training goes on from the checkpoint of step {version} in {root}")
            self._runtime.restores.server.offer(
                Offer(self._runtime.generation, version, meta, self._state.replicated())
            )
            address = self._runtime.restores.server.address
            return _Choice(version, address.path, address.endpoint)
        if errors:
            text = f"no checkpoint in {root} can be used, the newest because {errors[0]}. Give it "
            text += "another directory, or move the damaged ones away: relight does not start anew over them by itself"
            return _Choice(0, error=text)
        return _Choice(0)

    def _fetch(self, choice: _Choice) -> None:
        """Copy it from rank 0, so that each byte leaves the disk once. Raises RestoreError."""
        runtime, state = self._runtime, self._state
        client = runtime.restores.fetcher(runtime.generation)
        address = Address(choice.address, choice.endpoint)
        fetched = client.fetch(runtime.generation, choice.version, [address], state.destination().get)
        meta: dict[str, Any] = fetched.header.meta
        if why := state.adopt(unflatten(fetched.header.tree, fetched.tensors), meta):
            runtime.notices.doubt(why)
        self._reader.adopt(choice.version, meta)

    def _say(self, text: str) -> None:
        self._runtime.notices.say(text, text)
