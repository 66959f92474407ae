"""The receiving side, inside the inference process: takes new weights in the background, all or nothing.

    receiver = relight.Receiver("runs/mine", model=model)
    ...
    with receiver.serving() as version:      # around each request, or each token
        model.generate(...)

*Staged* (the default): buckets are loaded into a second copy beside the live weights; when every bucket is there and
verified, the two are exchanged between two requests. *In place*: for engines whose memory allows no second copy.
The engine pauses, its `load` callback gets each tensor as it arrives, and it goes on when the last one is in. If the
update breaks off in the middle, the engine is *stale*: `serving` refuses, until an update has gone through.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from relight.errors import ProtocolError, StaleWeightsError, TransferError, UsageError
from relight.transfer.io.buffers import Buffer, close_buffers, open_buffers
from relight.transfer.io.channel import Channel, connect, socket_path
from relight.transfer.io.messages import (
    PROTOCOL_VERSION,
    AbandonUpdate,
    Begin,
    BucketLoaded,
    Committed,
    CommitUpdate,
    Dismissed,
    EngineHello,
    FromPublisher,
    LoadBucket,
    Ready,
    Refuse,
    Release,
    Welcome,
    WriteBucket,
)
from relight.transfer.plan.manifest import differences
from relight.transfer.plan.plan import Bucket, plan_buckets
from relight.transfer.plan.schedule import IPC_BUFFERS
from relight.transfer.publish.update_lock import UpdateLock
from relight.transfer.tensors.targets import InPlaceCallback, Pairs, StagedCallback, StagedTensors, Target
from relight.transfer.tensors.weights import digest_weights, own_tensors, weights_of

RETRY_SECONDS = 0.1


def _say_nothing(_: str) -> None:
    pass


class Receiver:
    """Keeps an engine's weights up to date with the published ones.

    Args:
        place: the publisher's directory (for a training job, its run directory). It need not exist yet.
        model: a module whose parameters and persistent buffers are replaced, or named tensors. Either this, or
        load: a callback that takes `(name, tensor)` pairs, such as a vLLM model's `load_weights`. It may keep a tensor
            when in place; a staged tensor is valid only during the call.
        mode: "staged" or "in-place" (see the module); in place needs `load`.
        staging: where the second copy of a `model` lies: on the "device" that it is on, or in "host" memory, from where
            an exchange needs a copy to the device, during which no request is served.
        pause: called before an update in place, for engines that have requests of their own in flight.
        resume: called after it.
        name: name of this engine, for people.
        on_notice: called with a sentence for people, from the receiver's thread.

    Raises:
        UsageError: arguments that do not go together, or a model that cannot be described.
    """

    def __init__(
        self,
        place: str | Path,
        *,
        model: torch.nn.Module | Mapping[str, torch.Tensor] | None = None,
        load: Callable[[Pairs], object] | None = None,
        mode: str = "staged",
        staging: str = "device",
        pause: Callable[[], object] | None = None,
        resume: Callable[[], object] | None = None,
        name: str | None = None,
        on_notice: Callable[[str], None] | None = None,
    ) -> None:
        if (model is None) == (load is None):
            raise UsageError("Receiver needs either model= or load=")
        if mode not in ("staged", "in-place"):
            raise UsageError(f'mode={mode!r}: "staged" or "in-place"')
        if staging not in ("device", "host"):
            raise UsageError(f'staging={staging!r}: "device" or "host"')
        if mode == "in-place" and load is None:
            raise UsageError('mode="in-place" needs load=: a model\'s own tensors can be exchanged, so stage them')
        self._place = Path(place)
        self._model = model
        self._target: Target
        if load is not None:
            self._target = StagedCallback(load) if mode == "staged" else InPlaceCallback(load)
        else:
            assert model is not None
            live = own_tensors(model) if isinstance(model, torch.nn.Module) else model
            self._target = StagedTensors(live, in_host_memory=staging == "host")
        self._pause, self._resume = pause or (lambda: None), resume or (lambda: None)
        self.name = name or f"engine-{os.getpid()}"
        self._on_notice = on_notice or _say_nothing
        self._update_lock = UpdateLock()
        self._changed = threading.Condition()
        self._version, self._generation = -1, 0
        self._stale = ""  # why, if it is
        self._closing = False
        self._paused = False  # nobody is let in to serve
        self._halted = False  # the engine's own `pause` was called, and not yet `resume`
        self._channel: Channel | None = None
        self._begun: Begin | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._buffers: tuple[Buffer, ...] = ()
        self._thread = threading.Thread(target=self._run, name="relight-receiver", daemon=True)
        self._thread.start()

    # --- for the engine -----------------------------------------------------------------------------------------
    @property
    def version(self) -> int:
        """The version of the weights that `serving` answers with; -1 before the first update."""
        return self._version

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def stale(self) -> str:
        """The reason why the engine must not answer, or nothing."""
        return self._stale

    @contextlib.contextmanager
    def serving(self) -> Iterator[int]:
        """Keep the weights unchanged while inside. Yields their version.

        -1 until the first update: the weights are those that the engine started with. `wait_for(0)` waits for it.

        Raises StaleWeightsError if an update in place broke off and none has gone through since.
        """
        with self._update_lock.serve():
            if self._stale:
                raise StaleWeightsError(self._stale)
            yield self._version

    def wait_for(self, version: int, timeout_seconds: float | None = None) -> bool:
        """Wait until the engine answers with `version` or a newer one. Returns False if the time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: self._version >= version and not self._stale, timeout_seconds)

    def digest(self) -> str:
        """Digest the live weights, as `relight.digest_weights` does at the trainer. Only with model=."""
        with self._update_lock.serve():
            if self._model is None:
                raise UsageError("with load= the receiver does not know where the engine keeps its weights")
            return digest_weights(weights_of(self._model) if isinstance(self._model, torch.nn.Module) else self._model)

    def close(self) -> None:
        """Stop listening; the weights stay. May be called while serving: an update that waits for that is abandoned."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._update_lock.end_updates()
        channel = self._channel
        if channel is not None:
            channel.break_off()
        self._thread.join()

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- its thread ---------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._closing:
            with contextlib.suppress(OSError, TransferError, ProtocolError):
                self._take_part(connect(socket_path(self._place)))
            with self._changed:  # also after a conversation: a publisher that dismisses is not asked in a loop
                self._changed.wait_for(lambda: self._closing, RETRY_SECONDS)

    def _take_part(self, connection: socket.socket) -> None:
        """From the first word to the last on one connection."""
        why = gone = "the publisher is gone"
        try:
            self._channel = Channel(connection, FromPublisher)
            self._converse(self._channel)
        except (OSError, ProtocolError, TransferError) as error:
            why = f"the connection to the publisher failed: {error}"
        except Exception as error:  # a defect of ours must not end the engine's updates for good
            why = f"the receiver failed ({error!r}); this is a defect in relight"
        finally:
            if not self._closing and why != gone:
                self._notify(why)
            self._break_off(why)
            channel, self._channel = self._channel, None
            if channel is not None:
                channel.close()
            connection.close()
            close_buffers(self._buffers)
            self._buffers = ()

    def _notify(self, what: str) -> None:
        with contextlib.suppress(Exception):  # somebody's broken print must not cost the engine its updates
            self._on_notice(f"{self.name}: {what}")

    def _converse(self, channel: Channel) -> None:
        if self._closing:
            return
        hello = EngineHello(
            protocol_version=PROTOCOL_VERSION,
            name=self.name,
            pid=os.getpid(),
            version=-1 if self._stale else self._version,
            generation=self._generation,
        )
        channel.send(hello)
        while (message := channel.receive()) is not None:
            match message:
                case Welcome():
                    descriptors, channel.descriptors = channel.descriptors, []
                    self._buffers = open_buffers(descriptors, message.buffer_bytes)
                    if len(self._buffers) != IPC_BUFFERS:
                        raise ProtocolError(f"{len(self._buffers)} buffers came instead of {IPC_BUFFERS}")
                    self._target.prepare()
                case Begin():
                    self._begin(channel, message)
                case LoadBucket():
                    self._load(channel, message)
                case CommitUpdate():
                    self._commit(channel, message)
                case AbandonUpdate():
                    if self._begun is not None and self._begun.update == message.update:
                        self._break_off(message.why)
                case Dismissed():
                    self._notify(f"dismissed by the publisher: {message.why}")
                case WriteBucket() | Release():
                    raise ProtocolError("an engine writes no buckets")

    def _begin(self, channel: Channel, begin: Begin) -> None:
        self._break_off("another update began")
        why = self._objection(begin)
        if not why:
            try:
                self._buckets = plan_buckets(begin.manifest, begin.bucket_bytes)
                self._target.begin(begin.manifest)
            except (TransferError, UsageError) as error:
                why = str(error)
        if why:
            self._notify(f"refused version {begin.version}: {why}")
            channel.send(Refuse(update=begin.update, why=why))
            return
        self._begun = begin
        channel.send(Ready(update=begin.update))

    def _objection(self, begin: Begin) -> str:
        if begin.generation < self._generation or begin.version < self._version:
            return (
                f"version {begin.version} of generation {begin.generation} is older than version {self._version} of "
                f"generation {self._generation}, which this engine has"
            )
        if begin.bucket_bytes > min((buffer.nbytes for buffer in self._buffers), default=0):
            return "the buckets are larger than the buffers"
        if self._target.wants is not None:
            return "; ".join(differences(begin.manifest, self._target.wants))
        return ""

    def _load(self, channel: Channel, order: LoadBucket) -> None:
        begun = self._begun
        if begun is None or begun.update != order.update:
            return
        if not (0 <= order.bucket < len(self._buckets) and 0 <= order.buffer < len(self._buffers)):
            raise ProtocolError(f"there is no bucket {order.bucket} or no buffer {order.buffer}")
        started_ns = time.monotonic_ns()
        bucket = self._buckets[order.bucket]
        try:
            intact = self._target.load(bucket, self._buffers[order.buffer].view) == order.digest
            if intact and self._target.in_place and not self._paused:
                self._enter_pause(channel, begun)
            if intact:
                self._target.accept(bucket)
        except Exception as error:  # the engine's own callbacks; no memory
            self._refuse(channel, begun, f"it could not take a bucket: {type(error).__name__}: {error}")
            return
        seconds = (time.monotonic_ns() - started_ns) / 1e9
        channel.send(BucketLoaded(update=begun.update, bucket=order.bucket, intact=intact, seconds=seconds))

    def _enter_pause(self, channel: Channel, begun: Begin) -> None:
        """In place: from here until the commit the weights are a mixture, and nobody may see them."""
        self._close_door()
        if channel.has_ended():  # after a long wait for the door, or a freeze; nothing is overwritten yet
            raise ConnectionResetError("the publisher went on without this engine")
        if not self._halted:
            self._pause()
            self._halted = True
        self._stale = "an update in place is not complete"
        channel.set_timeout(begun.patience_seconds or None)  # a frozen publisher must not keep the door closed

    def _close_door(self) -> None:
        self._paused = True
        if not self._update_lock.close_door():
            raise ConnectionResetError("the receiver was closed")

    def _commit(self, channel: Channel, order: CommitUpdate) -> None:
        begun = self._begun
        if begun is None or begun.update != order.update:
            return
        if not self._paused:
            self._close_door()
        try:
            self._target.commit()
        except Exception as error:
            self._stale = f"its weights could not be taken over: {type(error).__name__}: {error}"
            self._refuse(channel, begun, self._stale)
            return
        self._begun = None
        try:
            # Before anyone here sees the version: who waits for it may close this receiver at once.
            channel.send(Committed(update=begun.update, version=begun.version))
        finally:
            with self._changed:
                self._version, self._generation, self._stale = begun.version, begun.generation, ""
                self._changed.notify_all()
            self._leave_pause()

    def _refuse(self, channel: Channel, begun: Begin, why: str) -> None:
        self._notify(why)
        self._break_off(why)
        channel.send(Refuse(update=begun.update, why=why))

    def _break_off(self, why: str) -> None:
        """The update ends without effect; one in place leaves the engine stale, which it stays until the next."""
        if self._begun is None:
            return
        version, self._begun = self._begun.version, None
        self._target.abandon()
        if self._paused and self._target.in_place and self._stale:
            self._stale = f"an update in place to version {version} broke off: {why}"
            self._notify(self._stale)
        if self._paused:
            self._leave_pause()

    def _leave_pause(self) -> None:
        """Serve again; a stale engine lets nobody in, and says why."""
        self._paused = False
        if self._channel is not None:
            self._channel.set_timeout(None)
        try:
            if self._halted and not self._stale:
                self._halted = False
                self._resume()
        except Exception as error:  # the engine's own callback
            self._notify(f"its resume callback failed: {type(error).__name__}: {error}")
        finally:
            self._update_lock.open_door()
