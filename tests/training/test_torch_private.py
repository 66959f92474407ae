"""The private interfaces of torch that relight leans on, each tried against the installed version."""

import contextlib
import multiprocessing
import queue
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from relight.training.carried.code.refs import is_own_optimizer
from relight.training.collectives.group import RelightProcessGroup
from relight.training.state.values.marks import changed, put_back, remember
from relight.training.torch_private.autograd import (
    RUN_BACKWARD,
    at_backward,
    is_compiled_transform,
    not_compiled,
    only_inlined,
    reset_scaler,
)
from relight.training.torch_private.distributed.ddp import BucketLayout, watch_wrappers, wrappers_made
from relight.training.torch_private.distributed.groups import OPERATIONS, make_detached_group, make_generation_group
from relight.training.torch_private.tensors import components_of

WORLD = 2
DEADLINE_SECONDS = 60
WEIGHT = torch.ones(2, requires_grad=True)


def test_operations_exist_under_their_names() -> None:
    assert {"allreduce", "broadcast", "allgather", "barrier", "reduce_scatter", "send", "recv"} <= set(OPERATIONS)


def test_detached_group_completes_alone() -> None:
    group = make_detached_group(3, 4, torch.device("cpu"))
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    outputs = [torch.zeros(2) for _ in range(4)]
    group.allgather([outputs], [torch.full((2,), 5.0)]).wait()
    group.barrier().wait()
    assert torch.equal(tensor, torch.ones(3))
    assert all(torch.equal(o, torch.full((2,), 5.0)) for o in outputs)


class FirstRank:
    """As much of a policy as a detached group asks."""

    rank = 0


class Told(RelightProcessGroup):
    """Alone; notes for each all-reduce whether C++ called it in a backward pass."""

    def __init__(self) -> None:
        policy: Any = FirstRank()
        super().__init__(policy, (0,), torch.device("cpu"))
        self.detach()
        self.seen: list[bool] = []

    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(sys._getframe(1).f_code is RUN_BACKWARD)
        return super().allreduce(*args, **kwargs)


def test_what_the_reducer_launches_is_told_from_what_hooks_launch() -> None:
    group = Told()
    model = DDP(nn.Linear(2, 2), process_group=group)
    model(torch.ones(1, 2)).sum().backward()
    assert group.seen == [True]
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda gradient: group.allreduce([gradient]) and None)
    weight.sum().backward()
    group.allreduce([torch.ones(1)])
    assert group.seen == [True, False, False]


def test_a_model_averager_keeps_its_counter_in_an_attribute_that_is_looked_at() -> None:
    averager = PeriodicModelAverager(period=2, warmup_steps=1, process_group=Told())
    weight = nn.Parameter(torch.ones(2))
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD([weight], 0.1), averager)
    assert is_own_optimizer(optimizer)
    mark = remember(averager)
    averager.average_parameters([weight])
    assert changed(mark, averager)
    assert put_back(mark).step == 0


START: list[Callable[[torch.Tensor], object]] = [
    torch.Tensor.backward,
    torch.autograd.backward,
    lambda loss: torch.autograd.grad(loss, [WEIGHT]),
    lambda loss: loss.backward(inputs=[WEIGHT]),
]


@pytest.mark.parametrize("start", START)
def test_a_backward_pass_is_told_of_before_it_begins(start: Callable[[torch.Tensor], object]) -> None:
    told: list[str] = []
    loss = (WEIGHT * 2).sum()
    loss.register_hook(lambda _: told.append("gradient"))
    undo = at_backward(lambda: told.append("begins"))
    try:
        start(loss)
    finally:
        undo()
    assert told == ["begins", "gradient"]
    start((WEIGHT * 2).sum())
    assert told == ["begins", "gradient"]


def test_what_is_raised_before_a_backward_pass_comes_out_of_it() -> None:
    undo = at_backward(lambda: 1 // 0)  # type: ignore[arg-type]
    try:
        with pytest.raises(ZeroDivisionError):
            WEIGHT.sum().backward()
    finally:
        undo()


def test_scaler_forgets_an_aborted_step() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    reset_scaler(scaler)
    scaler.unscale_(optimizer)


def test_a_scaler_that_is_not_in_use_has_nothing_to_forget() -> None:
    reset_scaler(torch.amp.GradScaler("cpu", enabled=False))


def run_ranks(body: Callable[[int, str], Any]) -> list[Any]:
    """Run `body(rank, directory)` in WORLD forked processes; results in rank order."""
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()

    def child(rank: int, directory: str) -> None:
        torch.set_num_threads(1)
        results.put((rank, body(rank, directory)))

    with tempfile.TemporaryDirectory() as directory:
        children = [context.Process(target=child, args=(rank, directory)) for rank in range(WORLD)]
        for process in children:
            process.start()
        try:
            found = dict(results.get(timeout=DEADLINE_SECONDS) for _ in range(WORLD))
        except queue.Empty:
            pytest.fail("a rank did not answer in time")
        finally:
            for process in children:
                process.kill()
                process.join()
    return [found[rank] for rank in range(WORLD)]


def all_reduce_in_inner_group(rank: int, directory: str) -> list[float]:
    store = FileStore(str(Path(directory) / "store"), WORLD)
    group = make_generation_group(store, rank, WORLD, "test", None)
    tensor = torch.full((2,), float(rank + 1))
    group.allreduce([tensor]).wait()
    return tensor.tolist()


def test_inner_group_reduces() -> None:
    assert run_ranks(all_reduce_in_inner_group) == [[3.0, 3.0]] * WORLD


def interrupted_training(stop_at: int | None) -> Callable[[int, str], str]:
    """Three steps of DDP, of which one may be aborted in the middle of backward and repeated."""

    class Stop(RuntimeError):
        pass

    def body(rank: int, directory: str) -> str:
        store = FileStore(str(Path(directory) / "store"), WORLD)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)])
        ddp = DDP(model, bucket_cap_mb=1)
        layout = BucketLayout(ddp)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        armed = [False]

        def gate(_: torch.Tensor) -> None:
            if armed[0]:
                raise Stop

        list(ddp.parameters())[8].register_post_accumulate_grad_hook(gate)
        for step in range(3):
            for attempt in range(2):
                armed[0] = step == stop_at and attempt == 0
                layout.begin_step(step)
                batch = torch.randn(4, 128, generator=torch.Generator().manual_seed(10 * step + rank))
                try:
                    ddp(batch).square().mean().backward()
                except Stop:
                    layout.reset(step)
                    optimizer.zero_grad()
                    continue
                layout.settle(step)
                optimizer.step()
                optimizer.zero_grad()
                break
        return " ".join(str(p.detach().double().sum().item()) for p in ddp.parameters())

    return body


@pytest.mark.parametrize("stop_at", [0, 1, 2])
def test_reducer_survives_an_aborted_backward_with_the_same_bits(stop_at: int) -> None:
    assert run_ranks(interrupted_training(stop_at)) == run_ranks(interrupted_training(None))


def test_a_layout_that_was_settled_is_kept_through_a_reset() -> None:
    """DDP would rebuild once more: in a step in which a replacement, which has another reducer, does not."""
    ranks: list[Any] = run_ranks(settled_and_reset)
    assert ranks[0] == ranks[1]
    before, after, replacement = ranks[0]
    assert after == before
    assert replacement == before


def test_a_layout_from_before_the_loop_is_kept() -> None:
    """As under torchrun: a script may train for a moment before the loop, to find a learning rate."""
    for rebuilt, kept, initial in run_ranks(trained_before_the_loop):
        assert kept == rebuilt != initial


class Backwards(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


def trained_before_the_loop(rank: int, directory: str) -> list[list[list[int]]]:
    store = FileStore(str(Path(directory) / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    found = []

    def note(model: DDP) -> None:
        numbers = {id(parameter): index for index, parameter in enumerate(model.parameters())}
        buckets = model.reducer._get_zeros_like_grad_buckets()
        found.append([[numbers[id(parameter)] for parameter in bucket.parameters()] for bucket in buckets])

    used, unused = (DDP(Backwards(nn.Linear(128, 128) for _ in range(4)), bucket_cap_mb=0.1) for _ in range(2))
    for _ in range(3):
        used(torch.ones(1, 128)).sum().backward()
    note(used)
    for model in (used, unused):
        BucketLayout(model).begin_step(0)
        note(model)
    return found


@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_memory_format_may_not_change_under_views_of_buckets(has_gradients: bool) -> None:
    net = nn.Conv2d(3, 8, 3)
    model = DDP(net, process_group=Told(), gradient_as_bucket_view=True)
    layout = BucketLayout(model)
    images = torch.randn(2, 3, 8, 8)
    for version in range(2):
        layout.begin_step(version)
        model(images).sum().backward()
        layout.settle(version)
        if not has_gradients:
            model.zero_grad()
    expected = torch.autograd.grad(net(images).sum(), [net.weight])[0]
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.zero_grad()
    layout.begin_step(2)
    model(2 * images).sum().backward()
    assert net.weight.grad is not None
    assert torch.allclose(net.weight.grad, 2 * expected, rtol=1e-3) is not has_gradients  # torch's defect, if it has
    with pytest.raises(RuntimeError, match="memory format of weight") if has_gradients else contextlib.nullcontext():
        layout.settle(2)


def test_a_reducer_is_made_again_while_its_network_is_frozen() -> None:
    """A GAN freezes its discriminator for a moment: where a failure strikes, or a replacement's rehearsal ends."""
    assert run_ranks(frozen_and_reset) == [[False, 1.5]] * WORLD


def frozen_and_reset(rank: int, directory: str) -> list[Any]:
    store = FileStore(str(Path(directory) / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    watch_wrappers()
    model = DDP(nn.Linear(2, 2))
    layout = BucketLayout(model)
    layout.begin_step(0)
    model.requires_grad_(False)
    layout.adopt([1, [[1, 0]]])
    frozen = model.module.weight.requires_grad
    model.requires_grad_(True)
    (model(torch.ones(1, 2)).sum() * (rank + 1)).backward()
    return [frozen, float(model.module.bias.grad[0])]


def settled_and_reset(rank: int, directory: str) -> list[list[list[int]]]:
    """Buckets of a wrapper in each of two passes before a reset and after it, and those of one that copies them."""
    store = FileStore(str(Path(directory) / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    layers = [nn.Linear(128, 128) for _ in range(4)]
    found = []

    def make() -> tuple[DDP, BucketLayout]:
        model = DDP(nn.Sequential(layers[2], layers[0], layers[3], layers[1]), bucket_cap_mb=0.1)
        return model, BucketLayout(model)

    def step(model: DDP, layout: BucketLayout, version: int) -> None:
        layout.begin_step(version)
        for _ in range(2):
            model(torch.ones(1, 128)).sum().backward()
        layout.settle(version)
        numbers = {id(parameter): index for index, parameter in enumerate(model.parameters())}
        buckets = model.reducer._get_zeros_like_grad_buckets()
        found.append([[numbers[id(parameter)] for parameter in bucket.parameters()] for bucket in buckets])

    model, layout = make()
    step(model, layout, 3)  # it was not used before
    layout.reset(4)
    step(model, layout, 4)
    model(torch.ones(1, 128)).sum().backward()
    assert not model.reducer._rebuild_buckets()
    copy, its_layout = make()
    its_layout.adopt(layout.describe(5))
    step(copy, its_layout, 5)
    return found


def aborted_at_different_micro_batches(rank: int, directory: str) -> list[float]:
    """Rank 0 is stopped after its first forward pass, inside `no_sync`, rank 1 after its second; both begin anew."""
    store = FileStore(str(Path(directory) / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    model = nn.Linear(4, 4)
    model.register_buffer("mask", torch.full((4,), float(rank)))
    ddp = DDP(model)
    layout = BucketLayout(ddp)
    ddp(torch.ones(1, 4)).sum().backward()  # a whole step
    layout.settle(0)
    layout.begin_step(1)
    dist.barrier()
    with ddp.no_sync():
        ddp(torch.ones(1, 4)).sum().backward()
    if rank == 1:
        ddp(torch.ones(1, 4))
    layout.reset(1)
    layout.begin_step(1)
    mask = model.get_buffer("mask")
    mask.fill_(float(rank + 5))  # comes from rank 0 if both broadcast; if one does not, both wait forever
    ddp(torch.ones(1, 4)).sum().backward()
    return list(mask.tolist())


def test_ranks_that_were_aborted_at_different_micro_batches_go_on_together() -> None:
    assert run_ranks(aborted_at_different_micro_batches) == [[5.0] * 4] * WORLD


@pytest.mark.all
def test_what_is_ours_is_left_out_of_a_compiled_model() -> None:
    """Dynamo would trace into it, or refuse it, wherever a hook or the reducer of DDP calls it."""
    seen: list[bool] = []

    @not_compiled
    def ours(module: nn.Module, arguments: object) -> None:
        note()

    def note() -> None:
        seen.append(torch.compiler.is_compiling())

    inner = nn.Linear(3, 3)
    inner.register_forward_pre_hook(ours)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(nn.Sequential(inner), backend=backend)
    for _ in range(2):
        compiled(torch.ones(1, 3))
    assert seen == [False, False]
    assert len(graphs) >= 1


def wrappers_that_were_made(rank: int, directory: str) -> list[bool]:
    store = FileStore(str(Path(directory) / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    watch_wrappers()

    class Wrapper(DDP):
        pass

    first, second = DDP(nn.Linear(2, 2)), Wrapper(nn.Linear(2, 2))
    return [found is made for found, made in zip(wrappers_made(), (first, second), strict=True)]


def test_wrappers_are_known_in_the_order_of_their_making() -> None:
    """A script may hand over what they wrap."""
    assert run_ranks(wrappers_that_were_made) == [[True, True]] * WORLD


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_a_hook_leaves_the_graph_of_a_compiled_transform_whole(transform: Callable[..., Any]) -> None:
    seen: list[bool] = []

    @not_compiled
    def tell() -> None:
        seen.append(True)

    @only_inlined
    def hook(module: nn.Module, arguments: Any) -> None:
        if not is_compiled_transform():
            tell()

    model = nn.Linear(3, 1)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    model.register_forward_pre_hook(hook)

    def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.func.functional_call(model, weights, (x,)).tanh().sum()
        return result

    each = torch.func.vmap(transform(loss), in_dims=(None, 0))
    x = torch.arange(6.0).view(2, 3)
    expected = each(weights, x)
    assert seen == [True]  # outside of compiled code the hook still tells
    found = torch.compile(each, backend="eager", fullgraph=True)(weights, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert seen == [True]
    torch.compile(model, backend="eager")(x)
    assert seen == [True, True]


class Meshed(torch.Tensor):
    """A tensor whose values lie in another one, and that has a mesh beside it, as a DTensor has."""

    held: torch.Tensor
    mesh: object

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held", "mesh"], None


def test_parts_of_a_tensor_that_are_no_tensors_hold_none_of_its_values() -> None:
    tensor = torch.ones(2).as_subclass(Meshed)
    tensor.held, tensor.mesh = torch.arange(3.0), object()
    assert [part.tolist() for part in components_of(tensor)] == [[0.0, 1.0, 2.0]]
