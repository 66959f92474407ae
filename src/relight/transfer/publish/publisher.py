"""The sending side: keeps the IPC buffers, serves engines, runs one update at a time.

The loop's thread (`loop`) owns every connection and the decisions (`updates`, around the pure `plan.update`); the
writer's thread (`bucket_writer`) fills buckets when the publisher itself is the source. Other processes that hold the
same weights may join as sources (`SourceLink`), and then they take turns.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from relight.errors import MissingPartsError, TransferError, UsageError
from relight.transfer.io.buffers import create_buffers
from relight.transfer.io.channel import listen, socket_path
from relight.transfer.plan.division import Division, ShardSpec, divide
from relight.transfer.plan.manifest import Manifest
from relight.transfer.plan.plan import DEFAULT_BUCKET_BYTES, plan_buckets
from relight.transfer.plan.schedule import IPC_BUFFERS, Form
from relight.transfer.plan.update.result import SELF, Published
from relight.transfer.plan.update.update import Timeouts
from relight.transfer.publish.handle import Handle
from relight.transfer.publish.loop import PublisherLoop
from relight.transfer.publish.members import EngineState
from relight.transfer.publish.publication import prepare_publication
from relight.transfer.publish.source import Source
from relight.transfer.publish.updates import Lasting

_POLL_SECONDS = 0.01


def _until(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    end = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


class Publisher:
    """Puts weights into every connected engine, again and again, through the same buffers.

    Args:
        place: a directory (the socket is weights.sock in it) or the socket's own path. Engines name the same place.
        bucket_bytes: size of each of the two IPC buffers, which are all the memory that an update takes here.
        form: "serial" or "two-stage" (the default: the next bucket is written while engines reload the last).
        stall_timeout_seconds: an engine or a source that does not answer for so long is dropped.
        commit_timeout_seconds: the same for an engine that holds the whole version, and only has to finish requests
            that it is answering with the version before.
        source_timeout_seconds: the same for a source; default: as for an engine.
        on_notice: called with a sentence for people; from the loop's thread.

    Raises:
        TransferError: the place is taken or cannot be used, or there is no memory for the buffers.
        UsageError: a `bucket_bytes` that is no positive multiple of 64.
    """

    def __init__(
        self,
        place: str | Path,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        form: Form | str = Form.TWO_STAGE,
        stall_timeout_seconds: float = 10.0,
        commit_timeout_seconds: float = 120.0,
        source_timeout_seconds: float | None = None,
        on_notice: Callable[[str], None] | None = None,
    ) -> None:
        plan_buckets(Manifest(()), bucket_bytes)  # complains about a size that cannot be used
        self.path = socket_path(place)
        self._form = Form(form)
        if self._form is Form.THREE_STAGE:
            raise TransferError("in host memory there is no host-to-device copy to overlap: use two-stage or serial")
        listener = listen(self.path)
        try:
            buffers = create_buffers(IPC_BUFFERS, bucket_bytes)
        except TransferError:
            listener.close()
            self.path.unlink(missing_ok=True)
            raise
        self._bucket_bytes = bucket_bytes
        self._divided: tuple[list[tuple[str, ShardSpec]], Division] = (
            [],
            Division(Manifest(()), ()),
        )  # of the last update
        self._loop = PublisherLoop(
            self.path,
            listener,
            buffers,
            timeouts=Timeouts(stall_timeout_seconds, commit_timeout_seconds, source_timeout_seconds),
            form=self._form,
            bucket_bytes=bucket_bytes,
            on_notice=on_notice or (lambda _: None),
        )
        self._members, self._updates = self._loop.members, self._loop.updates

    def begin(
        self,
        source: Source,
        *,
        version: int,
        generation: int = 0,
        form: Form | None = None,
        hold: bool = False,
        confirmed: bool = True,
        only: Iterable[str] | None = None,
        held: ShardSpec | None = None,
    ) -> Handle:
        """Start an update of every engine that is connected, or of those named in `only`; returns at once.

        The source's tensors must not change until `Handle.wait_until_read`. `hold`: they never will, so engines
        that come later get this version at once. Not `confirmed`: buckets are moved, but no engine answers with
        the version before `Handle.confirm`. `held`: the parts that this source holds, if not all; other connected
        sources must hold the rest. Raises TransferError if an update is under way or `close` was called,
        UsageError for weights that cannot be moved, or of which no source holds some bytes.
        """
        handle = Handle()
        source.settle()
        if hold and held is not None:
            raise UsageError("weights that are divided over sources cannot be held for engines that come later")
        division = None if held is None else self._divide(held)
        publication = prepare_publication(
            next(self._updates.numbers),
            source,
            version,
            generation,
            form=form or self._form,
            handle=handle,
            only=only,
            buffer_bytes=self._bucket_bytes,
            confirmed=confirmed,
            division=division,
        )
        self._updates.submit(publication, Lasting(source, version, generation) if hold else None)
        return handle

    def publish(self, source: Source, *, version: int, generation: int = 0, form: Form | None = None) -> Published:
        """Start an update and wait for its end. Raises TransferError if no engine took the version."""
        result = self.begin(source, version=version, generation=generation, form=form).wait()
        assert result is not None
        if result.error:
            raise TransferError(f"version {version} was not published: {result.error}")
        return result

    def engines(self) -> tuple[EngineState, ...]:
        """Return every connected engine."""
        return tuple(
            EngineState(name=m.name, pid=m.channel.peer_pid, version=m.version, generation=m.generation)
            for m in self._members.engines()
        )

    def sources(self) -> tuple[str, ...]:
        """Return the names of the other processes that write buckets."""
        return tuple(member.name for member in self._members.sources())

    def lacking(self, held: ShardSpec, timeout_seconds: float = 0.0) -> str:
        """Say what an update of a source that holds only `held` still lacks; empty: connected sources hold all of it.

        Waits for the holders of the rest, for `timeout_seconds` at most. Raises UsageError if their parts do not fit.
        """
        why = ""

        def is_complete() -> bool:
            nonlocal why
            try:
                self._divide(held)
            except MissingPartsError as error:
                why = str(error)
                return False
            return True

        return "" if _until(is_complete, timeout_seconds) else why

    def _divide(self, own: ShardSpec) -> Division:
        others = [(member.name, member.held) for member in self._members.sources() if member.held is not None]
        held = [(SELF, own), *others]
        # The same weights go out again and again, and thousands of tensors take a while, even to be compared.
        if [(name, id(its)) for name, its in held] != [(name, id(its)) for name, its in self._divided[0]]:
            self._divided = held, divide(held)
        return self._divided[1]

    def wait_for_engines(self, count: int, timeout_seconds: float) -> bool:
        """Wait until `count` engines are connected. Returns False if the time ran out."""
        return _until(lambda: len(self.engines()) >= count, timeout_seconds)

    def wait_for_sources(self, count: int, timeout_seconds: float) -> bool:
        """Wait until `count` sources besides the publisher are connected. Returns False if the time ran out."""
        return _until(lambda: len(self.sources()) >= count, timeout_seconds)

    def close(self) -> None:
        """Stop at once; an update under way ends without effect. Removes the socket."""
        self._loop.close()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
