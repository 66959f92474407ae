"""Weights and state on the late device: published, restored, staged; and what happens if one wait is left out.

Whether values are right depends on the order in which the device runs; whether two operations on the same memory are
ordered does not, so a wait that is missing is reported as a race the first time.
"""

import contextlib
import functools
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
import xxhash

import relight
from tests.transfer.hosts import blank, elsewhere, make_client, make_server, make_state, offer

pytestmark = pytest.mark.late
late = pytest.importorskip("tests.device_extension.late", reason="not built: make test-device", exc_type=ImportError)

from relight.integrations.engines import weight_stream  # noqa: E402 - the device is chosen once, when it is there
from relight.integrations.engines.weight_stream import entry_of, send_stream  # noqa: E402
from relight.transfer.io.buffers import Buffer  # noqa: E402
from relight.transfer.plan.division import ShardSpec, parts_of  # noqa: E402
from relight.transfer.plan.manifest import Entry, make_manifest  # noqa: E402
from relight.transfer.plan.plan import plan_buckets  # noqa: E402
from relight.transfer.publish.source import SourceLink  # noqa: E402
from relight.transfer.tensors import device as moving  # noqa: E402
from relight.transfer.tensors import targets, weights  # noqa: E402
from relight.transfer.tensors.device import CopyStreams, DeviceWriter, Lift  # noqa: E402
from relight.transfer.tensors.targets import StagedTensors  # noqa: E402
from relight.transfer.tensors.weights import PartSource, TensorReader, TensorSource, digest_weights, load_pieces  # noqa: E402

ROUNDS = range(20)  # orders in which the values must be right
ROWS, COLUMNS = 150, 60
SECONDS = 30.0
SIZE = ROWS * COLUMNS  # several pages of memory
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def no_race() -> Iterator[None]:
    yield
    torch.accelerator.synchronize(0)
    assert late.native.races() == []


@contextlib.contextmanager
def buffer_of(nbytes: int) -> Iterator[memoryview]:
    """A buffer that processes share. The device reads and writes it by itself."""
    buffer = Buffer.create(nbytes)
    assert torch.frombuffer(buffer.view, dtype=torch.uint8).is_pinned()
    try:
        yield buffer.view
    finally:
        buffer.close()


def computed(value: float) -> torch.Tensor:
    """A tensor that is still being computed."""
    slow = torch.zeros(SIZE, device="late")
    for _ in range(10):
        slow.add_(value / 10)
    slow.fill_(value)
    return slow


def lift(number: int) -> bool:
    """Publish weights right after they were computed: does the buffer have their values, and the digest theirs?"""
    tensors = {"a": computed(number), "strided": computed(number + 0.5).view(ROWS, COLUMNS).t()}
    source = TensorSource(tensors)
    for _ in range(2):  # again after the next step
        tensors["a"].add_(1.0)
        tensors["strided"].mul_(2.0)
        source.settle()
        (bucket,) = plan_buckets(source.manifest)
        with buffer_of(bucket.nbytes) as view:
            digest = source.fill(bucket, view)
            if digest != xxhash.xxh3_64_intdigest(view):
                return False
            expected = {name: tensor.cpu() for name, tensor in tensors.items()}
            got = {name: torch.zeros(tensor.shape) for name, tensor in expected.items()}
            load_pieces(bucket, view, {i: t.data_ptr() for i, t in enumerate(got.values())})
            if not all(torch.equal(got[name], expected[name]) for name in got):
                return False
    return True


def break_off(number: int) -> bool:
    """Fail in the middle of a bucket, whose buffer is used again."""
    tensor = torch.full((SIZE,), float(number), device="late")
    with buffer_of(4 * SIZE) as view:
        torch.accelerator.synchronize(0)
        with contextlib.suppress(ValueError), Lift(view) as running:
            running.add(tensor, 0, 4 * SIZE, 0)
            raise ValueError
        view[:] = bytes(len(view))
        torch.accelerator.synchronize(0)
        return not any(view)


def load(number: int) -> bool:
    """Take a bucket into tensors that a kernel still uses, from a buffer that is used again at once."""
    source = TensorSource({"a": torch.full((SIZE,), float(number))})
    (bucket,) = plan_buckets(source.manifest)
    own = computed(-1.0)
    with buffer_of(bucket.nbytes) as view:
        source.fill(bucket, view)
        digest = DeviceWriter({0: own}).load(bucket, view)
        right = digest == xxhash.xxh3_64_intdigest(view)
        view[:] = bytes(len(view))
        torch.accelerator.synchronize(0)
        return right and bool((own.cpu() == number).all())


def use(number: int) -> bool:
    """Use loaded tensors at once, on the stream of the engine."""
    source = TensorSource({"a": torch.full((SIZE,), float(number))})
    (bucket,) = plan_buckets(source.manifest)
    own = torch.zeros(SIZE, device="late")
    with buffer_of(bucket.nbytes) as view:
        source.fill(bucket, view)
        DeviceWriter({0: own}).load(bucket, view)
        doubled = own * 2
        return bool((doubled.cpu() == 2 * number).all())


def stage(number: int) -> bool:
    """Exchange weights under requests on a stream of the engine's own, twice."""
    live = {"a": torch.zeros(SIZE, device="late"), "b": torch.zeros(40, 30, device="late").t()}
    target, engine = StagedTensors(live), torch.Stream("late")
    torch.accelerator.synchronize(0)
    for version in (number + 1.0, number + 2.0):
        new = {name: torch.full(tensor.shape, version) for name, tensor in live.items()}
        with engine:
            answers = [torch.stack([tensor.sum() for tensor in live.values()]) for _ in range(3)]
            before = live["a"].clone()
        source = TensorSource(new)
        target.begin_update(source.manifest)
        for bucket in plan_buckets(source.manifest):
            with buffer_of(bucket.nbytes) as view:
                source.fill(bucket, view)
                target.load(bucket, view)
        target.commit()
        with engine:
            after = {name: tensor.clone() for name, tensor in live.items()}
        engine.synchronize()
        if not (before == before[0]).all() or before[0].item() == version:
            return False
        if digest_weights(after) != digest_weights(new) or not torch.equal(answers[0], answers[-1]):
            return False
    return True


def publish(number: int, *, divided: bool) -> bool:
    """Update an engine on the CPU, again after the weights have changed; `divided`: half of them by another source."""
    weights = [torch.full((SIZE,), float(number), device="late") for _ in range(2)]
    live = {name: torch.zeros(SIZE) for name in ("a", "b")}
    entries = [Entry(name, "float32", (SIZE,)) for name in live]
    sources = [
        PartSource(ShardSpec(make_manifest(entries, parts_of(index, (SIZE,), (0,), (SIZE,), 4))), {index: tensor})
        for index, tensor in enumerate(weights)
    ]
    own, held = (
        (sources[0], sources[0].held) if divided else (TensorSource(dict(zip(live, weights, strict=True))), None)
    )
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        publisher = stack.enter_context(relight.Publisher(place, bucket_bytes=2**16))
        engine = stack.enter_context(relight.Receiver(place, model=live))
        assert publisher.wait_for_engines(1, SECONDS)
        if divided:
            link = SourceLink(place, sources[1], version=1, held=sources[1].held, name="other")
            thread = threading.Thread(target=link.run)
            thread.start()
            stack.callback(thread.join)
            stack.callback(link.stop)
            assert publisher.wait_for_sources(1, SECONDS)
        for _ in range(2):
            weights[1].add_(1.0)
            publisher.begin(own, version=1, held=held).wait(SECONDS)
            assert engine.wait_for(1, SECONDS)
        return bool((live["b"] == number + 2).all())


def stream(number: int) -> bool:
    """Send weights that are made one by one, on a stream of the script's own."""
    live = {"a": torch.zeros(SIZE), "b": torch.zeros(SIZE)}
    own = torch.Stream("late")

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        for name in live:
            with own:
                tensor = computed(number + 1.0)
            yield name, tensor

    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        publisher = stack.enter_context(relight.Publisher(place, bucket_bytes=2**14))
        engine = stack.enter_context(relight.Receiver(place, model=live))
        assert publisher.wait_for_engines(1, SECONDS)
        entries = [entry_of(name, torch.float32, (SIZE,)) for name in live]
        send_stream(publisher, entries, made(), version=1)
        assert engine.wait_for(1, SECONDS)
        return all(bool((tensor == number + 1.0).all()) for tensor in live.values())


def replace(module: object, name: str, value: object) -> Plant:
    return lambda patch: patch.setattr(module, name, value)


def settled_once(kind: type) -> Plant:
    """Weights are waited for when a source is made, and not for each update."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        kept = kind.settle  # type: ignore[attr-defined]

        def settle(self: object) -> None:
            if sys._getframe(1).f_code.co_name == "__init__":
                kept(self)

        patch.setattr(kind, "settle", settle)

    return plant


def leave_out(which: int) -> Plant:
    """Leave out one of the two waits of an exchange."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        kept, calls = targets.settle, [0]  # type: ignore[attr-defined]

        def settle(tensors: Iterable[torch.Tensor]) -> None:
            calls[0] += 1
            if calls[0] % 2 != which % 2:
                kept(tensors)

        patch.setattr(targets, "settle", settle)

    return plant


NOTHING = lambda *_: None  # noqa: E731
NO_EVENTS = lambda _: lambda: None  # noqa: E731
BUGS: dict[str, tuple[Callable[[int], bool], Plant]] = {
    "weights are read before they are computed": (lift, replace(weights, "settle", NOTHING)),
    "a part is digested before it has arrived": (lift, replace(Lift, "wait", NOTHING)),
    "a buffer is used again after an error while it is written": (break_off, replace(CopyStreams, "mark", NO_EVENTS)),
    "an update begins before the weights are computed": (
        functools.partial(publish, divided=False),
        settled_once(TensorReader),
    ),
    "a source lends parts before they are computed": (
        functools.partial(publish, divided=True),
        settled_once(TensorReader),
    ),
    "memory is written while it is still used": (load, replace(moving, "settle", NOTHING)),
    "a buffer is given back while it is read": (load, replace(CopyStreams, "mark", NO_EVENTS)),
    "weights are used before they have come": (use, replace(CopyStreams, "mark", NO_EVENTS)),
    "weights are given away before they are computed": (stream, replace(weight_stream, "settle", NOTHING)),
    "weights change under requests": (stage, leave_out(1)),
    "requests see weights that have not come yet": (stage, leave_out(2)),
}


@pytest.mark.parametrize("work", [lift, break_off, load, use, stage, stream])
def test_values_are_right_in_every_order(work: Callable[[int], bool]) -> None:
    assert all(work(number) for number in ROUNDS)


@pytest.mark.parametrize("divided", [False, True])
def test_an_engine_gets_what_was_computed(divided: bool) -> None:
    assert publish(1, divided=divided)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first order that is tried."""
    work, plant = BUGS[name]
    plant(monkeypatch)
    work(0)
    torch.accelerator.synchronize(0)
    assert late.native.races()


def test_a_buffer_is_registered_until_it_is_closed() -> None:
    for _ in range(3):  # at the same address, mostly
        with buffer_of(2**20) as view:
            tensor = torch.frombuffer(view, dtype=torch.uint8)
        assert not tensor.is_pinned()


@pytest.mark.parametrize("far", [False, True], ids=["one host", "over TCP"])
def test_a_replacement_receives_in_its_own_tensors(tmp_path: Path, far: bool) -> None:
    server = make_server(tmp_path)
    for number in range(5):
        state = {name: tensor.to("late") for name, tensor in make_state(number).items()}
        own = blank(state)
        server.offer(offer(state))
        fetched = make_client().fetch(2, 7, [elsewhere(server) if far else server.address], own.get)
        assert all(torch.equal(own[name].cpu(), state[name].cpu()) for name in state)
        assert [t.data_ptr() for t in fetched.tensors] == [own[p].data_ptr() for p in fetched.header.paths]
