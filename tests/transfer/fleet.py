"""Engines and publishers as processes of their own, which can be killed and frozen at a chosen bucket.

They come from a fork server that has torch loaded already, so that a test with five of them takes a second. Each
obeys commands from a pipe; every answer has a deadline, and the end of the test is the end of its processes.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from relight.errors import StaleWeightsError, TransferError
from relight.transfer.engine import receiver as receiver_module
from relight.transfer.engine.engine_session import EngineSession
from relight.transfer.engine.receiver import Receiver, make_target
from relight.transfer.io.messages import BucketLoaded, LoadBucket
from relight.transfer.plan.plan import Bucket
from relight.transfer.plan.update.result import Published
from relight.transfer.plan.update.way import Way
from relight.transfer.publish.publisher import Publisher
from relight.transfer.tensors.lent_weights import LentWeights
from relight.transfer.tensors.targets import Pairs, Target
from relight.transfer.tensors.weights import TensorSource, digest_weights, own_tensors, weights_of

PATIENCE = float(os.environ.get("RELIGHT_TEST_PATIENCE", "1"))
STALL_SECONDS = 1.5 * PATIENCE
DEADLINE_SECONDS = 30.0 * PATIENCE
BUCKET_BYTES = 8192
BUCKETS = 7  # of `make_model`

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.transfer.fleet"])


def make_model(seed: int) -> torch.nn.Module:
    """A model of seven buckets, with scalars, buffers and tied weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first, last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        model = torch.nn.Sequential(first, torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 128), last)
        last.weight = first.weight
        return model


def source_of(seed: int, way: Way = Way.COPIED) -> LentWeights | TensorSource:
    """The weights of `make_model(seed)`, to be lent or copied."""
    model = make_model(seed)
    return LentWeights(own_tensors(model)) if way is Way.LENT else TensorSource(weights_of(model))


def digest_of(seed: int) -> str:
    return digest_weights(weights_of(make_model(seed)))


def name_of(digest: str, seeds: range = range(200)) -> int | None:
    """Return the version that a digest is of; None: of none, a mixture."""
    return next((seed for seed in seeds if digest_of(seed) == digest), None)


@dataclass(frozen=True)
class Fault:
    """An act of an engine on itself, or on a bucket, during the next update."""

    kind: str  # kill, freeze, damage
    at: int | str  # a bucket, or "commit"
    times: int = 1


def _meet_fate(kind: str) -> None:
    """Here and now: a signal to the process might stop another thread first, and this one a few lines later."""
    if kind in ("kill", "freeze"):
        signal.pthread_kill(threading.get_ident(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


class Faulty:
    """A target with which things go wrong."""

    def __init__(self, target: Target) -> None:
        self.wants, self.in_place = target.wants, target.in_place
        self.needs_buffers = target.needs_buffers
        self.import_buffers, self.load_on_device = target.import_buffers, target.load_on_device
        self.fault: Fault | None = None
        self._target = target
        self._done = 0
        self.prepare, self.begin_update = target.prepare, target.begin_update
        self.accept, self.abandon = target.accept, target.abandon

    def load(self, bucket: Bucket, view: memoryview) -> int:
        digest = self._target.load(bucket, view)
        if self._happens(bucket.index) == "damage":
            return digest ^ 1
        return digest

    def commit(self) -> None:
        self._happens("commit")
        self._target.commit()

    def _happens(self, at: int | str) -> str:
        fault = self.fault
        if fault is None or fault.at != at:
            return ""
        self._done += 1
        if self._done == fault.times:
            self.fault, self._done = None, 0
        _meet_fate(fault.kind)
        return fault.kind


class InPlaceEngine:
    """An engine that keeps its weights itself, and takes them tensor by tensor."""

    def __init__(self) -> None:
        self.model = weights_of(make_model(0))
        self.calls: list[str] = []
        self.got: list[str] = []
        self.fails_at = -1

    def load(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            if len(self.got) == self.fails_at:
                self.fails_at = -1
                raise ValueError("this engine does not like it")
            self.got.append(name)
            self.model[name].copy_(tensor)

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


def _trust(session: EngineSession, order: LoadBucket) -> None:
    """A bug on purpose: accept a bucket without its digest."""
    bucket = session._buckets[order.bucket]
    session._target.load(bucket, session._view_of(bucket, order))
    session._target.accept(bucket)
    session._channel.send(BucketLoaded(update=order.update, bucket=order.bucket, intact=True, seconds=0.0))


def _run_engine(pipe: Connection, place: str, name: str, mode: str) -> None:
    torch.set_num_threads(1)
    engine = InPlaceEngine()
    made: list[Faulty] = []

    def make_faulty(*arguments: Any) -> Target:
        made.append(Faulty(make_target(*arguments)))
        if mode == "buffers":
            made[0].needs_buffers = "this one needs buffers"
        return made[0]

    # In this process, which is the engine.
    receiver_module.make_target = make_faulty  # type: ignore[assignment]
    if mode in ("staged", "buffers"):
        model = make_model(0)
        receiver = Receiver(place, model=model, name=name)
    else:
        kind = "in-place" if mode == "in-place" else "staged"
        receiver = Receiver(place, load=engine.load, mode=kind, name=name, pause=engine.pause, resume=engine.resume)
    (faulty,) = made

    def serve() -> tuple[int, str]:
        try:
            with receiver.serving() as version:
                is_called = mode not in ("staged", "buffers")
                return version, (digest_weights(engine.model) if is_called else receiver.digest())
        except StaleWeightsError as error:
            return -2, str(error)

    def take() -> tuple[list[str], list[str]]:
        taken = engine.got, engine.calls
        engine.got, engine.calls = [], []
        return taken

    commands: dict[str, Callable[[Any], Any]] = {
        "serve": lambda _: serve(),
        "wait": lambda version: receiver.wait_for(version, DEADLINE_SECONDS),
        "fault": lambda fault: setattr(faulty, "fault", fault),
        "fail": lambda at: setattr(engine, "fails_at", at),
        "take": lambda _: take(),
        "trust": lambda _: setattr(EngineSession, "_load", _trust),
        "load": lambda _: _load(),
    }
    with contextlib.suppress(EOFError), receiver:
        while True:
            command, argument = pipe.recv()
            pipe.send(commands[command](argument))


def _load() -> tuple[int, int, int]:
    """Descriptors, resident bytes and threads, once the threads that populate memory have ended by themselves."""
    for thread in threading.enumerate():
        if thread.name == "relight-populate":
            thread.join()
    return len(os.listdir("/proc/self/fd")), _resident_bytes(), threading.active_count()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


class FatalSource(TensorSource):
    """Weights whose process meets its fate when a certain bucket is written."""

    def __init__(self, seed: int, kind: str, at: int) -> None:
        super().__init__(weights_of(make_model(seed)))
        self._kind, self._at = kind, at

    def fill(self, bucket: Bucket, view: memoryview) -> int:
        digest = super().fill(bucket, view)
        if bucket.index == self._at:
            _meet_fate(self._kind)
        return digest


class FatalLender(LentWeights):
    """Lent weights whose process meets its fate when a certain bucket is lent; or written, for a relay."""

    def __init__(self, seed: int, kind: str, at: int) -> None:
        super().__init__(own_tensors(make_model(seed)))
        self._kind, self._at = kind, at

    def lend(self, bucket: Bucket) -> int:
        return self._pass(bucket, super().lend(bucket))

    def fill(self, bucket: Bucket, view: memoryview) -> int:
        return self._pass(bucket, super().fill(bucket, view))

    def _pass(self, bucket: Bucket, digest: int) -> int:
        if bucket.index == self._at:
            _meet_fate(self._kind)
        return digest


def _run_publisher(pipe: Connection, place: str) -> None:
    torch.set_num_threads(1)
    with (
        contextlib.suppress(EOFError),
        Publisher(
            place, bucket_bytes=BUCKET_BYTES, stall_timeout_seconds=STALL_SECONDS, commit_timeout_seconds=STALL_SECONDS
        ) as publisher,
    ):
        while True:
            engines, version, kind, at, way = pipe.recv()
            assert publisher.wait_for_engines(engines, DEADLINE_SECONDS)
            try:
                source = (FatalLender if way is Way.LENT else FatalSource)(version, kind, at)
                pipe.send(publisher.publish(source, version=version))
            except TransferError as error:
                pipe.send(str(error))


class Member:
    """One process of the fleet, from outside."""

    def __init__(self, run: Callable[..., None], *arguments: str) -> None:
        self._pipe, theirs = _context.Pipe()
        self.process: ForkServerProcess = _context.Process(target=run, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def order(self, command: Any) -> None:
        self._pipe.send(command)

    def answer(self) -> Any:
        assert self._pipe.poll(DEADLINE_SECONDS), f"process {self.pid} does not answer"
        return self._pipe.recv()

    def wait_until_stopped(self) -> None:
        """Wait until it is frozen: its parent sees its state too, for it is not a child of the test."""
        for _ in until(f"process {self.pid} is not frozen"):
            if Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return

    def wait_until_dead(self) -> None:
        self.process.join(DEADLINE_SECONDS)
        assert self.process.exitcode is not None

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self._pipe.close()
        self.process.kill()
        self.process.join(DEADLINE_SECONDS)
        self.process.close()


class Engine(Member):
    """An engine process."""

    def __init__(self, place: Path, name: str, mode: str = "staged") -> None:
        super().__init__(_run_engine, str(place), name, mode)
        self.name = name

    def ask(self, command: str, argument: Any = None) -> Any:
        self.order((command, argument))
        return self.answer()

    def serve(self) -> tuple[int, str]:
        """The version that it answers with, and the digest of its weights; -2: why it does not answer."""
        version, digest = self.ask("serve")
        return int(version), str(digest)

    def assert_has(self, version: int) -> None:
        assert self.ask("wait", version), f"{self.name} has not got version {version}"
        assert self.serve() == (version, digest_of(version))

    def assert_whole(self, *allowed: int) -> None:
        """Its weights are those of one of these versions, to the last bit, and it says which."""
        version, digest = self.serve()
        assert name_of(digest) == max(version, 0)
        assert max(version, 0) in allowed


class PublisherProcess(Member):
    """A publisher in a process of its own."""

    def __init__(self, place: Path, way: Way) -> None:
        super().__init__(_run_publisher, str(place))
        self._way = way

    def publish(self, engines: int, version: int, kind: str = "", at: int = -1) -> None:
        self.order((engines, version, kind, at, self._way))

    def published(self) -> Published:
        result = self.answer()
        assert isinstance(result, Published), result
        return result


def until(what: str) -> Iterator[None]:
    """Turns of a look at something that is not announced, up to the deadline."""
    ticks = threading.Event()
    for _ in range(round(DEADLINE_SECONDS / 0.005)):
        yield
        ticks.wait(0.005)
    raise AssertionError(what)


class Fleet:
    """A place, its engines, and a publisher in this process."""

    def __init__(self, place: Path, way: Way = Way.LENT) -> None:
        self.place = place
        self.way = way  # of its updates
        self.members: list[Member] = []
        self.notices: list[str] = []
        self._publisher: Publisher | None = None

    @property
    def publisher(self) -> Publisher:
        if self._publisher is None:
            self._publisher = Publisher(
                self.place,
                bucket_bytes=BUCKET_BYTES,
                stall_timeout_seconds=STALL_SECONDS,
                commit_timeout_seconds=STALL_SECONDS,
                on_notice=self.notices.append,
            )
        return self._publisher

    def engine(self, name: str, mode: str = "staged") -> Engine:
        engine = Engine(self.place, name, mode)
        self.members.append(engine)
        return engine

    def engines(self, count: int, mode: str = "staged") -> list[Engine]:
        return [self.engine(f"e{number}", mode) for number in range(count)]

    def publisher_process(self) -> PublisherProcess:
        publisher = PublisherProcess(self.place, self.way)
        self.members.append(publisher)
        return publisher

    def publish(self, engines: int, version: int, **how: Any) -> Published:
        """To so many engines, which must all be connected first."""
        self.wait_for(engines)
        source = source_of(version, self.way)
        result = self.publisher.begin(source, version=version, **how).wait(DEADLINE_SECONDS)
        assert result is not None, "the update does not end"
        return result

    def wait_for(self, engines: int) -> None:
        assert self.publisher.wait_for_engines(engines, DEADLINE_SECONDS), self.notices

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        for member in self.members:
            member.close()
