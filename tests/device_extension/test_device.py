"""The late device itself: it computes as a CPU does, and it is as unforgiving as it says."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

pytestmark = pytest.mark.late
late = pytest.importorskip("tests.device_extension.late", reason="not built: make test-device", exc_type=ImportError)

SEEDS = range(40)  # tries within which what is not ordered is seen out of order


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    late.native.set_device(0)
    late.native.races()
    yield torch.device("late", 0)
    torch.accelerator.synchronize(0)
    assert late.native.races() == []


def train(device: torch.device, fused: bool) -> torch.Tensor:
    """Return the parameters of a small model after some steps, with dropout of the device's own."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused or None)
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        x = torch.randn(6, 8, generator=generator)
        model(x.to(device)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()


def test_operators_have_the_cpus_values(device: torch.device) -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    own = x.to(device)
    assert own.device == device
    for call in (torch.sin, torch.cumsum, torch.softmax, lambda t, d: (t @ t.t())[d], lambda t, d: t.t()[1:3].sum(d)):
        arguments = () if call is torch.sin else (0,)
        assert torch.equal(call(own, *arguments).cpu(), call(x, *arguments))
    assert own[own > 0].cpu().equal(x[x > 0])
    assert own.max().item() == x.max().item()


def test_autocast_computes_in_the_lower_precision(device: torch.device) -> None:
    layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)).to(device)
    with torch.autocast("late", dtype=torch.bfloat16):
        assert layers[0](torch.ones(2, 4, device=device)).dtype == torch.bfloat16
        assert layers(torch.ones(2, 4, device=device)).dtype == torch.float32
    layers.bfloat16()(torch.ones(2, 4, device=device, dtype=torch.bfloat16)).sum().backward()
    assert layers[1].weight.grad is not None
    assert layers[1].weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("fused", [False, True])
def test_a_training_is_repeatable(device: torch.device, fused: bool) -> None:
    assert torch.equal(train(device, fused), train(device, fused))


def test_the_host_cannot_read_its_memory() -> None:
    code = (
        "import ctypes, torch, tests.device_extension.late\n"
        "ctypes.string_at(torch.ones(4, device='late').data_ptr(), 4)"
    )
    died = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert died.returncode == -signal.SIGSEGV


def test_a_stream_that_waits_for_no_event_is_seen_too_early(device: torch.device) -> None:
    """And one that waits is not."""
    other = torch.Stream(device)

    def seen(ordered: bool) -> float:
        source, target = torch.zeros(8, device=device), torch.zeros(8, device=device)
        torch.accelerator.synchronize()
        source.fill_(1.0)
        if ordered:
            other.wait_stream(torch.accelerator.current_stream())
        with other:
            target.copy_(source)
        other.synchronize()
        return target[0].item()

    assert {seen(True) for _ in SEEDS} == {1.0}
    assert late.native.races() == []
    assert {seen(False) for _ in SEEDS} == {0.0, 1.0}
    assert "copy (stream" in late.native.races()[0]


def test_memory_freed_under_another_stream_is_used_again(device: torch.device) -> None:
    """Unless the other stream is recorded."""
    other = torch.Stream(device)

    def seen(recorded: bool) -> float:
        source, target = torch.ones(8, device=device), torch.zeros(8, device=device)
        torch.accelerator.synchronize()
        with other:
            target.copy_(source)
        if recorded:
            source.record_stream(other)
        del source
        torch.full((8,), 2.0, device=device)
        torch.accelerator.synchronize()
        return target[0].item()

    assert {seen(True) for _ in SEEDS} == {1.0}
    assert late.native.races() == []
    assert len({seen(False) for _ in SEEDS}) > 1
    assert late.native.races()[0].startswith("allocation (stream")


@pytest.mark.parametrize("direction", ["to the device", "to the host"])
def test_a_copy_that_is_not_waited_for_is_late(device: torch.device, direction: str) -> None:
    def seen(waited: bool) -> float:
        host = torch.ones(4096, pin_memory=True)
        assert host.is_pinned()
        own = torch.full((4096,), 3.0, device=device)
        torch.accelerator.synchronize()
        if direction == "to the device":
            own.copy_(host, non_blocking=True)
        else:
            host.copy_(own, non_blocking=True)
        if waited:
            torch.accelerator.synchronize()
        if direction == "to the host":
            return host[0].item()
        host.fill_(2.0)
        return own[0].item()

    right = 1.0 if direction == "to the device" else 3.0
    assert {seen(True) for _ in SEEDS} == {right}
    assert late.native.races() == []
    assert {seen(False) for _ in SEEDS} - {right}
    assert "the host uses byte 0 of 16384 bytes of pinned memory" in late.native.races()[0]


def test_a_batch_norms_statistics_are_written(device: torch.device) -> None:
    norm = nn.BatchNorm1d(4).to(device)
    x, stream = torch.randn(8, 4).to(device), torch.Stream(device)
    torch.accelerator.synchronize(0)
    with stream:
        norm(x)
    norm.get_buffer("running_mean").clone()
    races = late.native.races()
    assert len(races) == 1, races
    assert "native_batch_norm (stream" in races[0]


def test_operations_on_different_parts_of_a_tensor_do_not_race(device: torch.device) -> None:
    """And on the same part they do, whatever the order in which they run."""
    whole, other = torch.zeros(8, device=device), torch.Stream(device)
    torch.accelerator.synchronize()
    with other:
        whole[:4].fill_(1.0)
    whole[4:].fill_(2.0)
    assert late.native.races() == []
    whole[3:5].add_(1.0)
    races = late.native.races()
    assert races
    assert all("aten::add " in race and "aten::fill_ " in race for race in races), races


def test_an_error_on_the_device_is_told_where_the_host_waits(device: torch.device) -> None:
    rows = torch.ones(3, 2, device=device)
    rows.index_select(0, torch.tensor([7], device=device))
    with pytest.raises(RuntimeError, match="failed on the late device"):
        torch.accelerator.synchronize()


def test_a_full_device_says_so(device: torch.device) -> None:
    late.native.set_memory_limit(2**20)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="late device 0 out of memory"):
            torch.empty(2**21, dtype=torch.uint8, device=device)
    finally:
        late.native.set_memory_limit(2**33)


class TestCollectives:
    def form(self, devices: list[int]) -> list[object]:
        store = HashStore()

        def make(rank: int) -> object:
            late.native.set_device(devices[rank])
            return late.native.LateBackend(store, rank, len(devices))

        with ThreadPoolExecutor(len(devices)) as pool:
            return list(pool.map(make, range(len(devices))))

    def test_two_ranks_on_one_device_are_refused(self) -> None:
        with pytest.raises(RuntimeError, match="duplicate device"):
            self.form([1, 1])

    def test_a_wait_orders_streams_and_does_not_wait(self) -> None:
        first, second = self.form([0, 1])
        values = [torch.full((4,), rank + 1.0, device=f"late:{rank}") for rank in range(2)]
        work = first.allreduce([values[0]])  # type: ignore[attr-defined]
        work.wait()
        assert not work.is_completed(), "its peer has not begun"
        late.native.set_device(1)
        second.allreduce([values[1]]).wait()  # type: ignore[attr-defined]
        assert [value.cpu().tolist() for value in values] == [[3.0] * 4] * 2

    def test_an_abort_waits_for_what_hangs_in_another_communicator(self) -> None:
        (one, _), (other, _) = self.form([0, 1]), self.form([0, 1])
        for backend in (one, other):
            backend.allreduce([torch.ones(4, device="late:0")])  # type: ignore[attr-defined]
        aborting = threading.Thread(target=one.abort)  # type: ignore[attr-defined]
        aborting.start()
        aborting.join(0.3)
        assert aborting.is_alive()
        other.abort()  # type: ignore[attr-defined]
        aborting.join(10)
        assert not aborting.is_alive()

    def test_without_a_peer_it_hangs_until_it_is_aborted(self) -> None:
        first, _ = self.form([0, 1])
        value = torch.ones(4, device="late:0")
        work = first.allreduce([value])  # type: ignore[attr-defined]
        waiting = threading.Thread(target=torch.accelerator.synchronize, args=(0,))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        first.abort()  # type: ignore[attr-defined]
        waiting.join(10)
        assert not waiting.is_alive()
        with pytest.raises(RuntimeError, match="aborted"):
            work.wait()
        with pytest.raises(RuntimeError, match="aborted"):
            first.allreduce([value])  # type: ignore[attr-defined]
