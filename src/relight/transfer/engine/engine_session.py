"""One connection of an engine to a publisher, from its greeting to its end. Runs on the receiver's thread."""

import os
import time
from collections.abc import Callable

from relight.errors import ProtocolError, TransferError, UsageError
from relight.transfer.engine.served_weights import ServedWeights
from relight.transfer.io import messages as msg
from relight.transfer.io.buffers import Buffer, close_buffers, open_buffers
from relight.transfer.io.channel import Channel
from relight.transfer.io.lent import BorrowedMemory, number_of
from relight.transfer.plan.manifest import differences
from relight.transfer.plan.plan import Bucket, offsets_of, plan_buckets
from relight.transfer.plan.schedule import IPC_BUFFERS
from relight.transfer.tensors.lent_weights import place_of
from relight.transfer.tensors.targets import Target


class EngineSession:
    """Takes the updates of one publisher into `target`, all or nothing."""

    def __init__(
        self, channel: Channel, target: Target, served: ServedWeights, name: str, notify: Callable[[str], None]
    ) -> None:
        """`name`: of the engine, for people. `notify` is called with sentences for people."""
        self._channel = channel
        self._target = target
        self._served = served
        self._name = name
        self._notify = notify
        self._begun: msg.Begin | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._buffers: tuple[Buffer, ...] = ()
        self._borrowed: BorrowedMemory | None = None
        self._offsets: list[int] = []  # of tensors in borrowed memory

    def run(self) -> None:
        """Take updates until the publisher ends the connection. Raises OSError, ProtocolError or TransferError."""
        hello = msg.EngineHello(
            protocol_version=msg.PROTOCOL_VERSION,
            name=self._name,
            pid=os.getpid(),
            version=-1 if self._served.stale else self._served.version,
            generation=self._served.generation,
            borrows=not self._target.needs_buffers,
        )
        self._channel.send(hello)
        while (message := self._channel.receive()) is not None:
            match message:
                case msg.Welcome():
                    self._open_buffers(message)
                    self._target.prepare()
                case msg.Begin():
                    self._begin(message)
                case msg.LoadBucket():
                    self._load(message)
                case msg.CommitUpdate():
                    self._commit(message)
                case msg.AbandonUpdate():
                    if self._begun is not None and self._begun.update == message.update:
                        self._break_off(message.why)
                case msg.Dismissed():
                    self._notify(f"dismissed by the publisher: {message.why}")
                case msg.WriteBucket() | msg.Release():
                    raise ProtocolError("an engine writes no buckets")

    def end(self, why: str) -> None:
        """End the update under way without effect, and unmap the buffers."""
        self._break_off(why)
        close_buffers(self._buffers)
        self._buffers = ()
        self._give_back()

    def _open_buffers(self, welcome: msg.Welcome) -> None:
        descriptors, self._channel.descriptors = self._channel.descriptors, []
        self._buffers = open_buffers(descriptors, welcome.buffer_bytes)
        if len(self._buffers) != IPC_BUFFERS:
            raise ProtocolError(f"{len(self._buffers)} buffers came instead of {IPC_BUFFERS}")

    def _begin(self, begin: msg.Begin) -> None:
        self._break_off("another update began")
        unable = self._target.import_buffers(begin) if begin.device else self._borrow(begin)
        why = self._objection(begin)
        if not why:
            try:
                self._buckets = plan_buckets(begin.manifest, begin.bucket_bytes)
                self._target.begin_update(begin.manifest)
            except (TransferError, UsageError) as error:
                why = str(error)
        if why:
            self._notify(f"refused version {begin.version}: {why}")
            self._channel.send(msg.Refuse(update=begin.update, why=why))
            return
        self._begun = begin
        self._channel.send(msg.Ready(update=begin.update, unable=unable))

    def _borrow(self, begin: msg.Begin) -> str:
        """Map memory that is lent, if it is not mapped already; return why it cannot be read, empty if it can."""
        descriptors, self._channel.descriptors = self._channel.descriptors, []
        if not begin.lent_bytes or len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            return self._target.needs_buffers or "nothing came to be read"
        self._offsets, needed = offsets_of(begin.manifest)
        known = self._borrowed
        if known is not None and (known.number, known.nbytes) == (number_of(descriptors[0]), begin.lent_bytes):
            os.close(descriptors[0])
        else:
            self._give_back()
            try:
                known = self._borrowed = BorrowedMemory(descriptors[0], begin.lent_bytes)
            except TransferError as error:
                self._notify(f"updates come through buffers, with a copy more: {error}")
                return str(error)
        return "" if known.nbytes >= needed and not begin.manifest.parts else "the memory that is lent is too small"

    def _give_back(self) -> None:
        """Nothing of the memory that was lent is read any more."""
        if self._borrowed is not None:
            self._borrowed.close()
            self._borrowed = None

    def _objection(self, begin: msg.Begin) -> str:
        own = self._served
        if begin.generation < own.generation or begin.version < own.version:
            return (
                f"version {begin.version} of generation {begin.generation} is older than version {own.version} of "
                f"generation {own.generation}, which this engine has"
            )
        if begin.bucket_bytes > min((buffer.nbytes for buffer in self._buffers), default=0):
            return "the buckets are larger than the buffers"
        if self._target.wants is not None:
            return "; ".join(differences(begin.manifest, self._target.wants))
        return ""

    def _load(self, order: msg.LoadBucket) -> None:
        begun = self._begun
        if begun is None or begun.update != order.update:
            return
        if not (0 <= order.bucket < len(self._buckets) and 0 <= order.buffer < len(self._buffers)):
            raise ProtocolError(f"there is no bucket {order.bucket} or no buffer {order.buffer}")
        started_ns = time.monotonic_ns()
        bucket = self._buckets[order.bucket]
        try:
            intact = self._arrives(bucket, order)
            if intact and self._target.in_place and self._served.is_admitting:
                self._begin_in_place(begun)
            if intact:
                self._target.accept(bucket)
        except Exception as error:  # the engine's own callbacks; no memory
            self._refuse(begun, f"it could not take a bucket: {type(error).__name__}: {error}")
            return
        seconds = (time.monotonic_ns() - started_ns) / 1e9
        self._channel.send(msg.BucketLoaded(update=begun.update, bucket=order.bucket, intact=intact, seconds=seconds))

    def _arrives(self, bucket: Bucket, order: msg.LoadBucket) -> bool:
        """Load a bucket; return whether it has the digest of its source."""
        if order.is_elsewhere and self._begun is not None and self._begun.device:
            return self._target.load_on_device(bucket, order.buffer) == order.digest
        return self._target.load(bucket, self._view_of(bucket, order)) == order.digest

    def _view_of(self, bucket: Bucket, order: msg.LoadBucket) -> memoryview:
        """Return the host memory in which the bucket lies."""
        if not order.is_elsewhere:
            return self._buffers[order.buffer].view
        if self._borrowed is None:
            raise TransferError("a bucket is lent, and its memory is not mapped")
        start = place_of(bucket, self._offsets)
        return self._borrowed.view[start : start + bucket.nbytes]

    def _begin_in_place(self, begun: msg.Begin) -> None:
        """From here until the commit the weights are a mixture, which no request may see."""
        self._served.stop_requests()
        if self._channel.has_ended():  # after a long wait for requests, or a freeze; nothing is overwritten yet
            raise ConnectionResetError("the publisher continued without this engine")
        self._served.pause_engine()
        self._channel.set_timeout(begun.patience_seconds or None)  # a frozen publisher must not keep requests out

    def _commit(self, order: msg.CommitUpdate) -> None:
        begun = self._begun
        if begun is None or begun.update != order.update:
            return
        if self._served.is_admitting:
            self._served.stop_requests()
        try:
            self._target.commit()
        except Exception as error:
            self._served.stale = f"its weights could not be taken over: {type(error).__name__}: {error}"
            self._refuse(begun, self._served.stale)
            return
        self._begun = None
        try:
            # Before the version can be seen here: a caller that waits for it may close this receiver at once.
            self._channel.send(msg.Committed(update=begun.update, version=begun.version))
        finally:
            self._served.set_version(begun.version, begun.generation)
            self._admit_requests()

    def _refuse(self, begun: msg.Begin, why: str) -> None:
        self._notify(why)
        self._break_off(why)
        self._channel.send(msg.Refuse(update=begun.update, why=why))

    def _break_off(self, why: str) -> None:
        """End the update without effect; one in place leaves the engine stale until the next update."""
        if self._begun is None:
            return
        version, self._begun = self._begun.version, None
        self._target.abandon()
        if self._served.is_admitting:
            return
        if self._target.in_place and self._served.stale:
            self._served.stale = f"an update in place to version {version} broke off: {why}"
            self._notify(self._served.stale)
        self._admit_requests()

    def _admit_requests(self) -> None:
        self._channel.set_timeout(None)
        try:
            self._served.admit_requests()
        except Exception as error:  # the engine's own callback
            self._notify(f"its resume callback failed: {type(error).__name__}: {error}")
