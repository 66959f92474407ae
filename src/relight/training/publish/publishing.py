"""Publishing from a training job: the weights of a version go out while the next step computes.

Between two writes parameters do not change, so buckets are read where the parameters lie, beside forward and
backward, and no copy of the model is made. The next write waits until the last bucket has been read.

Rank 0 publishes. If the weights are divided over ranks (FSDP2, tensor parallelism, a pipeline), every rank lends it the
parts that it holds (`lending`), and no rank ever holds the whole. An engine may answer with a version only once every
rank is known to hold it: the barrier of the next step proves that, and so does a recovery that resumes at it. Until
then the engines keep it staged.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from relight.errors import PlaceTakenError, RelightError, StepInterrupted, UsageError
from relight.training.process.runtime import Runtime
from relight.training.publish.lent_parts import LentParts
from relight.training.publish.reporter import PublishReporter
from relight.training.publish.weights import Rename, Weights
from relight.training.state.tracked import TrackedState
from relight.transfer.plan.plan import DEFAULT_BUCKET_BYTES
from relight.transfer.publish.handle import Handle
from relight.transfer.publish.publisher import Publisher
from relight.transfer.publish.source import Source
from relight.transfer.relay.remote_source import SourceBridge
from relight.transfer.tensors.weights import PartSource
from relight.wire.settings import host_address

JOIN_SECONDS = 0.01  # between two looks at whether a recovery has begun meanwhile
LAST_SECONDS = 60.0  # for engines to take the final version before the job ends
TAKEN_SECONDS = 10.0  # for rank 0's predecessor, whose memory is being freed, to let go of the socket
BRIDGE_SECONDS = 1.0  # for rank 0 to say where sources of other hosts are let in
BRIDGE_KEY = "publish/bridge"  # of the rendezvous store
COMING_SECONDS = 2.0  # for engines to find a publisher that was opened just now, in place of one that died


class SocketTaken:
    """The time for which another process has held the socket: rank 0's predecessor releases it by itself."""

    def __init__(self) -> None:
        self._since: float | None = None

    def lasts(self, now: float) -> bool:
        """Note that it is held, at this time in seconds. Returns whether that has lasted long enough to be reported."""
        self._since = now if self._since is None else self._since
        return now - self._since > TAKEN_SECONDS

    def is_over(self) -> None:
        """Note that it is not held."""
        self._since = None


class Publishing:
    """Carries out `Training.publish`. Nothing here can fail the training; errors are reported."""

    def __init__(self, runtime: Runtime, state: TrackedState) -> None:
        self._runtime = runtime
        self._state = state
        self._worker = runtime.worker
        self._every = 0
        self._requested = False
        # modules, and what engines call their tensors
        self._chosen: tuple[tuple[str, ...], Rename | None] | None = None
        self._weights: Weights | None = None
        self._parts: PartSource | None = None  # of divided weights: what this rank holds
        self._lent_parts: LentParts | None = None  # on other ranks than 0
        self._stall_timeout_seconds = 0.0
        self._publisher: Publisher | None = None
        self._bridge: SourceBridge | None = None  # for ranks on other hosts
        self._bridge_announced_in = 0  # the generation in which its address was announced
        self._opened = 0.0
        self._taken = SocketTaken()
        self._handle: Handle | None = None
        self._version = -1  # of the update under way, or the last one
        self._offered: set[str] = set()  # engines that were asked to take it
        self._reporter = PublishReporter(runtime)

    def ask(self, every: int | None, model: str | None, rename: Rename | None, stall_timeout_seconds: float) -> None:
        """See `Training.publish`."""
        if every is not None and every < 1:
            raise UsageError(f"publish(every={every}): at least 1, or leave it out to publish once")
        self._choose(_published_modules(self._state, model), rename)
        self._stall_timeout_seconds = stall_timeout_seconds
        if every is None:
            self._requested = True
        else:
            self._every = every

    def _choose(self, names: tuple[str, ...], rename: Rename | None) -> None:
        """These modules are to be published from now on."""
        if self._chosen == (names, rename):
            return
        self._chosen = (names, rename)
        self._weights, self._parts = Weights(self._state, names, rename), None
        if self._weights.is_divided and not self._runtime.is_standby:
            self._weights.parts(self._runtime.rank)  # complains now, not in the middle of training
        if self._lent_parts is not None:  # of what was published before
            self._lent_parts.stop()
            self._lent_parts = None

    def between_steps(self) -> None:
        """The state is that of a finished version, and no rank writes: publish it if it is due."""
        if not (self._every or self._requested) or self._runtime.is_standby:
            return
        if self._runtime.rank != 0:
            with self._reporting():
                self._lend()
            return
        with self._reporting():
            publisher = self._open()
            if self._is_under_way(0.0):
                return
            engines = {engine.name: engine.version for engine in publisher.engines()}
            due = self._requested or (self._every and self._worker.version % self._every == 0)
            # After a recovery that went back over versions, engines may have newer ones than the ranks: they keep them.
            newer = {name for name, version in engines.items() if version > self._worker.version}
            if due and engines.keys() - newer and self._version != self._worker.version:
                if self._is_lacking(publisher, 0.0):
                    self._requested = True  # at the next boundary, if they have come
                    return
                self._offered = set(engines)
                self._begin(publisher, self._offered - newer if newer else None)
                self._requested = False
                return
            # Who came late, or fell out, gets the newest weights by itself.
            late = {name for name, version in engines.items() if version < self._version} - self._offered
            if late and not self._is_lacking(publisher, 0.0):
                self._offered |= late
                self._begin(publisher, late)

    def confirm(self, version: int) -> None:
        """Every rank is known to hold `version`."""
        if self._handle is not None and version >= self._version:
            self._handle.confirm()

    def before_barrier(self) -> None:
        """Delay the barrier on rank 0 until the other ranks know of the update: after the barrier they write."""
        handle = self._handle
        if handle is None or not self._is_divided:
            return
        end = time.monotonic() + self._stall_timeout_seconds
        while not handle.wait_until_joined(JOIN_SECONDS) and not self._runtime.closed and time.monotonic() < end:
            pass

    def before_write(self) -> None:
        """Parameters are about to change: wait until the last bucket has been read, but not for a slow engine."""
        if self._lent_parts is not None:
            self._lent_parts.before_write()
        handle, patience = self._handle, self._stall_timeout_seconds
        if handle is not None and not handle.wait_until_read(patience):
            handle.cancel(f"it kept the training waiting for {patience:g} s (stall_timeout_seconds)")

    def withdraw(self) -> None:
        """Versions are undone, the one that is on its way perhaps among them: it is given up."""
        if self._handle is not None:
            self._handle.cancel("a recovery went back past this version")
        if self._lent_parts is not None:
            self._lent_parts.withdraw()

    def finish(self) -> None:
        """All ranks hold the final version: every engine gets it before the job ends."""
        if self._lent_parts is not None:
            self._lent_parts.hold(self._worker.version)
            self._lent_parts.finish(LAST_SECONDS)
        if self._every and self._runtime.rank == 0 and self._runtime.generation > 1:
            self._await_place()
        publisher = self._publisher
        if publisher is None:
            return
        with self._reporting():
            if self._handle is not None:
                self._handle.confirm()
            self._is_under_way(LAST_SECONDS)
            if self._runtime.generation > 1:  # the publisher before may have died with its engines connected
                publisher.wait_for_engines(1, max(0.0, self._opened + COMING_SECONDS - time.monotonic()))
            behind = [engine.name for engine in publisher.engines() if engine.version != self._worker.version]
            if behind and self._every and not self._is_lacking(publisher, COMING_SECONDS):
                self._begin(publisher, behind).confirm()
                self._is_under_way(LAST_SECONDS)
        self._reporter.close()  # with the versions that engines have when the job ends
        publisher.close()
        if self._bridge is not None:
            self._bridge.close()

    def _await_place(self) -> None:
        """Rank 0's predecessor keeps the socket's place until its memory is freed, maybe for longer than all steps."""
        end = time.monotonic() + TAKEN_SECONDS
        with self._reporting():
            while self._publisher is None:
                try:
                    self._open()
                except PlaceTakenError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(JOIN_SECONDS)

    def _open(self) -> Publisher:
        if self._publisher is None:
            self._opened = time.monotonic()
            size = self._weights.bucket_bytes() if self._weights is not None else DEFAULT_BUCKET_BYTES
            self._publisher = Publisher(
                self._runtime.settings.run_dir, bucket_bytes=size, stall_timeout_seconds=self._stall_timeout_seconds
            )
            self._reporter.start(self._publisher)
            if self._weights is not None and not self._is_divided:
                self._weights.move()
            if self._is_divided and host_address():
                runtime = self._runtime
                self._bridge = SourceBridge(
                    runtime.settings.run_dir,
                    host_address(),
                    token=runtime.restores.token,
                    tls=runtime.restores.tls,
                    on_notice=self._reporter.say,
                )
        if self._is_divided and self._bridge_announced_in != self._runtime.generation:
            self._bridge_announced_in = self._runtime.generation
            endpoint = "" if self._bridge is None else self._bridge.endpoint
            self._runtime.store.set(self._bridge_announced_in, BRIDGE_KEY, endpoint.encode())
        return self._publisher

    def _find_bridge(self) -> str:
        """The endpoint at which rank 0 lets in sources of other hosts; empty on its own host. For any thread."""
        try:
            (endpoint,) = self._runtime.store.wait(self._runtime.generation, (BRIDGE_KEY,), BRIDGE_SECONDS)
        except (StepInterrupted, TimeoutError):
            return ""
        found = endpoint.decode()
        return "" if found.rpartition(":")[0] == host_address() else found

    def _lend(self) -> None:
        """Lend rank 0 the parts that this rank holds."""
        if not self._is_divided:
            return
        if self._lent_parts is None:
            self._lent_parts = LentParts(
                Path(self._runtime.settings.run_dir),
                self._find_bridge,
                f"rank-{self._runtime.rank}",
                self._own_parts(),
                self._stall_timeout_seconds,
                token=self._runtime.restores.token,
                tls=self._runtime.restores.tls,
            )
        self._lent_parts.hold(self._worker.version)

    def _is_lacking(self, publisher: Publisher, patience_seconds: float) -> bool:
        """Return whether some part of the weights is held by no rank that is connected so far."""
        if not self._is_divided:
            return False
        why = publisher.lacking(self._own_parts().held, patience_seconds)
        if why and time.monotonic() > self._opened + COMING_SECONDS:
            self._reporter.say(
                f"nothing is published: {why}; ranks on other hosts need RELIGHT_HOST_ADDRESS on rank 0's"
            )
        return bool(why)

    def _own_parts(self) -> PartSource:
        """Return the parts of divided weights that this rank holds."""
        if self._parts is None:
            assert self._weights is not None
            self._parts = self._weights.parts(self._runtime.rank)
        return self._parts

    @property
    def _is_divided(self) -> bool:
        return self._weights is not None and self._weights.is_divided

    def _begin(self, publisher: Publisher, only: Iterable[str] | None) -> Handle:
        assert self._weights is not None
        own = self._own_parts().frozen() if self._is_divided else None
        source: Source = own or self._weights.whole()
        handle = self._handle = publisher.begin(
            source,
            version=self._worker.version,
            generation=self._runtime.generation,
            confirmed=False,
            only=only,
            held=None if own is None else own.held,
        )
        self._version = self._worker.version
        self._reporter.update_begun(handle, self._version)
        return handle

    def _is_under_way(self, patience_seconds: float) -> bool:
        """Return whether the last update is still not over after so long; if it is over, report how it went."""
        result = None if self._handle is None else self._handle.wait(patience_seconds)
        if result is not None:
            self._reporter.update_ended(result)
            self._handle = None
        return self._handle is not None

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
            self._taken.is_over()
        except PlaceTakenError as error:
            if self._taken.lasts(time.monotonic()):
                self._reporter.say(str(error))
        except (RelightError, OSError, RuntimeError, MemoryError) as error:  # the last two: of torch, without memory
            self._reporter.say(str(error))


def _published_modules(state: TrackedState, model: str | None) -> tuple[str, ...]:
    """Return the names of the modules to publish; `model`: only this one. Raises UsageError."""
    names = list(state.modules)
    if model is None and len(names) > 1 and not state.pipelines:
        raise UsageError(f"there are several models ({', '.join(names)}): say publish(model=...)")
    if model is not None and model not in names:
        raise UsageError(f"publish(model={model!r}): relight.Training was given {', '.join(names)}")
    if model is None and state.pipelines:
        names = [name for name in names if state.pipelines.stages_in([state.modules[name]])]
    return tuple(names) if model is None else (model,)
