"""Operations of a generation's group end at Stop, also those that gloo itself would never end."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from relight.errors import StepInterrupted
from relight.training.collectives.generation_group import GenerationGroup
from relight.training.collectives.group import RelightProcessGroup
from relight.training.collectives.policy import CodeBetween, NoCodeBetween
from relight.training.torch_private.distributed.groups import make_generation_group

DEADLINE_SECONDS = 20.0


def outcome_of(formed: GenerationGroup, operation: str, *arguments: object) -> list[BaseException | None]:
    """The error with which waiting for the operation ends; empty if it does not end."""
    found: list[BaseException | None] = []

    def wait() -> None:
        try:
            formed.launch(operation, *arguments).wait()
            found.append(None)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(DEADLINE_SECONDS)
    return found


def idle() -> None:
    """Wait until no thread looks after operations of a broken group any more."""
    for thread in threading.enumerate():
        if thread.name == "relight-abandon":
            thread.join()


def test_an_operation_launched_after_the_cut_ends(pair: tuple[GenerationGroup, GenerationGroup]) -> None:
    """The generation may be closed between a rank's look at it and its launch."""
    formed, _ = pair
    formed.break_connections()
    idle()
    (error,) = outcome_of(formed, "allreduce", [torch.ones(3)])
    assert "abandoned" in str(error)
    assert isinstance(error, (StepInterrupted, RuntimeError))


def test_reduce_scatter_keeps_this_ranks_part(pair: tuple[GenerationGroup, GenerationGroup]) -> None:
    outputs = [torch.zeros(2), torch.zeros(2)]
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda rank: pair[rank].launch("_reduce_scatter_base", outputs[rank], torch.arange(4.0) + rank).wait(),
                range(2),
            )
        )
    assert [output.tolist() for output in outputs] == [[1.0, 3.0], [5.0, 7.0]]


def test_an_abandoned_reduce_scatter_leaves_its_output_alone(pair: tuple[GenerationGroup, GenerationGroup]) -> None:
    formed, _ = pair
    formed.break_connections()
    idle()
    output = torch.full((2,), 9.0)
    (error,) = outcome_of(formed, "_reduce_scatter_base", output, torch.ones(4))
    assert "abandoned" in str(error)
    assert output.tolist() == [9.0, 9.0]


LATE_SECONDS = 0.1  # much longer than gloo's waits are cut into elsewhere


def test_a_receive_waits_for_a_late_send(pair: tuple[GenerationGroup, GenerationGroup]) -> None:
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


def test_a_receive_can_be_waited_for_twice_and_knows_its_sender(pair: tuple[GenerationGroup, GenerationGroup]) -> None:
    work = pair[1].launch("recv_anysource", [tensor := torch.zeros(1)], 0)
    assert not work.is_completed()
    pair[0].launch("send", [torch.ones(1)], 1, 0).wait()
    assert work.wait()
    assert work.wait()
    assert (work._source_rank(), tensor.tolist()) == (0, [1.0])


@pytest.mark.parametrize(("operation", "elements"), [("send", 4 << 20), ("recv", 1)])
def test_a_send_and_a_receive_that_gloo_never_ends_end_at_the_cut(
    pair: tuple[GenerationGroup, GenerationGroup], operation: str, elements: int
) -> None:
    """No rank receives what is sent, more than connections take up; none sends what is to be received."""
    formed, _ = pair
    found: list[BaseException] = []

    def wait() -> None:
        try:
            formed.launch(operation, [torch.ones(elements)], 1, 0).wait()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while not formed._operations:  # until it is waited for
        time.sleep(0.001)
    formed.break_connections()
    thread.join(DEADLINE_SECONDS)
    assert isinstance(found[0], StepInterrupted)
    assert "abandoned" in str(found[0])


def test_a_group_is_gone_with_the_last_reference() -> None:
    """Left to the garbage collector, gloo's destructor would run on any thread, and could wait there forever."""
    group = make_generation_group(HashStore(), 0, 1, "test", None)
    formed = GenerationGroup(group)
    formed.sum_over_ranks([1, 0, 0])()
    gone = weakref.ref(formed)
    gc.disable()
    try:
        del formed
        assert gone() is None
    finally:
        gc.enable()


class Open:
    """A step's protected part, of which nothing is ever closed."""

    rank = 0
    closed = False
    launches = launches_of_all = 0
    after_recovery = False
    code_between: CodeBetween = NoCodeBetween()

    def count_collective(self) -> None:
        pass

    def waited(self, nanoseconds: int) -> None:
        pass

    def is_protected(self) -> bool:
        return True

    def cut(self, operation: str) -> None:
        raise AssertionError(operation)

    def unprotected(self, operation: str) -> None:
        raise AssertionError(operation)

    def await_verdict(self) -> bool:
        return False


def test_works_that_are_held_have_their_results_once_what_was_launched_is_awaited(
    pair: tuple[GenerationGroup, GenerationGroup],
) -> None:
    """Also if the connections end afterwards, and an operation of another group is stuck."""
    first = torch.ones(3)
    work = pair[0].launch("allreduce", [first])
    whole, part = torch.arange(4.0), torch.zeros(2)
    scattered = pair[0].launch("_reduce_scatter_base", part, whole)
    threading.Timer(LATE_SECONDS, lambda: pair[1].launch("allreduce", [torch.ones(3)])).start()
    threading.Timer(2 * LATE_SECONDS, lambda: pair[1].launch("_reduce_scatter_base", torch.zeros(2), whole)).start()
    assert not work.is_completed()
    pair[0].await_launched()
    assert first.tolist() == [2.0] * 3
    stuck = pair[0].launch("allreduce", [torch.ones(3)])
    pair[0].break_connections()
    idle()
    with pytest.raises(StepInterrupted):
        stuck.wait()
    assert work.wait()
    assert scattered.wait()
    assert part.tolist() == [0.0, 2.0]


def test_what_was_launched_is_awaited_no_longer_than_its_generation(
    pair: tuple[GenerationGroup, GenerationGroup],
) -> None:
    formed, _ = pair
    formed.launch("allreduce", [torch.ones(3)])
    formed.launch("recv", [torch.ones(3)], 1, 0)  # no rank waits for it, so it is not to be waited for either
    formed.break_connections()
    with pytest.raises((StepInterrupted, RuntimeError)):
        formed.await_launched()


def test_launches_are_counted_and_waits_for_exchanges(pair: tuple[GenerationGroup, GenerationGroup]) -> None:
    gate = Open()
    group = RelightProcessGroup(gate, (0, 1), torch.device("cpu"))
    group.attach(pair[0])
    received = torch.zeros(2)
    exchange = group.recv([received], 1, 0)
    work = group.allreduce([torch.ones(3)])
    assert gate.launches == 2
    pair[1].launch("allreduce", [torch.ones(3)])
    sent = pair[1].launch("send", [torch.ones(2)], 0, 0)
    pair[0].await_launched()
    work.wait()
    assert gate.launches == 2
    exchange.wait()
    exchange.wait()
    assert gate.launches == 3
    assert gate.launches_of_all == 1  # the receive is of two ranks
    assert received.tolist() == [1.0, 1.0]
    sent.wait()
    group.detach()
    group.allreduce([torch.ones(3)])
    assert gate.launches == 3


class Cut(Open):
    """Behind a step's write, in a generation that is closed."""

    closed = True

    def is_protected(self) -> bool:
        return False

    def cut(self, operation: str) -> None:
        pass


class AfterRecovery(Cut):
    """The code after a block, at whose end a recovery was; a replacement does not run it."""

    closed = False
    after_recovery = True


@pytest.mark.parametrize("policy", [Cut, AfterRecovery])
def test_an_operation_that_was_cut_has_this_ranks_own_values(
    pair: tuple[GenerationGroup, GenerationGroup], policy: type[Cut]
) -> None:
    """DDP's reducer reads its bucket from the future, and would read from nowhere."""
    group = RelightProcessGroup(policy(), (0, 1), torch.device("cpu"))
    group.attach(pair[0])
    mine = torch.ones(3)
    found = group.allreduce([mine]).get_future().value()
    assert found[0] is mine
    gathered = [torch.zeros(3), torch.zeros(3)]
    group.allgather([gathered], [mine]).wait()
    assert all(torch.equal(one, mine) for one in gathered)


class CutWhileWaiting(Cut):
    """Between two steps, in a generation that is closed once the operation is launched."""

    closed = False

    def unprotected(self, operation: str) -> None:
        pass

    def await_verdict(self) -> bool:
        return True


def test_an_operation_that_is_cut_while_it_is_waited_for_has_this_ranks_own_values(
    pair: tuple[GenerationGroup, GenerationGroup],
) -> None:
    group = RelightProcessGroup(CutWhileWaiting(), (0, 1), torch.device("cpu"))
    group.attach(pair[0])
    mine, gathered = torch.ones(3), [torch.zeros(3), torch.zeros(3)]
    work = group.allgather([gathered], [mine])
    pair[0].break_connections()
    idle()
    assert work.wait()
    assert all(torch.equal(one, mine) for one in gathered)
