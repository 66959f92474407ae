"""Operations of an inner group end at Stop, also those that gloo itself would never end."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from relight.errors import StepInterrupted
from relight.training.group import Inner
from relight.training.torch_private import make_inner_group

DEADLINE_SECONDS = 20.0


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


LATE_SECONDS = 0.1  # much longer than gloo's waits are cut into elsewhere


def test_a_receive_waits_for_a_late_send(pair: tuple[Inner, Inner]) -> None:
    """A wait with a limit that passes would close the group's connections."""
    sent, received = [torch.arange(3.0), torch.ones(2)], [torch.zeros(3), torch.zeros(2)]
    works = [pair[1].launch("recv", [tensor], 0, 0) for tensor in received]

    def send() -> None:
        for tensor in sent:
            time.sleep(LATE_SECONDS)  # late, so that the receiver is waiting
            assert pair[0].launch("send", [tensor], 1, 0).wait()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(send)
        assert all(work.wait() for work in works)
        done.result()
    assert [tensor.tolist() for tensor in received] == [tensor.tolist() for tensor in sent]
    assert all(work.is_completed() for work in works)


def test_a_receive_can_be_waited_for_twice_and_knows_its_sender(pair: tuple[Inner, Inner]) -> None:
    work = pair[1].launch("recv_anysource", [tensor := torch.zeros(1)], 0)
    assert not work.is_completed()
    pair[0].launch("send", [torch.ones(1)], 1, 0).wait()
    assert work.wait()
    assert work.wait()
    assert (work._source_rank(), tensor.tolist()) == (0, [1.0])


@pytest.mark.parametrize(("operation", "elements"), [("send", 4 << 20), ("recv", 1)])
def test_a_send_and_a_receive_that_gloo_never_ends_end_at_the_cut(
    pair: tuple[Inner, Inner], operation: str, elements: int
) -> None:
    """Nobody receives what is sent, more than connections take up; nobody sends what is to be received."""
    inner, _ = pair
    found: list[BaseException] = []

    def wait() -> None:
        try:
            inner.launch(operation, [torch.ones(elements)], 1, 0).wait()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while not inner._operations:  # until it is waited for
        time.sleep(0.001)
    inner.break_connections()
    thread.join(DEADLINE_SECONDS)
    assert isinstance(found[0], StepInterrupted)
    assert "abandoned" in str(found[0])


def test_a_group_is_gone_with_the_last_reference() -> None:
    """Left to the garbage collector, gloo's destructor would run on any thread, and could wait there for ever."""
    group = make_inner_group(HashStore(), 0, 1, "test", None)
    inner = Inner(group)
    inner.fence([1, 0, 0])()
    gone = weakref.ref(inner)
    gc.disable()
    try:
        del inner
        assert gone() is None
    finally:
        gc.enable()
