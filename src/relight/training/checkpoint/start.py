"""The start of a job from a checkpoint: rank 0 proposes one, every rank reads its part, and all begin, or none does."""

from collections.abc import Sequence
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


class _Choice(msgspec.Struct, frozen=True):
    """A checkpoint that rank 0 has read and proposes, or, `settled`, the one that every rank has read."""

    version: int  # 0: there is no checkpoint
    settled: bool = False
    private: bool = False  # each rank has a part that no other one has
    address: str = ""
    endpoint: str = ""
    error: str = ""


class CheckpointStart:
    """Brings this rank to the newest checkpoint of which every rank can read its part."""

    def __init__(self, runtime: Runtime, state: TrackedState, reader: CheckpointReader, assignment: Assignment) -> None:
        self._runtime = runtime
        self._state = state
        self._reader = reader
        self._assignment = assignment
        self._turn = 0  # of what rank 0 has said, and the others have heard

    def run(self, schedule: CheckpointSchedule) -> int:
        """Return the version that this rank starts from; 0 if there is no checkpoint.

        Where every rank holds all of the state, rank 0 reads it, and the others get it from rank 0; else each reads its
        own part. Raises CheckpointError if there are some and none can be used: starting anew would silently lose them.
        """
        self._turn = 0
        if self._runtime.rank:
            choice = self._follow(schedule)
        else:
            choice = self._choose(schedule)
            self._tell(choice)
        if choice.error:
            raise CheckpointError(choice.error)
        return choice.version

    # --- on rank 0 --------------------------------------------------------------------------------------------------
    def _choose(self, schedule: CheckpointSchedule) -> _Choice:
        """Propose one after the other, the newest first, until every rank has read its part."""
        root, errors = schedule.root, dict[int, str]()
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
                self._propose(schedule, version)
            except CheckpointError as error:
                errors[version] = str(error)
                self._say(f"the checkpoint of step {version} cannot be used: {error}")
                continue
            self._set_aside(schedule, list(errors))
            self._say(f"training goes on from the checkpoint of step {version} in {root}")
            return _Choice(version, settled=True)
        if errors:
            text = f"no checkpoint in {root} can be used, the newest because {errors[versions[0]]}. Give it "
            text += "another directory, or move the damaged ones away: relight does not start anew over them by itself"
            return _Choice(0, error=text)
        return _Choice(0)

    def _propose(self, schedule: CheckpointSchedule, version: int) -> None:
        """Read it, serve it, and wait for the others. Raises CheckpointError if a rank cannot read its part."""
        runtime, root = self._runtime, schedule.root
        meta = self._reader.read(root, version)
        runtime.restores.server.offer(Offer(runtime.generation, version, meta, self._state.replica.flat()))
        address = runtime.restores.server.address
        private = not files.read_meta(root, version).derivable
        if private:
            files.read_private(root, version, runtime.rank)
        self._tell(_Choice(version, private=private, address=address.path, endpoint=address.endpoint))
        others = range(1, runtime.world_size)
        keys = tuple(_read_key(self._turn, rank) for rank in others)
        answers = runtime.store.wait(runtime.generation, keys, runtime.settings.startup_timeout_seconds) if keys else ()
        pairs = zip(others, answers, strict=True)
        if refusals := [f"rank {rank}: {answer.decode()}" for rank, answer in pairs if answer]:
            raise CheckpointError("; ".join(refusals))

    def _tell(self, choice: _Choice) -> None:
        self._turn += 1
        self._runtime.store.set(self._runtime.generation, _key(self._turn), msgspec.msgpack.encode(choice))

    def _set_aside(self, schedule: CheckpointSchedule, versions: Sequence[int]) -> None:
        """Make place for the checkpoints of these steps, which come again."""
        for version in versions:
            try:
                aside = files.set_aside(schedule.root, version)
            except OSError as error:
                self._say(f"the checkpoint of step {version} stays, and is not written again: {error}")
            else:
                self._say(f"the checkpoint of step {version} is kept as {aside.name}")

    # --- on the others ----------------------------------------------------------------------------------------------
    def _follow(self, schedule: CheckpointSchedule) -> _Choice:
        """Read this rank's part of each one that is proposed, and say whether it could be read."""
        runtime = self._runtime
        while True:
            self._turn += 1
            keys, patience = (_key(self._turn),), runtime.settings.startup_timeout_seconds
            (answer,) = runtime.store.wait(runtime.generation, keys, patience)
            choice = msgspec.msgpack.decode(answer, type=_Choice)
            if choice.settled or not choice.version:
                return choice
            error = ""
            try:
                self._read(schedule, choice)
            except CheckpointError as refusal:
                error = str(refusal)
            runtime.store.set(runtime.generation, _read_key(self._turn, runtime.rank), error.encode())

    def _read(self, schedule: CheckpointSchedule, choice: _Choice) -> None:
        if choice.private:  # before the fetch, which is for nothing without it
            files.read_private(schedule.root, choice.version, self._runtime.rank)
        if self._assignment.shard:
            self._reader.read(schedule.root, choice.version)
        else:
            self._fetch(choice)

    def _fetch(self, choice: _Choice) -> None:
        """Copy it from rank 0, so that each byte leaves the disk once. Raises RestoreError."""
        runtime, state = self._runtime, self._state
        client = runtime.restores.fetcher(runtime.generation)
        address = Address(choice.address, choice.endpoint)
        fetched = client.fetch(runtime.generation, choice.version, [address], state.replica.destination().get)
        meta: dict[str, Any] = fetched.header.meta
        if why := state.adopt(unflatten(fetched.header.tree, fetched.tensors), meta):
            runtime.notices.doubt(why)
        self._reader.adopt(choice.version, meta)

    def _say(self, text: str) -> None:
        self._runtime.notices.say(text, text)


def _key(turn: int) -> str:
    """Key in the store of the generation: what rank 0 says."""
    return f"checkpoint/{turn}"


def _read_key(turn: int, rank: int) -> str:
    """Key of a rank's answer: why it cannot read its part; empty if it has."""
    return f"checkpoint/{turn}/{rank}"
