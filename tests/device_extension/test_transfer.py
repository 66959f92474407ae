"""Weights and state on the late device: published, restored, staged; and what happens if one wait is left out."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
import xxhash

from tests.transfer.hosts import blank, elsewhere, make_client, make_server, make_state, offer

pytestmark = pytest.mark.late
late = pytest.importorskip("tests.device_extension.late", reason="not built: make test-device", exc_type=ImportError)

from relight.transfer.plan.plan import plan_buckets  # noqa: E402 - the device is chosen once, when it is there
from relight.transfer.tensors import device as moving  # noqa: E402
from relight.transfer.tensors import targets, weights  # noqa: E402
from relight.transfer.tensors.device import DeviceWriter, Lift  # noqa: E402
from relight.transfer.tensors.targets import StagedTensors  # noqa: E402
from relight.transfer.tensors.weights import TensorSource, digest_weights, load_pieces  # noqa: E402

ROUNDS = range(60)  # orders within which a bug must be noticed
SIZE = 3000
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def all_is_done() -> Iterator[None]:
    yield
    torch.accelerator.synchronize(0)


def computed(value: float) -> torch.Tensor:
    """A tensor that is still being computed."""
    slow = torch.zeros(SIZE, device="late")
    for _ in range(10):
        slow.add_(value / 10)
    slow.fill_(value)
    return slow


def lift(number: int) -> bool:
    """Publish weights right after they were computed: does the buffer have their values, and the digest theirs?"""
    tensors = {"a": computed(number), "strided": computed(number + 0.5).view(50, 60).t()}
    source = TensorSource(tensors)
    for _ in range(2):  # again after the next step
        tensors["a"].add_(1.0)
        tensors["strided"].mul_(2.0)
        source.settle()
        (bucket,) = plan_buckets(source.manifest)
        view = memoryview(bytearray(bucket.nbytes))
        digest = source.fill(bucket, view)
        if digest != xxhash.xxh3_64_intdigest(view):
            return False
        expected = {name: tensor.cpu() for name, tensor in tensors.items()}
        got = {name: torch.zeros(tensor.shape) for name, tensor in expected.items()}
        load_pieces(bucket, view, {i: t.data_ptr() for i, t in enumerate(got.values())})
        if not all(torch.equal(got[name], expected[name]) for name in got):
            return False
    return True


def load(number: int) -> bool:
    """Take a bucket into tensors that a kernel still uses, from a buffer that is used again at once."""
    source = TensorSource({"a": torch.full((SIZE,), float(number))})
    (bucket,) = plan_buckets(source.manifest)
    view = memoryview(bytearray(bucket.nbytes))
    own = computed(-1.0)
    address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    late.native.register_host(address, len(view))  # as a device does that reads it by itself
    try:
        source.fill(bucket, view)
        digest = DeviceWriter({0: own}).load(bucket, view)
        right = digest == xxhash.xxh3_64_intdigest(view)
        view[:] = bytes(len(view))
        torch.accelerator.synchronize(0)
        return right and bool((own.cpu() == number).all())
    finally:
        torch.accelerator.synchronize(0)
        late.native.unregister_host(address)


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
            view = memoryview(bytearray(bucket.nbytes))
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


def replace(module: object, name: str, value: object) -> Plant:
    return lambda patch: patch.setattr(module, name, value)


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
BUGS = {
    "weights are read before they are computed": (lift, replace(weights, "settle", NOTHING)),
    "a part is digested before it has arrived": (lift, replace(Lift, "wait", NOTHING)),
    "memory is written while it is still used": (load, replace(moving, "settle", NOTHING)),
    "a buffer is given back while it is read": (load, replace(moving.CopyStreams, "mark", lambda _: lambda: None)),
    "weights change under requests": (stage, leave_out(1)),
    "requests see weights that have not come yet": (stage, leave_out(2)),
}


@pytest.mark.parametrize("work", [lift, load, stage])
def test_values_are_right_in_every_order(work: Callable[[int], bool]) -> None:
    assert all(work(number) for number in ROUNDS)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work, plant = BUGS[name]
    plant(monkeypatch)
    assert any(not work(number) for number in ROUNDS)


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
