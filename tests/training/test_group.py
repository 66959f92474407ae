"""Operations of an inner group end at Stop, also those that gloo itself would never end."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from relight.errors import StepInterrupted
from relight.training.group import Inner
from relight.training.sockets import GroupSockets
from relight.training.torch_private import make_inner_group

DEADLINE_SECONDS = 20.0


class DeafSockets(GroupSockets):
    """Cutting them fails nothing, as when gloo loses the completion of an operation."""

    def cut(self) -> None:
        pass


@pytest.fixture
def pair() -> tuple[Inner, Inner]:
    """A group of two, both in this process."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: make_inner_group(store, rank, 2, "test", None), range(2))
    return Inner(first, DeafSockets(1)), Inner(second, DeafSockets(1))


def outcome_of(inner: Inner, operation: str, *arguments: object) -> list[BaseException | None]:
    """What waiting for the operation ends with; empty if it does not end."""
    found: list[BaseException | None] = []

    def wait() -> None:
        try:
            inner.launch(operation, *arguments).wait()
            found.append(None)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(DEADLINE_SECONDS)
    return found


def idle() -> None:
    """Until nobody looks after operations of a broken group any more."""
    for thread in threading.enumerate():
        if thread.name == "relight-abandon":
            thread.join()


def test_an_operation_launched_after_the_cut_ends(pair: tuple[Inner, Inner]) -> None:
    """The generation may be closed between a rank's look at it and its launch."""
    inner, _ = pair
    inner.break_connections()
    idle()
    (error,) = outcome_of(inner, "allreduce", [torch.ones(3)])
    assert "abandoned" in str(error)
    assert isinstance(error, (StepInterrupted, RuntimeError))


def test_reduce_scatter_keeps_this_ranks_part(pair: tuple[Inner, Inner]) -> None:
    outputs = [torch.zeros(2), torch.zeros(2)]
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda rank: pair[rank].launch("_reduce_scatter_base", outputs[rank], torch.arange(4.0) + rank).wait(),
                range(2),
            )
        )
    assert [output.tolist() for output in outputs] == [[1.0, 3.0], [5.0, 7.0]]


def test_an_abandoned_reduce_scatter_leaves_its_output_alone(pair: tuple[Inner, Inner]) -> None:
    inner, _ = pair
    inner.break_connections()
    idle()
    output = torch.full((2,), 9.0)
    (error,) = outcome_of(inner, "_reduce_scatter_base", output, torch.ones(4))
    assert "abandoned" in str(error)
    assert output.tolist() == [9.0, 9.0]
