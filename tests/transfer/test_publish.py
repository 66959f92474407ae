"""Updates of engines that are processes: all or nothing, whichever is killed, frozen, damaged or late."""

import gc
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from relight.errors import TransferError, UsageError
from relight.transfer.engine.receiver import Receiver
from relight.transfer.plan.plan import Bucket, plan_buckets
from relight.transfer.plan.schedule import Form
from relight.transfer.plan.update.result import SELF, UpdateProgress
from relight.transfer.publish.publisher import Publisher
from relight.transfer.tensors.targets import Pairs
from relight.transfer.tensors.weights import TensorSource, digest_weights, weights_of
from tests.transfer.fleet import (
    BUCKET_BYTES,
    BUCKETS,
    DEADLINE_SECONDS,
    PATIENCE,
    STALL_SECONDS,
    Engine,
    Fault,
    Fleet,
    digest_of,
    make_model,
    source_of,
    until,
)

MARGIN_SECONDS = 2.0 * PATIENCE  # for everything that an update does besides waiting
FIRST, MIDDLE, LAST = 0, BUCKETS // 2, BUCKETS - 1
LONG = pytest.mark.all


def test_the_buckets_are_as_many_as_the_faults_count_on() -> None:
    assert len(plan_buckets(source_of(1).manifest, BUCKET_BYTES)) == BUCKETS


# --- the good days ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", [Form.TWO_STAGE, Form.SERIAL])
def test_every_engine_has_each_version_bit_for_bit(fleet: Fleet, form: Form) -> None:
    engines = [*fleet.engines(2), fleet.engine("callback", "callback"), fleet.engine("in place", "in-place")]
    for version in (1, 2, 3):
        result = fleet.publish(len(engines), version, form=form)
        assert not result.error
        assert result.engines == tuple(sorted(engine.name for engine in engines))
        assert result.dropped == {}
        assert (result.version, result.buckets) == (version, BUCKETS)
        stages = [(s.kind, s.bucket, s.member) for s in result.stages]
        assert sorted(stages) == sorted(
            [("broadcast", bucket, SELF) for bucket in range(BUCKETS)]
            + [("reload", bucket, engine) for bucket in range(BUCKETS) for engine in result.engines]
            + [("commit", -1, engine) for engine in result.engines]
        )
        ended_ns = result.started_ns + result.seconds * 1e9
        assert all(result.started_ns <= s.start_ns <= s.end_ns <= ended_ns for s in result.stages)
        for engine in engines:
            engine.assert_has(version)


def test_nobody_there(fleet: Fleet) -> None:
    assert fleet.publish(0, 1).error == "there is no engine"


def test_only_some(fleet: Fleet) -> None:
    one, other = fleet.engines(2)
    assert fleet.publish(2, 1, only=["e1"]).engines == ("e1",)
    other.assert_has(1)
    one.assert_whole(0)


def test_a_version_that_is_not_confirmed_is_not_taken(fleet: Fleet) -> None:
    (engine,) = fleet.engines(1)
    fleet.wait_for(1)
    handle = fleet.publisher.begin(source_of(1), version=1, confirmed=False)
    assert handle.wait_until_read(DEADLINE_SECONDS)
    engine.assert_whole(0)
    assert not handle.over
    handle.confirm()
    assert handle.wait(DEADLINE_SECONDS) is not None
    engine.assert_has(1)


def test_progress_goes_from_nothing_to_everything(fleet: Fleet) -> None:
    fleet.engines(2)
    fleet.wait_for(2)
    read, go = threading.Event(), threading.Event()

    class Waits(TensorSource):
        """Holds the last bucket back until the test has looked."""

        def fill(self, bucket: Bucket, view: memoryview) -> int:
            if bucket.index == LAST:
                read.set()
                assert go.wait(DEADLINE_SECONDS)
            return super().fill(bucket, view)

    source = Waits(weights_of(make_model(1)))
    total = source.manifest.total_bytes
    handle = fleet.publisher.begin(source, version=1)
    assert (handle.progress().total_buckets, handle.progress().total_bytes) == (BUCKETS, total)
    assert read.wait(DEADLINE_SECONDS)
    seen = handle.progress()
    assert BUCKETS - 2 <= seen.held_buckets < BUCKETS  # its buffer was free
    assert 0 < seen.held_bytes < total
    go.set()
    assert handle.wait(DEADLINE_SECONDS) is not None
    assert handle.progress() == UpdateProgress(
        held_buckets=BUCKETS, total_buckets=BUCKETS, held_bytes=total, total_bytes=total
    )


# --- an engine is lost --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "at", "mode"),
    [
        ("kill", FIRST, "staged"),
        ("kill", MIDDLE, "staged"),
        ("kill", LAST, "staged"),
        ("kill", "commit", "staged"),
        ("freeze", MIDDLE, "staged"),
        ("freeze", "commit", "staged"),
        pytest.param("freeze", FIRST, "staged", marks=LONG),
        pytest.param("freeze", LAST, "staged", marks=LONG),
        *(pytest.param("kill", at, "in-place", marks=LONG) for at in (FIRST, MIDDLE, LAST, "commit")),
        *(pytest.param("kill", at, "callback", marks=LONG) for at in (FIRST, MIDDLE, LAST, "commit")),
    ],
)
def test_the_rest_finish_without_a_lost_engine(fleet: Fleet, kind: str, at: int | str, mode: str) -> None:
    one, other = fleet.engines(2)
    lost = fleet.engine("lost", mode)
    assert not fleet.publish(3, 1).dropped
    lost.assert_has(1)
    lost.ask("fault", Fault(kind, at))
    result = fleet.publish(3, 2)
    assert result.engines == ("e0", "e1")
    assert list(result.dropped) == ["lost"]
    assert result.seconds < MARGIN_SECONDS + (STALL_SECONDS if kind == "freeze" else 0.0)
    assert result.seconds > (STALL_SECONDS if kind == "freeze" else 0.0)
    for engine in (one, other):
        engine.assert_has(2)
    assert fleet.publish(2, 3).engines == ("e0", "e1")
    if kind == "kill":
        lost.wait_until_dead()
        return
    lost.wait_until_stopped()
    lost.wake()
    fleet.wait_for(3)
    lost.assert_whole(2 if at == "commit" else 1)
    assert not fleet.publish(3, 4).dropped
    for engine in (one, other, lost):
        engine.assert_has(4)


def test_two_engines_lost_at_different_buckets(fleet: Fleet) -> None:
    good, *lost = fleet.engines(3)
    fleet.wait_for(3)
    lost[0].ask("fault", Fault("kill", FIRST))
    lost[1].ask("fault", Fault("freeze", MIDDLE))
    result = fleet.publish(3, 1)
    assert result.engines == ("e0",)
    assert sorted(result.dropped) == ["e1", "e2"]
    good.assert_has(1)


@pytest.mark.parametrize("at", [MIDDLE, "commit"])
def test_the_only_engine_is_lost(fleet: Fleet, at: int | str) -> None:
    (engine,) = fleet.engines(1)
    fleet.wait_for(1)
    engine.ask("fault", Fault("kill", at))
    result = fleet.publish(1, 1)
    assert result.error
    assert result.engines == ()
    fleet.engine("next")
    assert fleet.publish(1, 1).engines == ("next",)


def test_a_frozen_engine_in_place_wakes_up_stale(fleet: Fleet) -> None:
    good, lost = fleet.engine("good"), fleet.engine("lost", "in-place")
    fleet.wait_for(2)
    lost.ask("fault", Fault("freeze", MIDDLE))
    assert fleet.publish(2, 1).engines == ("good",)
    lost.wake()
    fleet.wait_for(2)
    version, why = lost.serve()
    assert version == -2
    assert "an update in place to version 1 broke off" in why
    assert not fleet.publish(2, 2).dropped
    lost.assert_has(2)
    good.assert_has(2)


def test_an_engine_in_place_frozen_before_it_overwrote_anything_is_not_stale(fleet: Fleet) -> None:
    lost = fleet.engine("lost", "in-place")
    fleet.wait_for(1)
    lost.ask("fault", Fault("freeze", FIRST))
    assert fleet.publish(1, 1).error
    lost.wake()
    fleet.wait_for(1)
    lost.assert_whole(0)


# --- damage -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("at", [FIRST, MIDDLE, LAST])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_bucket_that_arrives_damaged_at_one_engine(fleet: Fleet, at: int, times: int) -> None:
    good, unlucky = fleet.engines(2)
    fleet.wait_for(2)
    unlucky.ask("fault", Fault("damage", at, times))
    result = fleet.publish(2, 1)
    good.assert_has(1)
    if times < 3:
        assert result.engines == ("e0", "e1")
        unlucky.assert_has(1)
    else:
        assert result.engines == ("e0",)
        assert result.dropped == {"e1": f"bucket {at} arrived damaged 3 times"}
        unlucky.assert_whole(0)
    assert not fleet.publish(2, 2).dropped
    unlucky.assert_has(2)


class CorruptSource:
    """Something flips a bit in the shared buffer after the digest was taken."""

    def __init__(self, seed: int, at: int, times: int) -> None:
        self._source, self._at, self.left = source_of(seed), at, times
        self.manifest = self._source.manifest

    def settle(self) -> None:
        pass

    def fill(self, bucket: Bucket, view: memoryview) -> int:
        digest = self._source.fill(bucket, view)
        if bucket.index == self._at and self.left:
            self.left -= 1
            view[bucket.nbytes // 2] ^= 16
        return digest


@pytest.mark.parametrize("times", [1, 2, 1000])
def test_a_buffer_that_is_damaged_for_everybody(fleet: Fleet, times: int) -> None:
    engines = fleet.engines(2)
    fleet.wait_for(2)
    source = CorruptSource(1, MIDDLE, times)
    result = fleet.publisher.begin(source, version=1).wait(DEADLINE_SECONDS)
    assert result is not None
    # An engine that comes to the bucket only as it is written again meets one damaged write less than the others.
    has: dict[int, list[tuple[str, ...]]] = {1: [("e0", "e1")], 2: [(), ("e0",), ("e1",)], 1000: [()]}
    assert result.engines in has[times]
    assert set(result.engines) | set(result.dropped) == {"e0", "e1"}
    assert set(result.dropped.values()) <= {f"bucket {MIDDLE} arrived damaged 3 times"}
    assert ("no engine is left" in result.error) == (not result.engines)
    for name, engine in zip(("e0", "e1"), engines, strict=True):
        engine.assert_whole(1 if name in result.engines else 0)
    assert not fleet.publish(2, 2).dropped
    for engine in engines:
        engine.assert_has(2)


# --- the publisher is lost ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("at", [FIRST, MIDDLE, LAST])
def test_the_publisher_is_killed(fleet: Fleet, at: int) -> None:
    engines = fleet.engines(2)
    publisher = fleet.publisher_process()
    publisher.publish(2, 1)
    assert publisher.published().engines == ("e0", "e1")
    publisher.publish(2, 2, "kill", at)
    publisher.wait_until_dead()
    for engine in engines:
        engine.assert_whole(1)
    assert not fleet.publish(2, 3).dropped, "through the socket that the dead one left"
    for engine in engines:
        engine.assert_has(3)


@pytest.mark.parametrize("at", [MIDDLE])
def test_the_publisher_is_killed_while_an_engine_takes_it_in_place(fleet: Fleet, at: int) -> None:
    engine = fleet.engine("e0", "in-place")
    publisher = fleet.publisher_process()
    publisher.publish(1, 1, "kill", at)
    publisher.wait_until_dead()
    fleet.wait_for(1)  # so it has noticed
    assert engine.serve()[0] == -2
    assert not fleet.publish(1, 3).dropped
    engine.assert_has(3)


def test_a_frozen_publisher_does_not_keep_an_engine_in_place_waiting(fleet: Fleet) -> None:
    engine, staged = fleet.engine("e0", "in-place"), fleet.engine("e1")
    publisher = fleet.publisher_process()
    publisher.publish(2, 1, "freeze", MIDDLE)
    publisher.wait_until_stopped()
    why = ""
    for _ in until("no notice that the engine is stale"):
        version, why = engine.serve()  # waits at the closed door until the engine's patience is over
        if version == -2:
            break
    assert "timed out" in why
    staged.assert_whole(0)
    publisher.wake()
    assert publisher.answer()
    publisher.publish(2, 2)
    assert not publisher.published().dropped
    for one in (engine, staged):
        one.assert_has(2)


def test_the_publisher_closes_in_the_middle(fleet: Fleet) -> None:
    engines = fleet.engines(2)
    fleet.wait_for(2)
    source = HeldSource(1)
    handle = fleet.publisher.begin(source, version=1)
    source.wait_until_read(MIDDLE)
    closing = threading.Thread(target=fleet.publisher.close)
    closing.start()
    result = handle.wait(DEADLINE_SECONDS)
    assert result is not None
    assert result.error == "the publisher was closed"
    source.go.set()
    closing.join(DEADLINE_SECONDS)
    assert os.listdir(fleet.place) == []
    for engine in engines:
        engine.assert_whole(0)
    with pytest.raises(TransferError, match="closed"):
        fleet.publisher.begin(source, version=2)


class HeldSource:
    """Weights whose middle bucket is written only when the test says so."""

    def __init__(self, seed: int) -> None:
        self._source = source_of(seed)
        self.manifest = self._source.manifest
        self.go = threading.Event()
        self._reached = threading.Event()

    def settle(self) -> None:
        pass

    def fill(self, bucket: Bucket, view: memoryview) -> int:
        if bucket.index == MIDDLE:
            self._reached.set()
            assert self.go.wait(DEADLINE_SECONDS)
        return self._source.fill(bucket, view)

    def wait_until_read(self, bucket: int) -> None:
        assert bucket == MIDDLE
        assert self._reached.wait(DEADLINE_SECONDS)


class RaisingSource:
    def __init__(self, seed: int, error: Exception) -> None:
        self._source, self._error = source_of(seed), error
        self.manifest = self._source.manifest

    def settle(self) -> None:
        pass

    def fill(self, bucket: Bucket, view: memoryview) -> int:
        if bucket.index == MIDDLE:
            raise self._error
        return self._source.fill(bucket, view)


@pytest.mark.parametrize("error", [OSError("the disk is gone"), KeyError("w"), ZeroDivisionError()])
def test_a_source_that_raises(fleet: Fleet, error: Exception) -> None:
    (engine,) = fleet.engines(1)
    fleet.wait_for(1)
    with pytest.raises(TransferError, match=f"version 1 was not published: .*{type(error).__name__}"):
        fleet.publisher.publish(RaisingSource(1, error), version=1)
    engine.assert_whole(0)
    assert not fleet.publish(1, 2).dropped
    engine.assert_has(2)


# --- refusals -----------------------------------------------------------------------------------------------------
def changed(name: str, tensor: torch.Tensor | None) -> TensorSource:
    tensors = dict(zip([e.name for e in source_of(1).manifest.entries], source_of(1)._tensors, strict=True))
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    return TensorSource(tensors)


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [
        ("0.bias", None, "0.bias is missing"),
        ("new", torch.ones(3), "new is not known here"),
        ("0.bias", torch.ones(65), "0.bias comes as [65], wanted is [64]"),
        ("0.bias", torch.ones(64, dtype=torch.bfloat16), "0.bias comes as bfloat16, wanted is float32"),
    ],
)
def test_weights_that_do_not_fit(fleet: Fleet, name: str, tensor: torch.Tensor | None, why: str) -> None:
    fits, strict = fleet.engine("any", "callback"), fleet.engine("strict")
    assert not fleet.publish(2, 1).dropped
    result = fleet.publisher.begin(changed(name, tensor), version=2, only=["strict"]).wait(DEADLINE_SECONDS)
    assert result is not None
    assert result.dropped == {"strict": why}
    assert result.error
    strict.assert_whole(1)
    assert fleet.publish(2, 3).engines == ("any", "strict"), "it stayed connected"
    fits.assert_has(3)


def test_older_versions_and_generations(fleet: Fleet) -> None:
    (engine,) = fleet.engines(1)
    assert not fleet.publish(1, 5, generation=2).error
    for version, generation in ((4, 2), (5, 1), (9, 1), (4, 3)):
        result = fleet.publish(1, version, generation=generation)
        assert "is older than version 5 of generation 2" in result.dropped["e0"]
        engine.assert_whole(5)
    assert not fleet.publish(1, 5, generation=2).error, "the same once more"
    assert not fleet.publish(1, 6, generation=3).error
    engine.assert_has(6)


def test_a_second_update_at_the_same_time(fleet: Fleet) -> None:
    (engine,) = fleet.engines(1)
    fleet.wait_for(1)
    source = HeldSource(1)
    handle = fleet.publisher.begin(source, version=1)
    source.wait_until_read(MIDDLE)
    with pytest.raises(TransferError, match="the update to version 1 is under way; wait for it first"):
        fleet.publisher.begin(source_of(2), version=2)
    assert not handle.wait_until_read(0.0)
    source.go.set()
    assert handle.wait(DEADLINE_SECONDS) is not None
    engine.assert_has(1)


# --- late engines -------------------------------------------------------------------------------------------------
def test_late_engines_get_the_version_that_is_held(fleet: Fleet) -> None:
    first = fleet.engine("first")
    assert not fleet.publish(1, 1, hold=True).error
    second = fleet.engine("second")
    second.assert_has(1)
    first.assert_has(1)
    assert not fleet.publish(2, 2).error  # not held
    third = fleet.engine("third")
    fleet.wait_for(3)
    third.assert_whole(0)


def test_an_update_begun_while_a_late_engine_is_helped_comes_next(fleet: Fleet) -> None:
    fleet.engine("first")
    fleet.wait_for(1)
    source = HeldSource(1)
    source.go.set()
    assert fleet.publisher.begin(source, version=1, hold=True).wait(DEADLINE_SECONDS) is not None
    source.go.clear()
    source._reached.clear()
    late = fleet.engine("late")
    source.wait_until_read(MIDDLE)  # by the late engine's own update
    handle = fleet.publisher.begin(source_of(2), version=2)
    with pytest.raises(TransferError, match="version 2 is under way"):
        fleet.publisher.begin(source_of(3), version=3)
    source.go.set()
    result = handle.wait(DEADLINE_SECONDS)
    assert result is not None
    assert result.engines == ("first", "late")
    late.assert_has(2)


def test_an_engine_that_cannot_take_the_held_version_is_not_asked_without_end(fleet: Fleet) -> None:
    stubborn = fleet.engine("stubborn", "callback")
    stubborn.ask("fail", 0)
    assert fleet.publish(1, 1, hold=True).error
    for name in ("a", "b"):  # each joins, and everybody who is late is looked for
        fleet.engine(name).assert_has(1)
    offers = [notice for notice in fleet.notices if "stubborn" in notice]
    assert len(offers) == 1, offers
    assert not fleet.publish(3, 2).error
    stubborn.assert_has(2)


# --- in place and callbacks ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["in-place", "callback"])
def test_a_callback_gets_every_tensor_once(fleet: Fleet, mode: str) -> None:
    engine = fleet.engine("e", mode)
    names = sorted(entry.name for entry in source_of(1).manifest.entries)
    for version in (1, 2):
        assert not fleet.publish(1, version).error
        engine.assert_has(version)
        got, calls = engine.ask("take")
        assert sorted(got) == names
        assert calls == (["pause", "resume"] if mode == "in-place" else [])


@pytest.mark.parametrize("mode", ["in-place", "callback"])
@pytest.mark.parametrize("fails_at", [0, 4])
def test_a_callback_that_raises(fleet: Fleet, mode: str, fails_at: int) -> None:
    good, engine = fleet.engine("good"), fleet.engine("e", mode)
    assert not fleet.publish(2, 1).dropped
    engine.ask("take")
    engine.ask("fail", fails_at)
    result = fleet.publish(2, 2)
    assert result.engines == ("good",)
    assert "ValueError: this engine does not like it" in result.dropped["e"]
    good.assert_has(2)
    assert engine.serve()[0] == -2
    engine.ask("take")
    assert not fleet.publish(2, 3).dropped
    engine.assert_has(3)
    _, calls = engine.ask("take")
    assert calls == (["resume"] if mode == "in-place" else []), "it was paused, and stayed so while it was stale"


# --- readers ------------------------------------------------------------------------------------------------------
UPDATES = 300


def test_readers_never_see_a_mixture(tmp_path: Path) -> None:
    """Every element of every tensor carries its version."""
    live = {f"t{number}": torch.zeros(40) for number in range(6)}
    live["slice"] = torch.zeros(80)[20:60]
    live["tied"] = live["t0"]
    mixtures: list[object] = []
    seen: set[int] = set()
    done = threading.Event()

    def read(receiver: Receiver) -> None:
        while not done.is_set():
            with receiver.serving() as version, receiver.serving():  # twice: one call within another
                held = {float(value) for tensor in live.values() for value in tensor}
                if held != {float(max(version, 0))}:
                    mixtures.append((version, held))
                seen.add(version)

    with Publisher(tmp_path, bucket_bytes=256) as publisher, Receiver(tmp_path, model=live) as receiver:
        assert publisher.wait_for_engines(1, DEADLINE_SECONDS)
        readers = [threading.Thread(target=read, args=(receiver,)) for _ in range(3)]
        for reader in readers:
            reader.start()
        try:
            for version in range(1, UPDATES + 1):
                value = torch.full((40,), float(version))
                publisher.publish(TensorSource(dict.fromkeys(live, value)), version=version)
        finally:
            done.set()
            for reader in readers:
                reader.join(DEADLINE_SECONDS)
    assert mixtures == []
    assert len(seen) > 20


def names_in_shared_memory(pid: int) -> set[str]:
    """The names in /dev/shm that a process has mapped and that are still there."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.rpartition(" ")[2] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}


def test_nothing_is_left_behind_and_nothing_grows(fleet: Fleet) -> None:
    others = names_in_shared_memory(os.getpid())  # of tests that ran before in this process
    engines: list[Engine] = [fleet.engine("a"), fleet.engine("b", "in-place")]
    for version in range(1, 21):
        assert not fleet.publish(2, version).dropped
    gc.collect()  # publications, whose memory may be lent
    own = len(os.listdir("/proc/self/fd")), threading.active_count()
    for pid in (os.getpid(), *(engine.pid for engine in engines)):
        assert names_in_shared_memory(pid) <= others
    before = [engine.ask("load") for engine in engines]
    for version in range(21, 221):
        assert not fleet.publish(2, version).dropped
    for engine, (descriptors, resident, threads) in zip(engines, before, strict=True):
        after = engine.ask("load")
        assert (after[0], after[2]) == (descriptors, threads)
        assert after[1] < resident + 2 * 2**20
        assert engine.serve()[1] == digest_of(220)
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == own
    fleet.publisher.close()
    assert os.listdir(fleet.place) == []


# --- what a receiver's owner does ---------------------------------------------------------------------------------
def test_the_publisher_is_killed_when_one_engine_has_committed_and_one_is_about_to(fleet: Fleet) -> None:
    first, second = fleet.engines(2)
    publisher = fleet.publisher_process()
    publisher.publish(2, 1)
    assert not publisher.published().dropped
    second.ask("fault", Fault("freeze", "commit"))
    publisher.publish(2, 2)
    second.wait_until_stopped()
    first.assert_has(2)
    os.kill(publisher.pid, signal.SIGKILL)
    publisher.wait_until_dead()
    second.wake()
    second.assert_has(2)
    assert not fleet.publish(2, 3).dropped
    for engine in (first, second):
        engine.assert_has(3)


@pytest.mark.parametrize("which", ["pause", "resume"])
def test_an_engines_own_callbacks_that_raise(tmp_path: Path, which: str) -> None:
    fails = True
    live = torch.zeros(40)

    def act(kind: str) -> None:
        if fails and kind == which:
            raise RuntimeError("not now")

    def load(pairs: Pairs) -> None:
        for _, tensor in pairs:
            live.copy_(tensor)

    notices: list[str] = []
    with (
        Publisher(tmp_path, bucket_bytes=64) as publisher,
        Receiver(
            tmp_path,
            load=load,
            mode="in-place",
            pause=lambda: act("pause"),
            resume=lambda: act("resume"),
            name="e",
            on_notice=notices.append,
        ) as receiver,
    ):
        assert publisher.wait_for_engines(1, DEADLINE_SECONDS)
        result = publisher.begin(TensorSource({"w": torch.ones(40)}), version=1).wait(DEADLINE_SECONDS)
        assert result is not None
        with receiver.serving() as version:
            assert version == (-1 if which == "pause" else 1)
            assert bool((live == max(version, 0)).all())
        assert bool(result.error) == (which == "pause")
        assert any("RuntimeError: not now" in notice for notice in notices)
        fails = False
        publisher.publish(TensorSource({"w": torch.full((40,), 2.0)}), version=2)
        assert receiver.wait_for(2, DEADLINE_SECONDS)
        assert bool((live == 2).all())


def test_an_update_waits_for_requests_and_requests_for_it(tmp_path: Path) -> None:
    live = torch.zeros(40)
    with Publisher(tmp_path, bucket_bytes=64) as publisher, Receiver(tmp_path, model={"w": live}) as receiver:
        assert publisher.wait_for_engines(1, DEADLINE_SECONDS)
        with receiver.serving() as version:
            handle = publisher.begin(TensorSource({"w": torch.ones(40)}), version=1)
            assert handle.wait_until_read(DEADLINE_SECONDS), "everything has arrived beside the request"
            with receiver.serving() as inner:  # the update waits for us: we must not wait for the update
                assert inner == version == -1
            digest = receiver.digest()
            assert digest == digest_weights({"w": torch.zeros(40)})
            assert not handle.over
        assert handle.wait(DEADLINE_SECONDS) is not None
        with receiver.serving() as version:
            assert version == 1
            assert bool((live == 1).all())


def test_a_receiver_closed_while_serving_gives_up_the_update_that_waits_for_it(tmp_path: Path) -> None:
    live = torch.zeros(40)
    with Publisher(tmp_path, bucket_bytes=64) as publisher, Receiver(tmp_path, model={"w": live}) as receiver:
        assert publisher.wait_for_engines(1, DEADLINE_SECONDS)
        with receiver.serving():
            handle = publisher.begin(TensorSource({"w": torch.ones(40)}), version=1)
            assert handle.wait_until_read(DEADLINE_SECONDS)
            receiver.close()
        result = handle.wait(DEADLINE_SECONDS)
        assert result is not None
        assert not result.engines
        with receiver.serving() as version:  # the weights stay, and can be used
            assert version == -1
        assert bool((live == 0).all())


def test_arguments_that_do_not_go_together(tmp_path: Path) -> None:
    def load(_: Pairs) -> None:
        pass

    with pytest.raises(UsageError, match="either model= or load="):
        Receiver(tmp_path)
    with pytest.raises(UsageError, match="either model= or load="):
        Receiver(tmp_path, model={}, load=load)
    with pytest.raises(UsageError, match="in-place"):
        Receiver(tmp_path, load=load, mode="inplace")
    with pytest.raises(UsageError, match="needs load="):
        Receiver(tmp_path, model={}, mode="in-place")
    with Receiver(tmp_path, load=load) as receiver, pytest.raises(UsageError, match="does not know where"):
        receiver.digest()
    with Publisher(tmp_path, bucket_bytes=64) as publisher, pytest.raises(UsageError, match="relight moves dense ones"):
        publisher.begin(TensorSource({"w": torch.ones(2, 2).to_sparse()}), version=1)
    with pytest.raises(TransferError, match="two-stage or serial"):
        Publisher(tmp_path, bucket_bytes=64, form=Form.THREE_STAGE)
