"""State that survives: replicated and private, rollback inside a step, and what is refused by name."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from relight.errors import UsageError
from relight.training.state.tracked import TrackedState
from relight.training.torch_private.distributed.ddp import stateful_hooks
from relight.training.transaction.transaction import Transaction
from relight.transfer.io.codec import Flat, decode_tree, encode_tree, unflatten


class NoCollectives:
    """A process that launches none."""

    launches = launches_of_all = 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.mask  # type: ignore[no-any-return]


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def make(seed: int, steps: int = 0, **objects: Any) -> tuple[Net, torch.optim.Optimizer, TrackedState]:
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    state = TrackedState({"model": net}, {"optimizer": optimizer}, dict(objects), {})
    transaction = transaction_of(state)
    for _ in range(steps):
        state.gradients.see()
        transaction.begin()
        net(torch.randn(3, 4)).sum().backward()
        transaction.prepare(early=True)
        optimizer.step()
        optimizer.zero_grad()
        transaction.commit()
    return net, optimizer, state


def transaction_of(state: TrackedState) -> Transaction:
    return Transaction(state, NoCollectives())


def transfer(source: TrackedState, target: TrackedState) -> None:
    """Move the state as a restore does, through bytes."""
    flat = source.replica.flat()
    tree = decode_tree(encode_tree({"t": _plain(flat)}, "state"))["t"]
    target.replica.adopt(tree, [list(key) for key in source.rank_private.buffers])
    target.rank_private.adopt(decode_tree(encode_tree(source.rank_private.tree(), "private")))


def _plain(flat: Flat) -> Any:
    from relight.transfer.io.codec import unflatten

    return unflatten(flat.tree, [t.clone() for t in flat.tensors])


def test_an_optimizer_whose_settings_came_in_another_order() -> None:
    """As from a checkpoint of the script's own: a replacement has loaded none, and is to hold the same digest."""
    _, optimizer, source = make(1, steps=2)
    _, _, target = make(2, steps=1)
    group = optimizer.param_groups[0]
    for name in ("betas", "lr"):
        group[name] = group.pop(name)
    for values in optimizer.state.values():
        values["step"] = values.pop("step")
    transfer(source, target)
    assert target.replica.digest() == source.replica.digest()


@pytest.mark.parametrize("target_steps", [0, 1, 5], ids=["no optimizer state yet", "warmed up", "further"])
def test_a_target_becomes_its_source(target_steps: int) -> None:
    net, _, source = make(1, steps=3)
    other, optimizer, target = make(2, steps=target_steps)
    transfer(source, target)
    assert target.replica.digest() == source.replica.digest()
    assert torch.equal(other.norm.running_mean, net.norm.running_mean)  # type: ignore[arg-type]
    assert all(len(optimizer.state[p]) == 3 for p in other.parameters())


@pytest.mark.parametrize("target_steps", [0, 2])
def test_a_target_lays_its_tensors_out_as_its_source(target_steps: int) -> None:
    net, optimizer, source = make(1, steps=2)
    other, adopted, target = make(2, steps=target_steps)
    weight = net.linear.weight
    optimizer.state[weight]["bases"] = [torch.linalg.eigh(torch.eye(4) + 1)[1]]
    optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"].t().contiguous().t()
    weight.data = weight.data.t().contiguous().t()  # a step has changed the memory format
    transfer(source, target)
    found = adopted.state[other.linear.weight]
    assert other.linear.weight.stride() == weight.stride() == found["exp_avg"].stride() == (1, 4)
    assert found["bases"][0].stride() == (1, 4)
    assert target.replica.digest() == source.replica.digest()


def test_a_target_forgets_optimizer_state_that_the_source_does_not_have() -> None:
    _, _, source = make(1, steps=0)
    _, optimizer, target = make(2, steps=1)
    transfer(source, target)
    assert not optimizer.state
    assert target.replica.digest() == source.replica.digest()


def test_optimizer_state_of_no_parameter_travels() -> None:
    _, optimizer, source = make(1, steps=2)
    _, adopted, target = make(2, steps=1)
    own: dict[Any, Any] = optimizer.state
    own.update({"steps": 2, "k": torch.tensor([3]), "seen": [1.5, 2]})
    found: dict[Any, Any] = adopted.state
    found["gone"] = {"by": "the source"}
    transfer(source, target)
    names = {name for name in found if isinstance(name, str)}
    assert {name: found[name] for name in names} == {"steps": 2, "k": torch.tensor([3]), "seen": [1.5, 2]}
    assert target.replica.digest() == source.replica.digest()


def test_groups_that_were_added_travel() -> None:
    """A layer thaws, and gets a group of its own; a replacement has built the optimizer without it."""

    def build() -> tuple[nn.Linear, nn.Linear, torch.optim.Optimizer, TrackedState]:
        head, body = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
        return head, body, optimizer, TrackedState({"m": nn.Sequential(body, head)}, {"o": optimizer}, {}, {})

    _, body, optimizer, state = build()
    built = state.replica.flat()
    optimizer.add_param_group({"params": list(body.parameters()), "lr": 0.5})
    body(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    later = state.replica.flat()
    _, its_body, its_optimizer, target = build()
    target.replica.adopt(unflatten(later.tree, later.tensors), [])
    assert [group["lr"] for group in its_optimizer.param_groups] == [0.1, 0.5]
    assert its_optimizer.param_groups[1]["params"] == list(its_body.parameters())
    assert target.replica.digest() == state.replica.digest()
    target.replica.adopt(unflatten(built.tree, built.tensors), [])  # as of a version from before
    assert len(its_optimizer.param_groups) == 1


def test_views_of_parameters_belong_to_the_state() -> None:
    """A script that holds them in a variable of its own carries nothing of its own."""
    net, _, state = make(1)
    for view in (net.linear.weight.data, net.linear.weight.detach()[1:], {"mask": net.get_buffer("mask").view(2, 2)}):
        assert state.identities.keeps(view)
    assert not state.identities.keeps({"weight": net.linear.weight.detach().clone()})
    assert not state.identities.keeps(torch.empty(0))


def test_learning_rate_and_objects_travel() -> None:
    counter, other_counter = Counter(), Counter()
    counter.count = 9
    _, optimizer, source = make(1, counter=counter)
    optimizer.param_groups[0]["lr"] = 0.5
    _, other, target = make(2, counter=other_counter)
    transfer(source, target)
    assert other.param_groups[0]["lr"] == 0.5
    assert other_counter.count == 9


@pytest.mark.parametrize("is_kept_again", [False, True])
def test_objects_of_a_lost_rank_that_code_after_the_block_has_changed_elsewhere(is_kept_again: bool) -> None:
    lost, survivor, replacement = Counter(), Counter(), Counter()
    states = [TrackedState({"model": Net()}, {}, {}, {"counter": one}) for one in (lost, survivor, replacement)]
    lost.count = survivor.count = 3
    kept, others = (decode_tree(encode_tree(state.rank_private.tree(), "private")) for state in states[:2])
    survivor.count = 0
    late = states[1].rank_private.late_objects(others["per_rank"])
    states[2].rank_private.adopt(kept if is_kept_again else {**kept, "late": [[], []]}, late)
    assert replacement.count == (3 if is_kept_again else 0)


def test_what_an_integration_keeps_of_a_rank_is_not_mixed_with_that_of_another_one() -> None:
    survivor = Counter()
    survivor.join_training = lambda *_: None  # type: ignore[attr-defined]
    state = TrackedState({"model": Net()}, {}, {}, {"counter": survivor})
    kept = decode_tree(encode_tree(state.rank_private.tree(), "private"))
    survivor.count = 5
    assert state.rank_private.late_objects(kept["per_rank"]) == b""


def test_buffers_that_change_in_forward_become_private_and_others_do_not() -> None:
    _, _, state = make(1, steps=1)
    names = {name for _, name in state.rank_private.buffers}
    assert names == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_rollback_puts_back_buffers_objects_and_gradients() -> None:
    counter = Counter()
    net, _, state = make(1, steps=2, counter=counter)
    before = [b.clone() for b in net.buffers()]
    parameters = [p.detach().clone() for p in net.parameters()]
    transaction = transaction_of(state)
    state.gradients.see()
    transaction.begin()
    net(torch.randn(3, 4)).sum().backward()
    counter.count = 5
    transaction.roll_back()
    state.gradients.clear()
    assert all(torch.equal(a, b) for a, b in zip(before, net.buffers(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(parameters, net.parameters(), strict=True))
    assert counter.count == 0
    assert all(p.grad is None for p in net.parameters())


def test_rollback_after_a_commit_does_nothing() -> None:
    net, _, state = make(1, steps=3)
    before = net.norm.running_mean.clone()  # type: ignore[union-attr]
    transaction_of(state).roll_back()
    assert torch.equal(before, net.norm.running_mean)  # type: ignore[arg-type]


def test_gradients_that_were_zeros_become_zeros_again() -> None:
    net, _, state = make(1)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state.gradients.see()
    net(torch.randn(3, 4)).sum().backward()
    state.gradients.clear()
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())


def test_layout_tells_other_models_apart() -> None:
    _, _, one = make(1)
    _, _, same = make(2)
    other = TrackedState({"model": nn.Linear(4, 5)}, {}, {}, {})
    assert one.replica.layout() == same.replica.layout() != other.replica.layout()


@pytest.mark.parametrize("threads", [2, 3])
def test_several_threads_find_the_same_digest(threads: int) -> None:
    model = nn.Sequential(*(nn.Linear(700, 700) for _ in range(4)))
    state = TrackedState({"model": model}, {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, {}, {})
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = state.replica.digest()
        torch.set_num_threads(threads)
        assert state.replica.digest() == alone
        known: dict[int, int] = {}
        assert state.replica.digest(known) == alone
        assert len(known) > 1  # there was something to share
        last = known.pop(max(known))
        assert state.replica.digest(known) == alone
        assert known[max(known)] == last
    finally:
        torch.set_num_threads(before)


def test_digest_covers_parameters_moments_and_learning_rate() -> None:
    net, optimizer, state = make(1, steps=1)
    seen = {state.replica.digest()}
    with torch.no_grad():
        net.linear.weight[0, 0] += 1
    seen.add(state.replica.digest())
    optimizer.state[net.linear.weight]["exp_avg"][0, 0] += 1
    seen.add(state.replica.digest())
    optimizer.param_groups[0]["lr"] = 0.3
    seen.add(state.replica.digest())
    assert len(seen) == 4


def frozen_at_first(seed: int) -> tuple[Net, torch.optim.Optimizer, TrackedState]:
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.norm.parameters(), lr=0.01)
    state = TrackedState({"model": net}, {"optimizer": optimizer}, {}, {})
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return net, optimizer, state


def add_a_group(net: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": net.linear.parameters(), "lr": 0.5})


def append_parameters(net: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"] += net.linear.parameters()


def turn_groups_round(net: Net, optimizer: torch.optim.Optimizer) -> None:
    group = optimizer.param_groups.pop()
    members = [net.linear.bias, *reversed(group["params"])]
    optimizer.param_groups.extend({**group, "params": [member]} for member in members)


def take_a_group_away(net: Net, optimizer: torch.optim.Optimizer) -> None:
    add_a_group(net, optimizer)
    del optimizer.param_groups[0]


@pytest.mark.parametrize("change", [add_a_group, append_parameters, turn_groups_round, take_a_group_away])
def test_groups_that_a_script_changes_travel(change: Callable[[Net, torch.optim.Optimizer], None]) -> None:
    net, optimizer, source = frozen_at_first(1)
    change(net, optimizer)
    source.members.see("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    other, copied, target = frozen_at_first(2)
    assert source.replica.layout() == target.replica.layout()
    transfer(source, target)
    assert source.replica.digest() == target.replica.digest()
    for module, own in ((net, optimizer), (other, copied)):
        module.zero_grad()
        module.linear.bias.grad = torch.ones(4)
        own.step()
    assert source.replica.digest() == target.replica.digest()


def test_a_group_that_comes_back_finds_its_state() -> None:
    net, optimizer, source = frozen_at_first(1)
    take_a_group_away(net, optimizer)
    optimizer.step()
    other, copied, target = frozen_at_first(2)
    transfer(source, target)
    for module, own in ((net, optimizer), (other, copied)):
        own.add_param_group({"params": module.norm.parameters()})
        module.zero_grad()
        module.norm.bias.grad = torch.ones(4)
        own.step()
    assert source.replica.digest() == target.replica.digest()
    transfer(source, target)
    assert source.replica.digest() == target.replica.digest()


def test_a_group_of_a_module_that_was_not_handed_over_is_refused() -> None:
    _, optimizer, state = make(1)
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    with pytest.raises(UsageError, match="parameter group 1 of optimizer holds parameters of a module that was not"):
        state.members.see("optimizer")


def test_parameters_of_no_module_come_with_their_optimizer() -> None:
    holder = nn.Linear(2, 2)
    bare = [nn.Parameter(torch.ones(3)), *holder.parameters()]
    optimizers: dict[str, torch.optim.Optimizer] = {"optimizer": torch.optim.SGD(bare, 0.1)}
    with pytest.raises(UsageError, match="parameter group 0 of optimizer holds parameters of a module that was not"):
        TrackedState({"model": Net()}, optimizers, {}, {})
    del holder  # no module holds them any more
    state = TrackedState({"model": Net()}, optimizers, {}, {})
    assert all(map(state.slots.holds, bare))


def test_parameters_are_refused_where_it_cannot_be_seen_whether_a_module_holds_them() -> None:
    net, bare = Net(), nn.Parameter(torch.ones(3))
    gc.freeze()
    try:
        with pytest.raises(UsageError, match="holds parameters of a module that was not handed over"):
            TrackedState({"model": net}, {"optimizer": torch.optim.SGD([bare], 0.1)}, {}, {})
    finally:
        gc.unfreeze()


def test_a_parameter_that_a_step_makes_anew_is_refused_by_its_name() -> None:
    net, optimizer, state = make(1)
    net.norm.bias = nn.Parameter(torch.zeros(9))
    optimizer.param_groups[0]["params"][-1] = net.norm.bias
    with pytest.raises(UsageError, match=r"a step has made the parameter norm\.bias of model anew"):
        state.members.see("optimizer")


def test_an_object_without_state_dict_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"relight\.Training\(thing=\.\.\.\) got a object"):
        make(1, thing=object())


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    module = nn.Linear(2, 2)
    other = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="must name every module"):
        TrackedState({"model": nn.Linear(2, 2)}, {"optimizer": other}, {}, {})


def test_what_was_used_so_far_does_not_move_the_place_of_what_was_used_too() -> None:
    """A replacement has used other parameters than the source: each tensor still arrives where it belongs."""
    sent, state = used_so_far(0, 1, 2), used_so_far(0, 2)
    flat, places = sent.replica.flat(), state.replica.destination()
    received = []
    for path, tensor in zip(flat.paths, flat.tensors, strict=True):
        place = places.get(path)
        received.append(tensor.clone() if place is None else place.detach().copy_(tensor))
    state.adopt(unflatten(flat.tree, received), {"private_buffers": []})
    assert state.replica.digest() == sent.replica.digest()


def used_so_far(*layers: int) -> TrackedState:
    net = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
    optimizer = torch.optim.AdamW(net.parameters())
    for layer in layers:
        net[layer](torch.randn(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return TrackedState({"model": net}, {"optimizer": optimizer}, {}, {})


def test_a_communication_hook_with_a_state_of_its_own_is_refused() -> None:
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=2)
    try:
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        ddp.register_comm_hook(PowerSGDState(None), powerSGD_hook)
        with pytest.raises(UsageError, match=r"a state of its own \(PowerSGDState\)"):
            TrackedState({"model": ddp}, {"optimizer": torch.optim.SGD(ddp.parameters(), 0.1)}, {}, {})
        assert stateful_hooks(ddp)
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        ddp.register_comm_hook(None, allreduce_hook)
        TrackedState({"model": ddp}, {"optimizer": torch.optim.SGD(ddp.parameters(), 0.1)}, {}, {})
    finally:
        dist.destroy_process_group()


def test_bytes_of_parameters_are_the_same_before_and_behind_the_first_step() -> None:
    """Or what a resumed job survives would be told with three times the size."""
    assert make(1)[2].replica.module_bytes() == 4 * (4 * 4 + 4 + 4 + 4 + 4 + 4 + 4) + 8
    assert make(1, steps=1)[2].replica.module_bytes() == 4 * (4 * 4 + 4 + 4 + 4 + 4)


def test_an_optimizer_that_differs_between_ranks_is_known_with_the_gradients_of_its_module() -> None:
    """DiLoCo: each rank trains a copy of its own."""
    local = nn.Linear(2, 2)
    inner = torch.optim.SGD(local.parameters(), lr=0.1)
    net = nn.Linear(2, 2)
    outer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = TrackedState({"model": net}, {"outer": outer}, {}, {"local": local, "inner": inner})
    assert state.name_of_writer(inner) == "per_rank['inner']"
    assert state.identities.name_of(inner) is None  # its state is no replica's
    assert state.name_of_writer(outer) == "outer"
    assert state.name_of_writer(torch.optim.SGD(net.parameters(), lr=0.1)) is None
    state.gradients.see()
    local(torch.ones(1, 2)).sum().backward()
    state.gradients.clear()
    assert local.weight.grad is None
    local(torch.ones(1, 2)).sum().backward()
    state.gradients.see()
    local(torch.ones(1, 2)).sum().backward()
    state.gradients.clear()
    assert local.weight.grad is not None
    assert not local.weight.grad.any()
