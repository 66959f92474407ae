"""Weights in the memory of devices: on the way to buffers of host memory, and out of them again.

Without a GPU the same copies go from host memory to host memory.
"""

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash

import relight
from relight.errors import TransferError, UsageError
from relight.transfer.io.buffers import Buffer
from relight.transfer.plan.plan import plan_buckets
from relight.transfer.restore.fabric import Address
from relight.transfer.tensors import device
from relight.transfer.tensors.device import LIFT_BYTES, CopyStreams, DeviceWriter, Lift, bytes_on_device
from relight.transfer.tensors.device_staging import DeviceStaging
from relight.transfer.tensors.targets import StagedTensors
from relight.transfer.tensors.weights import TensorSource, TensorWriter, describe, digest_weights, weights_of
from tests.transfer.fleet import DEADLINE_SECONDS, Fleet, digest_of, make_model
from tests.transfer.hosts import blank, elsewhere, make_client, make_server, make_state, offer

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = [
    pytest.param(torch.device("cpu"), id="cpu"),
    pytest.param(torch.device("cuda", 0), id="cuda", marks=on_gpu),
]


def raw(count: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(count)


def noise(count: int, seed: int = 0) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw(count, seed)), dtype=torch.uint8)


@pytest.mark.parametrize("place", DEVICES)
def test_a_large_bucket_is_told_while_the_rest_of_it_is_under_way(place: torch.device) -> None:
    sizes = [64, LIFT_BYTES + 64, 128, 2 * LIFT_BYTES, 64]
    tensors = {f"t{index}": noise(size, index).to(place) for index, size in enumerate(sizes)}
    source = TensorSource(tensors)
    (bucket,) = plan_buckets(source.manifest, 64 * 2**20)
    view = memoryview(bytearray(bucket.nbytes))
    told: list[bytes] = []
    source._write_from_device(bucket, view, lambda part: told.append(bytes(part)))
    assert b"".join(told) == bytes(view) == b"".join(raw(size, index) for index, size in enumerate(sizes))
    assert len(told) == 4
    assert source.fill(bucket, view) == xxhash.xxh3_64_intdigest(b"".join(told))


@pytest.mark.parametrize("place", DEVICES)
def test_each_mark_is_waited_for_once_and_in_order(place: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    marks: list[int] = []
    mark = CopyStreams.mark

    def counted(streams: CopyStreams) -> Callable[[], None]:
        wait, number = mark(streams), len(marks)
        marks.append(number)

        def waiting() -> None:
            waited.append(number)
            wait()

        return waiting

    monkeypatch.setattr(CopyStreams, "mark", counted)
    monkeypatch.setattr(device, "LIFT_BYTES", 128)
    values = noise(1000).to(place)
    view = memoryview(bytearray(1000))
    with Lift(view) as lift:
        lift.add(values, 0, 600, 0)
        lift.add(values, 600, 400, 600)
        lift.mark(1000)
        assert waited == []
        lift.wait(1)
        assert waited == [0]
        lift.wait(128)
        assert waited == [0]
        lift.wait(300)
        assert waited == [0, 1, 2]
        assert view[:300] == raw(1000)[:300]
    assert waited[-1] == marks[-1], "nothing is under way behind the block"
    assert view == raw(1000)


@pytest.mark.parametrize("place", DEVICES)
def test_bytes_of_a_slice_are_where_the_slice_lies(place: torch.device) -> None:
    whole = torch.arange(40, dtype=torch.int64, device=place).view(8, 5)
    part = bytes_on_device(whole[2:4], 8, 16)
    assert bytes(part.tolist()) == bytes(whole.cpu().view(torch.uint8).flatten()[88:104].tolist())
    part.zero_()
    assert whole[2].tolist() == [10, 0, 0, 13, 14]


@pytest.mark.parametrize("place", DEVICES)
def test_values_come_to_tensors_that_stay_where_they_are(place: torch.device) -> None:
    """Captured graphs know them by their address."""
    live = {
        "a": torch.zeros(40, device=place),
        "b": torch.zeros(6, 5, device=place).t(),
        "c": torch.zeros((), device=place),
    }
    target = StagedTensors(live)
    target._staged_like = live  # on a CPU as well
    addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
    stagings = set()
    for version in (1, 2, 3):
        weights = {name: torch.full(tensor.shape, version + 0.5) for name, tensor in live.items()}
        source = TensorSource(weights)
        before = digest_weights(live)
        target.begin_update(source.manifest)
        view = memoryview(bytearray(64))
        for bucket in plan_buckets(source.manifest, 64):
            digest = source.fill(bucket, view)
            assert target.load(bucket, view) == digest
        assert digest_weights(live) == before
        assert isinstance(target._staging, DeviceStaging)
        stagings.add(id(target._staging))
        target.commit()
        assert digest_weights(live) == digest_weights(weights)
        assert {name: tensor.data_ptr() for name, tensor in live.items()} == addresses
    assert len(stagings) == 1, "one copy beside the live one, for all updates"


def test_a_device_without_room_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    manifest = describe({"w": torch.zeros(8)})
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(TransferError, match=r'no room on cpu .* 32 B.*staging="host"'):
        DeviceStaging(manifest, {"w": torch.zeros(8)})


def test_where_the_second_copy_lies_is_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='staging=\'disk\': "device" or "host"'):
        relight.Receiver(tmp_path, model={"w": torch.zeros(1)}, staging="disk")


@pytest.mark.parametrize("place", DEVICES)
def test_what_a_network_brings_is_put_on_the_device_at_the_end(place: torch.device) -> None:
    tensors = {0: torch.zeros(50, dtype=torch.uint8, device=place), 1: torch.zeros(30, dtype=torch.uint8, device=place)}
    source = TensorSource({"a": noise(50, 1), "b": noise(30, 2)})
    (bucket,) = plan_buckets(source.manifest, 128)
    sent = memoryview(bytearray(128))
    digest = source.fill(bucket, sent)
    writer = TensorWriter(tensors)
    writer._device = DeviceWriter(tensors)  # on a CPU as well
    with writer.places(bucket) as places:
        (view,) = places
        view[:] = sent[: bucket.nbytes]
        assert not tensors[0].any()
    assert tensors[0].tolist() == list(raw(50, 1))
    assert tensors[1].tolist() == list(raw(30, 2))
    assert writer.load(bucket, sent) == digest


# --- on a GPU -----------------------------------------------------------------------------------------------------
class TestOnGpu:
    pytestmark = on_gpu

    def test_shared_memory_is_pinned(self) -> None:
        torch.zeros(1, device="cuda")
        buffer = Buffer.create(2**20)
        assert torch.frombuffer(buffer.view, dtype=torch.uint8).is_pinned()
        buffer.close()
        again = Buffer.create(2**20)  # at the same place, most likely
        assert torch.frombuffer(again.view, dtype=torch.uint8).is_pinned()
        again.close()

    @pytest.mark.parametrize("staging", ["device", "host"])
    def test_from_a_gpu_to_engines_on_a_gpu_and_on_a_cpu(self, fleet: Fleet, staging: str) -> None:
        model = make_model(0).cuda()
        fleet.engine("cpu")
        with relight.Receiver(fleet.place, model=model, staging=staging, name="gpu") as receiver:
            fleet.wait_for(2)
            for version in (3, 4, 5):
                weights = weights_of(make_model(version).cuda())
                result = fleet.publisher.publish(relight.TensorSource(weights), version=version)
                assert not result.dropped
                assert receiver.wait_for(version, DEADLINE_SECONDS)
                assert digest_weights(weights_of(model)) == digest_of(version)

    @pytest.mark.parametrize("far", [False, True], ids=["one host", "over TCP"])
    def test_a_replacement_receives_in_its_own_tensors(self, tmp_path: Path, far: bool) -> None:
        server = make_server(tmp_path)
        state = {name: tensor.cuda() for name, tensor in make_state(1).items()}
        own = blank(state)
        server.offer(offer(state))
        address: Address = elsewhere(server) if far else server.address
        fetched = make_client().fetch(2, 7, [address], own.get)
        assert all(torch.equal(own[name], state[name]) for name in state)
        assert [t.data_ptr() for t in fetched.tensors] == [own[p].data_ptr() for p in fetched.header.paths]

    def test_what_was_launched_before_is_published(self) -> None:
        """The values of a kernel that still runs when an update begins."""
        slow = torch.zeros(4096, 4096, device="cuda")
        source = TensorSource({"slow": slow})
        values = torch.randn(4096, 4096, device="cuda")
        for _ in range(50):
            values = (values @ values).clamp(-1, 1)
        slow.copy_(values)
        source.settle()
        for bucket in plan_buckets(source.manifest):
            view = memoryview(bytearray(bucket.nbytes))
            source.fill(bucket, view)
            (piece,) = bucket.pieces
            part = bytes_on_device(slow, piece.start, piece.nbytes).cpu()
            assert torch.equal(torch.frombuffer(view, dtype=torch.uint8), part)

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    def test_a_process_on_one_device_takes_no_memory_of_another(self) -> None:
        """A context takes half a gigabyte. Threads begin on the first device, whatever the main one works on."""
        code = """
import threading, torch
from relight.transfer.io.buffers import Buffer
from relight.transfer.plan.plan import plan_buckets
from relight.transfer.tensors.weights import TensorSource, TensorWriter

tensor = torch.zeros(1000, device="cuda:1")
def move():
    source = TensorSource({"w": tensor})
    (bucket,) = plan_buckets(source.manifest)
    buffer = Buffer.create(bucket.nbytes)
    assert source.fill(bucket, buffer.view) == TensorWriter({0: tensor}).load(bucket, buffer.view)
    buffer.close()
thread = threading.Thread(target=move)
thread.start()
thread.join()
assert [torch._C._cuda_hasPrimaryContext(device) for device in (0, 1)] == [False, True]
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_SECONDS)
