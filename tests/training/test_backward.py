"""A backward pass waits at its end for what was launched in it, and ends with the generation."""

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from relight.errors import StepInterrupted
from relight.training.collectives.generation_group import GenerationGroup
from relight.training.worker.step.phases import FEWEST_GATES, MOST_GATES, BackwardHooks, gates_for, spread
from tests.training.test_group import DEADLINE_SECONDS, idle

Pair = tuple[GenerationGroup, GenerationGroup]
Launch = Callable[[GenerationGroup, list[torch.Tensor]], Any]


@pytest.fixture(params=["by a hook", "by DDP's reducer"])
def launch(request: pytest.FixtureRequest) -> Launch:
    """Ways to start an all-reduce in a backward pass."""
    if request.param == "by a hook":
        return lambda formed, tensors: formed.launch("allreduce", tensors)
    return lambda formed, tensors: formed.reduce_bucket(tensors)


def reduce_in_backward(formed: GenerationGroup, futures: list[Any], launch: Launch) -> Callable[[torch.Tensor], None]:
    """A hook that does what DDP's reducer does: launch, and ask for the future."""

    def hook(gradient: torch.Tensor) -> None:
        futures.append(launch(formed, [gradient]).get_future())

    return hook


def peer_comes(formed: GenerationGroup, times: int = 1) -> None:
    for _ in range(times):
        formed.launch("allreduce", [torch.full((2,), 10.0)]).wait()


def test_the_result_is_there_when_the_backward_pass_is_over(pair: Pair, launch: Launch) -> None:
    """Without anybody having waited for the future."""
    weight = torch.ones(2, requires_grad=True)
    seen: list[torch.Tensor] = []
    futures: list[Any] = []
    loss = (weight * 3).sum()
    weight.register_hook(seen.append)
    weight.register_hook(reduce_in_backward(pair[0], futures, launch))
    with ThreadPoolExecutor(1) as pool:
        peer = pool.submit(late, lambda: peer_comes(pair[1]))
        loss.backward()
        assert seen[0].tolist() == [13.0, 13.0]
        assert futures[0].done()
        peer.result()


def test_all_that_a_backward_pass_launched_is_there_at_its_end(pair: Pair, launch: Launch) -> None:
    """The first one is large, so gloo may be done with the last one before."""
    weights = [torch.ones(size, requires_grad=True) for size in (2, 2, 2**20)]
    seen: list[torch.Tensor] = []
    for weight in weights:
        weight.register_hook(seen.append)
        weight.register_hook(reduce_in_backward(pair[0], [], launch))
    loss = sum((weight * 1).sum() for weight in weights)

    def come() -> None:
        for size in (2**20, 2, 2):
            pair[1].launch("allreduce", [torch.full((size,), 10.0)]).wait()

    with ThreadPoolExecutor(1) as pool:
        peer = pool.submit(late, come)
        torch.as_tensor(loss).backward()
        assert [(len(gradient), set(gradient.tolist())) for gradient in seen] == [(n, {11.0}) for n in (2**20, 2, 2)]
        peer.result()


@pytest.mark.parametrize("comes_to", [0, 1])
def test_a_backward_pass_that_lacks_one_of_several_ends_at_the_cut(pair: Pair, launch: Launch, comes_to: int) -> None:
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    futures: list[Any] = []
    for weight in weights:
        weight.register_hook(reduce_in_backward(pair[0], futures, launch))
    found: list[type[BaseException]] = []

    def run() -> None:
        try:
            (weights[0] * weights[1]).sum().backward()
        except BaseException as error:
            found.append(type(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    peer_comes(pair[1], comes_to)
    while len(futures) < len(weights) or not all(future.done() for future in futures[:comes_to]):
        time.sleep(0.001)
    pair[0].break_connections()
    thread.join(DEADLINE_SECONDS)
    assert found in ([StepInterrupted], [RuntimeError])
    idle()


def late(call: Callable[[], None]) -> None:
    time.sleep(0.1)  # so that the backward pass is at its end, and waits
    call()


def test_a_nested_backward_pass_waits_for_its_own(pair: Pair, launch: Launch) -> None:
    weight = torch.ones(2, requires_grad=True)
    seen: list[torch.Tensor] = []
    weight.register_hook(seen.append)
    weight.register_hook(reduce_in_backward(pair[0], [], launch))
    inside = checkpoint(lambda x: weight * x, torch.ones(2, requires_grad=True), use_reentrant=True)
    other = torch.ones(2, requires_grad=True)
    other.register_hook(seen.append)
    other.register_hook(reduce_in_backward(pair[0], [], launch))
    with ThreadPoolExecutor(1) as pool:
        peer = pool.submit(late, lambda: peer_comes(pair[1], 2))
        (inside * other).sum().backward()
        assert [gradient.tolist() for gradient in seen] == [[11.0, 11.0]] * 2
        peer.result()


def test_what_a_callback_launches_is_waited_for_too(pair: Pair, launch: Launch) -> None:
    """As with DDP's static graph in its first iteration."""
    weight, result = torch.ones(2, requires_grad=True), torch.ones(2)
    hook = reduce_in_backward(pair[0], [], launch)

    def at_the_end(gradient: torch.Tensor) -> None:
        hook(gradient)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: hook(result))

    weight.register_hook(at_the_end)
    with ThreadPoolExecutor(1) as pool:
        peer = pool.submit(late, lambda: peer_comes(pair[1], 2))
        weight.sum().backward()
        assert result.tolist() == [11.0, 11.0]
        peer.result()


def test_a_backward_pass_whose_peers_never_come_ends_at_the_cut(pair: Pair, launch: Launch) -> None:
    weight = torch.ones(2, requires_grad=True)
    futures: list[Any] = []
    found: list[type[BaseException]] = []  # an error would hold its frames, and the group with them
    weight.register_hook(reduce_in_backward(pair[0], futures, launch))

    def run() -> None:
        try:
            weight.sum().backward()
        except BaseException as error:
            found.append(type(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not futures:
        time.sleep(0.001)
    pair[0].break_connections()
    thread.join(DEADLINE_SECONDS)
    assert found == [StepInterrupted]
    idle()


@pytest.mark.parametrize("comes_to_its_end", [True, False])
def test_nothing_is_left_to_the_garbage_collector(pair: Pair, launch: Launch, comes_to_its_end: bool) -> None:
    """It may run in a process that a script forks, where gloo's destructor waits forever."""
    held: list[weakref.ref[Any]] = []
    reduce = reduce_in_backward(pair[0], [], launch)

    def reduce_and_note(gradient: torch.Tensor) -> None:
        reduce(gradient)
        held.append(weakref.ref(pair[0]._backward._operations[-1]))

    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(reduce_and_note)
    weight.register_hook(lambda gradient: None if comes_to_its_end else 1 / 0)
    with ThreadPoolExecutor(1) as pool:
        peer = pool.submit(peer_comes, pair[1])
        with contextlib.nullcontext() if comes_to_its_end else pytest.raises(ZeroDivisionError):
            weight.sum().backward()
        peer.result()
    while not all(operation.is_over() for operation in pair[0]._operations):
        time.sleep(0.001)
    gc.disable()
    try:
        pair[0]._operations.clear()
        if not comes_to_its_end:
            pair[0].retire()
        assert [ref() for ref in held] == [None]
    finally:
        gc.enable()


def test_outside_a_backward_pass_a_future_ends_at_the_cut_too(pair: Pair, launch: Launch) -> None:
    future = launch(pair[0], [torch.ones(2)]).get_future()
    pair[0].break_connections()
    with pytest.raises(RuntimeError, match="abandoned"):
        future.wait()
    idle()


def test_a_future_outside_a_backward_pass_has_the_result(pair: Pair) -> None:
    tensor = torch.ones(2)
    future = pair[0].launch("allreduce", [tensor]).get_future()
    peer_comes(pair[1])
    assert [result.tolist() for result in future.wait()] == [[11.0, 11.0]]
    output = torch.zeros(2)
    scattered = pair[0].launch("_reduce_scatter_base", output, torch.ones(4)).get_future()
    pair[1].launch("_reduce_scatter_base", torch.zeros(2), torch.ones(4)).wait()
    assert [result.tolist() for result in scattered.wait()] == [[2.0, 2.0]]
    assert output.tolist() == [2.0, 2.0]


def test_gates_are_as_many_as_a_backward_pass_is_long() -> None:
    few = FEWEST_GATES
    assert [gates_for(seconds) for seconds in (0.0, 0.02, 0.08, 0.081, 0.5, 60.0)] == [few, few, few, 5, 25, MOST_GATES]
    parameters = [torch.zeros(1) for _ in range(33)]
    assert len(spread(parameters, MOST_GATES)) == 17
    assert len(spread(parameters, 1)) == 1
    assert spread(parameters[:5], MOST_GATES) == parameters[:5]
    assert spread([], 4) == []


class Closed(Exception):
    pass


def refuse(parameter: torch.Tensor) -> None:
    raise Closed


def test_gates_that_another_thread_shuts_end_a_backward_pass_that_runs() -> None:
    """Those that it has yet to come to: here it waits inside for the other thread."""
    early, late = (torch.ones(2, requires_grad=True) for _ in range(2))
    gates = BackwardHooks(refuse)
    gates.place([early])

    def shut_meanwhile(gradient: torch.Tensor) -> None:
        thread = threading.Thread(target=gates.shut)
        thread.start()
        thread.join(DEADLINE_SECONDS)

    late.register_hook(shut_meanwhile)
    with pytest.raises(Closed):
        ((early * 2) * late).sum().backward()
    gates.open()
    early.grad = None
    (early * 2).sum().backward()
    assert early.grad is not None


def test_gates_are_shut_once_and_moved_open() -> None:
    first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
    gates = BackwardHooks(refuse)
    gates.place([first])
    gates.shut()
    gates.shut()
    gates.place([second])
    (first + second).sum().backward()
    gates.shut()
    first.sum().backward()
    with pytest.raises(Closed):
        second.sum().backward()


def test_gates_at_what_is_frozen_for_a_moment_end_a_backward_pass_once_it_is_trained() -> None:
    """They are shut by the thread that hears orders, which no refusal of torch may end."""
    frozen_later, frozen_first = torch.ones(2, requires_grad=True), torch.ones(2)
    gates = BackwardHooks(refuse)
    gates.place([frozen_later, frozen_first])
    frozen_later.requires_grad_(False)
    gates.shut()
    for parameter in (frozen_later, frozen_first):
        parameter.requires_grad_(True)
        with pytest.raises(Closed):
            parameter.sum().backward()
    gates.open()
    for parameter in (frozen_later, frozen_first):
        parameter.grad = None
        parameter.sum().backward()
        assert parameter.grad is not None
