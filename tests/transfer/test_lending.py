"""Buckets that are lent: engines read them where the source holds them, and accept nothing that changed meanwhile."""

import contextlib
import copy
import faulthandler
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash

import relight
from relight.errors import TransferError
from relight.transfer.io.lent import BorrowedMemory, LentMemory
from relight.transfer.plan.plan import Bucket, offsets_of, plan_buckets
from relight.transfer.plan.update.result import Published
from relight.transfer.plan.update.way import Way, choose_way
from relight.transfer.publish.source import Source
from relight.transfer.tensors.lent_weights import LentWeights, place_of
from relight.transfer.tensors.staging import Staging
from relight.transfer.tensors.weights import TensorWriter, digest_weights, own_tensors, weights_of
from tests.transfer.fleet import BUCKETS, DEADLINE_SECONDS, Fault, Fleet, digest_of, make_model, source_of

MIDDLE = BUCKETS // 2


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Engines and a publisher that end with the test, and lend."""
    fleet = Fleet(tmp_path)
    try:
        yield fleet
    finally:
        fleet.close()


class Counting(LentWeights):
    """Counts the buckets that it copies."""

    copies = 0

    def fill(self, bucket: Bucket, view: memoryview) -> int:
        self.copies += 1
        return super().fill(bucket, view)


def lent(seed: int, kind: type[LentWeights] = LentWeights) -> LentWeights:
    return kind(own_tensors(make_model(seed)))


def update(fleet: Fleet, source: Source, engines: int, version: int) -> Published:
    fleet.wait_for(engines)
    result = fleet.publisher.begin(source, version=version).wait(DEADLINE_SECONDS)
    assert result is not None
    return result


# --- the way ------------------------------------------------------------------------------------------------------
def test_the_source_copies_nothing(fleet: Fleet) -> None:
    engines = [*fleet.engines(2), fleet.engine("callback", "callback"), fleet.engine("in place", "in-place")]
    for version in (1, 2):
        source = Counting(own_tensors(make_model(version)))
        result = update(fleet, source, len(engines), version)
        assert (result.way, source.copies, result.dropped) == (Way.LENT, 0, {})
        for engine in engines:
            engine.assert_has(version)


def test_the_way_and_its_reason() -> None:
    for way in (Way.LENT, Way.ON_DEVICE):
        assert choose_way(way, "", {"a": "", "b": ""}).way is way
        assert choose_way(way, "", {"b": "no", "a": ""}) == (Way.COPIED, "b: no")
        assert choose_way(way, "", {"b": "no", "a": "never", "c": "no"}) == (Way.COPIED, "a: never, and 2 more")
    assert choose_way(Way.COPIED, "it is a file", {"a": ""}) == (Way.COPIED, "it is a file")


def test_one_source_lends_again_and_again(fleet: Fleet) -> None:
    """As a trainer does, which writes in between; engines map its memory once."""
    (engine,) = fleet.engines(1)
    model = make_model(1)
    source = LentWeights(own_tensors(model))
    assert update(fleet, source, 1, 0).way is Way.LENT
    before = engine.ask("load")
    for version in range(1, 20):
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        assert update(fleet, source, 1, version).way is Way.LENT
        assert engine.ask("wait", version)
        assert engine.serve()[1] == digest_weights(weights_of(model))
    after = engine.ask("load")
    assert (after[0], after[2]) == (before[0], before[2])


def test_one_engine_that_needs_buffers(fleet: Fleet) -> None:
    able, unable = fleet.engine("able"), fleet.engine("unable", "buffers")
    result = fleet.publish(2, 1)
    assert (result.way, result.why) == (Way.COPIED, "unable: this one needs buffers")
    for engine in (able, unable):
        engine.assert_has(1)


# --- weights that change while they are lent --------------------------------------------------------------------------
class Changing(LentWeights):
    """Something writes to the tensors right after a bucket was lent, as no trainer of relight's does."""

    at, back = MIDDLE, False

    def lend(self, bucket: Bucket) -> int:
        digest = super().lend(bucket)
        if bucket.index == self.at:
            self._flip(bucket)
        return digest

    def fill(self, bucket: Bucket, view: memoryview) -> int:
        if self.back and bucket.index == self.at:
            self._flip(bucket)
        return super().fill(bucket, view)

    def _flip(self, bucket: Bucket) -> None:
        piece = bucket.pieces[-1]
        self._tensors[piece.tensor].view(-1).view(torch.uint8)[piece.start] ^= 1


@pytest.mark.parametrize("at", [0, MIDDLE, BUCKETS - 1])
@pytest.mark.parametrize("back", [False, True])
def test_no_engine_accepts_a_bucket_that_has_changed(fleet: Fleet, at: int, back: bool) -> None:
    engines = fleet.engines(2)
    source = lent(1, Changing)
    source.at, source.back = at, back  # type: ignore[attr-defined]
    result = update(fleet, source, 2, 1)
    assert result.way is Way.LENT
    if back:  # by the time at which it is written into a buffer
        assert not result.dropped
    else:
        why = f"bucket {at} of publisher has changed, or the sources differ"
        assert result.error == why
    for engine in engines:
        engine.assert_whole(1 if back else 0)
    assert not fleet.publish(2, 2).dropped
    for engine in engines:
        engine.assert_has(2)


def test_an_engine_that_takes_no_digest_is_noticed(fleet: Fleet) -> None:
    """The planted bug of the test above: what has changed is accepted."""
    engine = fleet.engine("e0")
    fleet.wait_for(1)
    engine.ask("trust")
    assert not update(fleet, lent(1, Changing), 1, 1).error
    version, digest = engine.serve()
    assert version == 1
    assert digest != digest_of(1)


class Trainer:
    """Weights of which every element is the version, changed between updates as a training step changes them."""

    def __init__(self, place: Path, stack: contextlib.ExitStack) -> None:
        self.tensors = {f"t{number}": torch.zeros(20_000) for number in range(8)}
        self.live = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        self.source = LentWeights(self.tensors)
        self.publisher = stack.enter_context(relight.Publisher(place, bucket_bytes=2**16))
        self.engine = stack.enter_context(relight.Receiver(place, model=self.live))
        assert self.publisher.wait_for_engines(1, DEADLINE_SECONDS)

    def step(self, version: int, patience_seconds: float, *, waits: bool) -> Published:
        """Publish, then write as soon as that is allowed, or without asking; return how the update ended."""
        handle = self.publisher.begin(self.source, version=version, confirmed=False)
        if not handle.wait_until_read(patience_seconds) and waits:
            handle.cancel("the next write")
        for tensor in self.tensors.values():
            tensor.add_(1.0)
        handle.confirm()
        result = handle.wait(DEADLINE_SECONDS)
        assert result is not None
        return result

    def mixture(self) -> bool:
        """Return whether the engine holds values of more than one version."""
        with self.engine.serving():
            return bool(torch.cat(list(self.live.values())).ne(self.live["t0"][0]).any())


STEPS = 60


def test_a_trainer_writes_at_once_and_no_engine_takes_a_mixture(tmp_path: Path) -> None:
    chance = random.Random(5)
    with contextlib.ExitStack() as stack:
        trainer = Trainer(tmp_path, stack)
        ends: list[bool] = []
        for version in range(STEPS):
            result = trainer.step(version, chance.choice([0.0, 0.0005, 0.002, 0.01, 1.0]), waits=True)
            assert result.way is Way.LENT or result.error
            ends.append(bool(result.engines))
            assert not trainer.mixture()
            if result.engines:
                with trainer.engine.serving() as held:
                    assert held == version
                    assert float(trainer.live["t0"][0]) == version
    assert any(ends)
    assert not all(ends)


def test_a_trainer_that_does_not_wait_is_noticed(tmp_path: Path) -> None:
    """The planted bug of the test above: engines hold a mixture, or the update ends because buckets have changed."""
    chance = random.Random(5)
    noticed: list[str] = []
    with contextlib.ExitStack() as stack:
        trainer = Trainer(tmp_path, stack)
        for version in range(STEPS):
            result = trainer.step(version, chance.choice([0.0, 0.0005, 0.002]), waits=False)
            noticed += [result.error] if "changed" in result.error else []
            noticed += ["a mixture"] if trainer.mixture() else []
    assert noticed


# --- a process that is lost ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("at", [0, MIDDLE, BUCKETS - 1])
def test_a_publisher_frozen_while_it_lends_goes_on(fleet: Fleet, at: int) -> None:
    engines = fleet.engines(2)
    publisher = fleet.publisher_process()
    publisher.publish(2, 1)
    assert publisher.published().way is Way.LENT
    publisher.publish(2, 2, "freeze", at)
    publisher.wait_until_stopped()
    for engine in engines:
        engine.assert_whole(1)
    publisher.wake()
    assert not publisher.published().dropped
    for engine in engines:
        engine.assert_has(2)


@pytest.mark.parametrize("kind", ["kill", "freeze"])
@pytest.mark.parametrize("at", [0, MIDDLE, BUCKETS - 1, "commit"])
def test_an_engine_lost_while_it_reads_keeps_no_writer_waiting(fleet: Fleet, kind: str, at: int | str) -> None:
    """The trainer writes as soon as the others have read; one that was frozen reads on, and takes nothing of it."""
    good, lost = fleet.engines(2)
    fleet.wait_for(2)
    lost.ask("fault", Fault(kind, at))
    source = lent(1)
    handle = fleet.publisher.begin(source, version=1)
    assert handle.wait_until_read(DEADLINE_SECONDS)
    for tensor in source._tensors:
        if tensor.is_floating_point():
            tensor.fill_(7.0)
    result = handle.wait(DEADLINE_SECONDS)
    assert result is not None
    assert result.engines == ("e0",)
    good.assert_has(1)
    if kind == "freeze":
        lost.wake()
        fleet.wait_for(2)
        # One that was frozen when it was about to take the version has all of it, as it was lent.
        lost.assert_whole(0, *([1] if at == "commit" else []))
        assert not fleet.publish(2, 2).dropped
        lost.assert_has(2)


# --- memory -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bucket_bytes", [64, 4096, 2**20])
def test_what_is_lent_is_what_is_copied(bucket_bytes: int) -> None:
    """In tensors of odd sizes, with gaps between them, that span buckets or share one."""
    sizes = (1, 3, 64, 100, 4096, 5000, 300_001)
    tensors = {f"t{size}": torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes}
    tensors["none"], tensors["tied"] = torch.empty(0), tensors["t100"]
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    source = LentWeights(tensors)
    apart = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    staging = Staging(source.manifest)
    writer = TensorWriter({i: apart[entry.name] for i, entry in enumerate(source.manifest.entries)})
    borrowed = BorrowedMemory(os.dup(source.memory.descriptor), source.memory.nbytes)
    view = memoryview(bytearray(bucket_bytes))
    offsets, _ = offsets_of(source.manifest)
    for bucket in plan_buckets(source.manifest, bucket_bytes):
        start = place_of(bucket, offsets)
        here = borrowed.view[start : start + bucket.nbytes]
        digest = source.lend(bucket)
        assert source.fill(bucket, view) == digest == staging.load(bucket, here) == writer.load(bucket, here)
        assert xxhash.xxh3_64_intdigest(here) == digest
    for name, tensor in before.items():
        assert torch.equal(tensors[name], tensor)
        assert torch.equal(staging.tensors[name], tensor)
        assert name == "tied" or torch.equal(apart[name], tensor)


def test_only_the_owner_writes() -> None:
    memory = LentMemory(2**16)
    memory.view[5] = 9
    with pytest.raises(PermissionError):
        os.pwrite(memory.descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, 0)
    borrowed = BorrowedMemory(os.dup(memory.descriptor), 2**16)
    memory.view[6] = 8
    assert bytes(borrowed.view[5:7]) == b"\x09\x08"
    borrowed.close()
    with pytest.raises(TransferError, match="not 131072 as announced"):
        BorrowedMemory(os.dup(memory.descriptor), 2**17)


def test_no_memory_for_it() -> None:
    with pytest.raises(TransferError, match="no shared memory of"):
        LentMemory(2**62)


def test_a_forked_process_that_reads_lent_weights_ends() -> None:
    """It does not see later writes of its parent instead, nor crash where it does not use them."""
    tensors = {"a": torch.full((5000,), 3.0)}
    source = LentWeights(tensors)
    child = os.fork()
    if not child:
        faulthandler.disable()
        os._exit(int(tensors["a"][17]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    child = os.fork()
    if not child:
        del source, tensors
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert float(tensors["a"][17]) == 3.0


# --- what can be moved ------------------------------------------------------------------------------------------------
def test_a_parameter_trains_on_in_shared_memory() -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.LSTM(64, 8))
    other = copy.deepcopy(model)
    optimizer, its = (torch.optim.AdamW(one.parameters(), fused=True) for one in (model, other))
    LentWeights(own_tensors(model), lambda tensor: isinstance(tensor, torch.nn.Parameter))
    for _ in range(3):
        for one, steps in ((model, optimizer), (other, its)):
            one(torch.randn(5, 64, generator=torch.Generator().manual_seed(1)))[0].sum().backward()
            steps.step()
            steps.zero_grad()
    assert digest_weights(weights_of(model)) == digest_weights(weights_of(other))


def test_a_tensor_whose_memory_another_one_knows_stays() -> None:
    """The other one would go on with the old memory."""
    tensors = {"a": torch.zeros(1000), "b": torch.zeros(10)}
    alias = tensors["a"].detach()
    with pytest.raises(TransferError, match="a cannot be moved into shared memory: another tensor"):
        LentWeights(tensors)
    assert alias.data_ptr() == tensors["a"].data_ptr()
    view = {"a": torch.zeros(2000)[:1000]}
    with pytest.raises(TransferError, match="a cannot be moved"):
        LentWeights(view)
    with pytest.raises(TransferError, match="a does not lie side by side in host memory"):
        LentWeights({"a": torch.zeros(30, 40).t()})


def test_a_small_tensor_that_stays_is_copied_before_each_update() -> None:
    tensors = {"a": torch.zeros(1000), "b": torch.zeros(10)}
    alias = tensors["b"].detach()
    source = LentWeights(tensors)
    alias.fill_(4.0)
    assert source.take(tensors) == ""
    assert float(source._places["b"][3]) == 4.0
    assert tensors["b"].data_ptr() == alias.data_ptr()
    tensors["b"].data = torch.ones(10)
    assert source.take(tensors) == ""
    assert float(source._places["b"][3]) == 1.0
    tensors["a"].data = torch.ones(1000)
    assert source.take(tensors) == "2 tensors have left shared memory: they were given other memory (.data)"
    assert "not those" in source.take({"a": tensors["a"]})


def test_tensors_that_exchange_their_memory() -> None:
    """The place of one is the memory of the other: nothing may be copied there."""
    tensors = {"large": torch.zeros(2000), "a": torch.full((10,), 1.0), "b": torch.full((10,), 2.0)}
    source = LentWeights(tensors)
    tensors["a"].data, tensors["b"].data = tensors["b"].data, tensors["a"].data
    assert source.take(tensors) == "2 tensors have left shared memory: they were given other memory (.data)"
    assert (float(tensors["a"][0]), float(tensors["b"][0])) == (2.0, 1.0)


def test_weights_that_lie_elsewhere_are_copied(fleet: Fleet) -> None:
    (engine,) = fleet.engines(1)
    result = update(fleet, source_of(1, Way.COPIED), 1, 1)
    assert (result.way, result.why) == (Way.COPIED, "the weights do not lie in shared memory")
    engine.assert_has(1)
