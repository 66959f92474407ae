"""The receiving side, inside the inference process: takes new weights in the background, all or nothing.

    receiver = relight.Receiver("runs/mine", model=model)
    ...
    with receiver.serving() as version:      # around each request, or each token
        model.generate(...)

*Staged* (the default): buckets are loaded into a second copy beside the live weights; when every bucket is there and
verified, the two are exchanged between two requests. *In place*: for engines whose memory allows no second copy.
The engine pauses, its `load` callback gets each tensor as it arrives, and it resumes after the last one. If the
update breaks off in the middle, the engine is *stale*: `serving` refuses, until an update has gone through.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from relight.errors import ProtocolError, TransferError, UsageError
from relight.transfer.engine.engine_session import EngineSession
from relight.transfer.engine.served_weights import ServedWeights
from relight.transfer.io.channel import Channel, connect, socket_path
from relight.transfer.io.messages import FromPublisher
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
        self._place = Path(place)
        self._model = model
        self._target = make_target(model, load, mode, staging)
        self._served = ServedWeights(pause or (lambda: None), resume or (lambda: None))
        self.name = name or f"engine-{os.getpid()}"
        self._on_notice = on_notice or _say_nothing
        self._channel: Channel | None = None
        self._thread = threading.Thread(target=self._run, name="relight-receiver", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """Version of the weights that `serving` answers with; -1 before the first update."""
        return self._served.version

    @property
    def generation(self) -> int:
        """Generation of the job that published that version."""
        return self._served.generation

    @property
    def stale(self) -> str:
        """The reason why the engine must not answer; empty: it may."""
        return self._served.stale

    @contextlib.contextmanager
    def serving(self) -> Iterator[int]:
        """Keep the weights as they are inside the block; yield their version.

        -1 until the first update: the weights are those that the engine started with. `wait_for(0)` waits for it.

        Raises StaleWeightsError if an update in place broke off and none has gone through since.
        """
        with self._served.serving() as version:
            yield version

    def wait_for(self, version: int, timeout_seconds: float | None = None) -> bool:
        """Wait until the engine answers with `version` or a newer one. Returns False if the time ran out."""
        return self._served.wait_for(version, timeout_seconds)

    def digest(self) -> str:
        """Return the digest of the live weights, as `relight.digest_weights` gives it at the trainer. Needs model=."""
        if self._model is None:
            raise UsageError("with load= the receiver does not know where the engine keeps its weights")
        with self._served.reading():
            return digest_weights(weights_of(self._model) if isinstance(self._model, torch.nn.Module) else self._model)

    def close(self) -> None:
        """Stop receiving; the weights stay. May be called while serving: an update that waits for that is given up."""
        self._served.close()
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
        while not self._served.is_closed:
            with contextlib.suppress(OSError, TransferError, ProtocolError):
                self._serve_connection(connect(socket_path(self._place)))
            # Also after a connection: a publisher that dismisses this engine is not asked again at once.
            self._served.wait_until_closed(RETRY_SECONDS)

    def _serve_connection(self, connection: socket.socket) -> None:
        why = gone = "the publisher is gone"
        session: EngineSession | None = None
        try:
            self._channel = Channel(connection, FromPublisher)
            session = EngineSession(self._channel, self._target, self._served, self.name, self._notify)
            if not self._served.is_closed:
                session.run()
        except (OSError, ProtocolError, TransferError) as error:
            why = f"the connection to the publisher failed: {error}"
        except Exception as error:  # a defect of relight must not end the engine's updates for good
            why = f"the receiver failed ({error!r}); this is a defect in relight"
        finally:
            if not self._served.is_closed and why != gone:
                self._notify(why)
            if session is not None:
                session.end(why)
            channel, self._channel = self._channel, None
            if channel is not None:
                channel.close()
            connection.close()

    def _notify(self, text: str) -> None:
        with contextlib.suppress(Exception):  # an error in the owner's callback must not cost the engine its updates
            self._on_notice(f"{self.name}: {text}")


def make_target(
    model: torch.nn.Module | Mapping[str, torch.Tensor] | None,
    load: Callable[[Pairs], object] | None,
    mode: str,
    staging: str,
) -> Target:
    """Return where the buckets go; see `Receiver`. Raises UsageError."""
    if (model is None) == (load is None):
        raise UsageError("Receiver needs either model= or load=")
    if mode not in ("staged", "in-place"):
        raise UsageError(f'mode={mode!r}: "staged" or "in-place"')
    if staging not in ("device", "host"):
        raise UsageError(f'staging={staging!r}: "device" or "host"')
    if mode == "in-place" and load is None:
        raise UsageError('mode="in-place" needs load=: a model\'s own tensors can be exchanged, so stage them')
    if load is not None:
        return StagedCallback(load) if mode == "staged" else InPlaceCallback(load)
    assert model is not None
    live = own_tensors(model) if isinstance(model, torch.nn.Module) else model
    return StagedTensors(live, in_host_memory=staging == "host")
