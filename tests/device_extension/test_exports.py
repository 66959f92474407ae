"""Memory of the late device that other processes use: what part of it they see, and when."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

pytestmark = pytest.mark.late
late = pytest.importorskip("tests.device_extension.late", reason="not built: make test-device", exc_type=ImportError)

from tests.device_extension.peer import add_one  # noqa: E402

SECONDS = 60.0
ROUNDS = range(20)  # orders within which what is not waited for is seen too early


@pytest.fixture
def peer() -> Iterator[Connection]:
    """Another process that runs `add_one`."""
    own, others = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=add_one, args=(others,))
    process.start()
    others.close()
    yield own
    own.send(None)
    process.join(SECONDS)
    assert process.exitcode == 0


def exchange(peer: Connection, values: torch.Tensor) -> float:
    """Have the other process add one; return the first value that it saw before."""
    peer.send(late.native.export_memory(values))
    assert peer.poll(SECONDS)
    seen, races = peer.recv()
    assert races == []
    return float(seen)


def test_both_processes_see_the_same_memory(peer: Connection) -> None:
    whole = torch.zeros(5000, device="late")
    for part in (whole, whole[1000:2000]):
        part.fill_(3.0)
        torch.accelerator.synchronize(0)
        assert exchange(peer, part) == 3.0
        assert bool((part == 4.0).all())
    assert whole[0].item() == whole[2000].item() == 4.0
    assert late.native.races() == []


def test_an_export_orders_nothing(peer: Connection) -> None:
    """Another process sees the work of this one once it is done."""

    def seen(waited: bool) -> float:
        values = torch.zeros(1000, device="late")
        torch.accelerator.synchronize(0)
        values.fill_(1.0)
        if waited:
            torch.accelerator.synchronize(0)
        found = exchange(peer, values)
        torch.accelerator.synchronize(0)
        return found

    assert {seen(True) for _ in ROUNDS} == {1.0}
    assert 0.0 in {seen(False) for _ in ROUNDS}


def test_memory_of_a_process_that_is_gone_cannot_be_imported() -> None:
    with pytest.raises(RuntimeError, match="is gone"):
        late.native.import_memory((2**22 + 1, 3, 0, 4096), 0)


def test_imported_memory_is_released_when_nothing_uses_it() -> None:
    exported = torch.zeros(1000, device="late")
    torch.accelerator.synchronize(0)
    imported = late.native.import_memory(late.native.export_memory(exported), 0)
    imported.add_(1)
    torch.accelerator.synchronize(0)
    del imported
    assert late.native.races() == []
    imported = late.native.import_memory(late.native.export_memory(exported), 0)
    imported.add_(1)
    del imported
    torch.accelerator.synchronize(0)
    assert late.native.races() == ["imported memory is released while the device still uses it"]
