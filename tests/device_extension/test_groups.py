"""A generation's group on the late device: its tensors by the device's collectives, those of the host by gloo."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import HashStore

pytestmark = pytest.mark.late
late = pytest.importorskip("tests.device_extension.late", reason="not built: make test-device", exc_type=ImportError)

from relight.device.generic import Generic  # noqa: E402
from relight.training.collectives import generation_group  # noqa: E402
from relight.training.collectives.generation_group import GenerationGroup  # noqa: E402
from relight.training.collectives.operations import Operation  # noqa: E402
from relight.training.torch_private.distributed.groups import make_generation_group  # noqa: E402

NOTHING = lambda *_: None  # noqa: E731


def form_groups(*, has_own_collectives: bool = True) -> list[GenerationGroup]:
    store = HashStore()

    def form(rank: int) -> GenerationGroup:
        device = torch.device("late", rank) if has_own_collectives else None
        return GenerationGroup(make_generation_group(store, rank, 2, "test", device), device=device)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(form, range(2)))


@pytest.fixture
def groups() -> Iterator[list[GenerationGroup]]:
    yield form_groups()
    assert late.native.races() == []


def test_each_tensor_goes_its_own_way(groups: list[GenerationGroup]) -> None:
    for places in (["late:0", "late:1"], ["cpu", "cpu"]):
        tensors = [torch.full((3,), rank + 1.0, device=place) for rank, place in enumerate(places)]
        works = [group.launch("allreduce", [tensor]) for group, tensor in zip(groups, tensors, strict=True)]
        assert [isinstance(work, Operation) for work in works] == [places[0] == "cpu"] * 2
        for group, work in zip(groups, works, strict=True):
            group.await_launched()
            work.wait()
        assert [tensor.cpu().tolist() for tensor in tensors] == [[3.0] * 3] * 2


def test_gloo_sends_and_receives_a_devices_tensors_by_way_of_the_host() -> None:
    """Ranks that share a device, as on one GPU."""
    groups = form_groups(has_own_collectives=False)
    sent, received = torch.arange(3.0, device="late:0"), torch.zeros(3, device="late:1")
    works = [groups[0].launch("send", [sent], 1, 0), groups[1].launch("recv", [received], 0, 0)]
    sent.fill_(7.0)  # what was to be sent is what was there
    for work in works:
        work.wait()
    assert received.cpu().tolist() == [0.0, 1.0, 2.0]
    received.fill_(8.0)
    works[1].wait()  # a second wait writes nothing
    assert received.cpu().unique().tolist() == [8.0]
    assert late.native.races() == []


def test_what_gloo_cannot_end_is_abandoned(groups: list[GenerationGroup]) -> None:
    """As in a group without a device."""
    work = groups[0].launch("allreduce", [torch.ones(3)])  # its peer never comes
    assert not work.is_completed()
    for operation in groups[0]._operations:
        operation.abandon()
    assert work.is_completed()
    groups[1].launch("allreduce", [torch.ones(3)]).wait()  # it does come: gloo's threads end


@pytest.mark.parametrize("is_planted", [False, True], ids=["", "planted: nothing aborts the device's collectives"])
def test_closing_groups_ends_collectives_of_the_device(
    groups: list[GenerationGroup], is_planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The abort of one may wait for those of the others."""
    if is_planted:
        monkeypatch.setattr(generation_group, "abort_backend", NOTHING)
    of_one_rank = [groups[0], form_groups()[0]]

    def close() -> None:
        for group in of_one_rank:
            group.break_connections()

    for group in of_one_rank:
        group.launch("allreduce", [torch.ones(3, device="late:0")])  # its peer never comes
    close()
    waiting = threading.Thread(target=torch.accelerator.synchronize, args=(0,), daemon=True)
    waiting.start()
    waiting.join(0.5 if is_planted else 10)
    assert waiting.is_alive() == is_planted
    monkeypatch.undo()
    close()
    waiting.join(10)
    assert not waiting.is_alive()


def test_planted_groups_are_formed_on_whatever_device_a_thread_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Generic, "use", NOTHING)
    with pytest.raises(RuntimeError, match="duplicate device"):
        form_groups()
