"""Tensors of the state that share memory are joined in a copy as they are where it was made: drawn at random."""

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from relight.training.state.tracked import TrackedState
from relight.transfer.io.codec import decode_tree, encode_tree, unflatten

SEEDS = [*range(30), *(pytest.param(seed, marks=pytest.mark.all) for seed in range(30, 100))]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3, 3))
        self.register_buffer("best", torch.zeros(3, 3))
        self.register_buffer("last", torch.zeros(3, 3))


class Job:
    """A model with two optimizers, whose learning rates are tensors."""

    def __init__(self, is_shared: bool) -> None:
        torch.manual_seed(0)
        self.net = Net()
        rate = torch.tensor(0.1)
        self.optimizers = {
            name: torch.optim.Adam(part.parameters(), lr=rate if is_shared else rate.clone(), foreach=False)
            for name, part in (("first", self.net.one), ("second", self.net.two))
        }
        self.state = TrackedState({"net": self.net}, dict(self.optimizers), {}, {})

    def step(self) -> None:
        """Write in place through every name."""
        for parameter in self.net.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"].mul_(0.9)
            optimizer.step()
        for number, buffer in enumerate(self.net.buffers()):
            buffer.add_(number + 1)

    def change(self, draw: random.Random) -> None:
        """Join or separate some tensors."""
        draw.choice(CHANGES)(self, draw)

    def tensors(self) -> dict[str, list[float]]:
        """All values by path; buffers by every name that they have."""
        flat = self.state.replica.flat()
        buffers = self.net.named_buffers(remove_duplicate=False)
        found = {path: tensor.flatten().tolist() for path, tensor in zip(flat.paths, flat.tensors, strict=True)}
        return {**found, **{name: buffer.flatten().tolist() for name, buffer in buffers}}


def load_the_other(job: Job, draw: random.Random) -> None:
    source, target = draw.sample(sorted(job.optimizers), 2)
    job.optimizers[target].load_state_dict(job.optimizers[source].state_dict())


def load_a_copy(job: Job, draw: random.Random) -> None:
    source, target = draw.sample(sorted(job.optimizers), 2)
    job.optimizers[target].load_state_dict(copy.deepcopy(job.optimizers[source].state_dict()))


def set_a_buffer(job: Job, draw: random.Random) -> None:
    one, other = draw.sample(["mean", "best", "last"], 2)
    setattr(job.net, one, getattr(job.net, other))


def set_a_view(job: Job, draw: random.Random) -> None:
    one, other = draw.sample(["mean", "best", "last"], 2)
    setattr(job.net, one, getattr(job.net, other).detach())


def clone_a_buffer(job: Job, draw: random.Random) -> None:
    one, other = (draw.choice(["mean", "best", "last"]) for _ in range(2))
    setattr(job.net, one, getattr(job.net, other).clone())


def watch_a_weight(job: Job, draw: random.Random) -> None:
    setattr(job.net, draw.choice(["mean", "best", "last"]), draw.choice([job.net.one, job.net.two]).weight.detach())


def join_the_weights(job: Job, draw: random.Random) -> None:
    job.net.two.weight.data = job.net.one.weight.data


def separate_the_weights(job: Job, draw: random.Random) -> None:
    job.net.two.weight.data = job.net.two.weight.data.clone()


def train(job: Job, draw: random.Random) -> None:
    job.step()


CHANGES: list[Callable[[Job, random.Random], None]] = [
    load_the_other,
    load_a_copy,
    set_a_buffer,
    set_a_view,
    clone_a_buffer,
    watch_a_weight,
    join_the_weights,
    separate_the_weights,
    train,
]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_goes_on_as_its_source(seed: int) -> None:
    draw = random.Random(seed)
    is_shared = draw.random() < 0.5
    source, target = Job(is_shared), Job(is_shared)
    for job in (source, target):
        for _ in range(draw.randrange(6)):
            job.state.slots.refresh()
            job.change(draw)
        job.state.slots.refresh()
    offered = source.state.replica.flat()
    meta = decode_tree(encode_tree(source.state.describe("", 0), "meta"))
    place = target.state.replica.destination()
    received = []
    for path, tensor in zip(offered.paths, offered.tensors, strict=True):
        own = place.get(path)
        fits = own is not None and own.shape == tensor.shape
        received.append(own.copy_(tensor) if fits and own is not None else tensor.clone())
    assert target.state.adopt(unflatten(offered.tree, received), meta) == ""
    assert target.state.replica.digest() == source.state.replica.digest()
    for _ in range(2):
        assert target.tensors() == source.tensors()
        source.step()
        target.step()
    assert target.tensors() == source.tensors()


def test_a_part_of_another_tensor_is_named() -> None:
    source, target = Job(is_shared=True), Job(is_shared=True)
    whole = torch.zeros(4, 3)
    source.net.mean, source.net.best = whole[:3], whole[1:]
    source.state.slots.refresh()
    offered = source.state.replica.flat()
    why = target.state.adopt(
        unflatten(offered.tree, [tensor.clone() for tensor in offered.tensors]), source.state.describe("", 0)
    )
    assert why.startswith("modules.net.tensors.best, modules.net.tensors.mean: tensors that share memory")


def test_slices_are_laid_out_as_where_they_were_made() -> None:
    """Sums go through memory in its order: equal values, laid out otherwise, give other bits."""
    source, target = Job(is_shared=False), Job(is_shared=False)
    weight, same = source.net.one.weight, target.net.one.weight
    source.optimizers["first"].state[weight]["basis"] = torch.arange(20.0).view(4, 5).t()[:3]
    source.net.mean = torch.arange(12.0).view(3, 4)[:, :3]
    target.net.best = torch.zeros(3, 4)[:, :3]
    for job in (source, target):
        job.state.slots.refresh()
    offered = source.state.replica.flat()
    meta = decode_tree(encode_tree(source.state.describe("", 0), "meta"))
    received = [tensor.clone(memory_format=torch.contiguous_format) for tensor in offered.tensors]
    assert target.state.adopt(unflatten(offered.tree, received), meta) == ""
    assert target.optimizers["first"].state[same]["basis"].stride() == (1, 5)
    buffers = dict(target.net.named_buffers())
    assert buffers["mean"].stride() == (4, 1)
    assert buffers["best"].is_contiguous()
    assert target.tensors() == source.tensors()
