"""Averaged models: their buffers that differ between ranks, and how a replacement gets the newest of them."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from relight.errors import UsageError
from relight.training.state.tracked import TrackedState
from relight.training.transaction.transaction import Transaction
from relight.transfer.io.codec import decode_tree, encode_tree, unflatten

Move = Callable[[nn.Module, nn.Module], None]


class NoCollectives:
    """A process that launches none."""

    launches = launches_of_all = 0


class Holder(nn.Module):
    """As scripts that wrap the copy in a class of their own."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.shadow = copy.deepcopy(net)


def make_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def move_torch(average: Any, net: nn.Module) -> None:
    average.update_parameters(net)


@torch.no_grad()
def move_by_hand(average: nn.Module, net: nn.Module) -> None:
    for own, parameter in zip(average.parameters(), net.parameters(), strict=True):
        own.data.lerp_(parameter.data, 0.1)
    for mine, buffer in zip(average.buffers(), net.buffers(), strict=True):
        mine.data.copy_(buffer.data)


KINDS: dict[str, tuple[Callable[[nn.Module], nn.Module], Move]] = {
    "copied buffers": (lambda net: AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)), move_torch),
    "averaged buffers": (
        lambda net: AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
        move_torch,
    ),
    "equal weights": (lambda net: AveragedModel(net, use_buffers=True), move_torch),
    "by hand": (copy.deepcopy, move_by_hand),
    "by hand, in a class": (Holder, move_by_hand),
}


class Rank:
    """One of several that train on other batches, with equal gradients."""

    def __init__(self, number: int, kind: str) -> None:
        make, self.move = KINDS[kind]
        self.number, self.net = number, make_net()
        self.average = make(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.state = TrackedState({"model": self.net}, {"optimizer": self.optimizer}, {"ema": self.average}, {})
        self.transaction = Transaction(self.state, NoCollectives())
        self.kept = b""

    def step(self, number: int, *, moves: bool = True, at_head: bool = False) -> None:
        """`moves`: the average, after the write. `at_head`: as a callback does that comes before a step."""
        self.transaction.begin()
        if at_head:
            self.transaction.before_unusual_writes(self.average)
            self.move(self.average, self.net)
        self.net(torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * number + self.number)))
        for parameter in self.net.parameters():
            parameter.grad = torch.full_like(parameter, 0.01 * (number + 1))
        self.transaction.prepare(early=True)
        self.kept = encode_tree(self.state.rank_private.tree(), "private")
        self.optimizer.step()
        if moves:
            self.move(self.average, self.net)
        self.transaction.commit()

    def become(self, source: "Rank", kept: bytes) -> None:
        flat = source.state.replica.flat()
        tree = decode_tree(encode_tree({"t": unflatten(flat.tree, [t.clone() for t in flat.tensors])}, "state"))["t"]
        self.state.adopt(tree, source.state.describe("", 0))
        self.state.rank_private.adopt(decode_tree(kept))


@pytest.mark.parametrize("moved", [(), (0,), (1,), (0, 1), (0, 1, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_replacement_has_the_buffers_of_the_rank_that_was_lost(kind: str, moved: tuple[int, ...]) -> None:
    """The lost rank kept its own before its last write, and its average moved behind it."""
    ranks, replacement = [Rank(number, kind) for number in range(2)], Rank(7, kind)
    replacement.step(9)
    for step in range(3):
        for rank in ranks:
            rank.step(step, moves=step in moved)
        assert ranks[0].state.replica.digest() == ranks[1].state.replica.digest()
    replacement.become(ranks[0], ranks[1].kept)
    assert replacement.state.replica.digest() == ranks[1].state.replica.digest()
    expected = dict(ranks[1].average.named_buffers())
    assert {name: b.tolist() for name, b in replacement.average.named_buffers()} == {
        name: b.tolist() for name, b in expected.items()
    }


@pytest.mark.parametrize("places", ["head, end", "head, end, end", "end, head, end", "end, end, head"])
@pytest.mark.parametrize("kind", [kind for kind, (_, move) in KINDS.items() if move is move_torch])
def test_an_average_that_moves_now_before_and_now_after_the_barrier_is_repeated(kind: str, places: str) -> None:
    ranks, replacement = [Rank(number, kind) for number in range(2)], Rank(7, kind)
    for number, place in enumerate(places.split(", ")):
        for rank in ranks:
            rank.step(number, moves=place == "end", at_head=place == "head")
    replacement.become(ranks[0], ranks[1].kept)
    pairs = zip(replacement.average.state_dict().items(), ranks[1].average.state_dict().items(), strict=True)
    assert all(name == other and torch.equal(mine, theirs) for (name, mine), (other, theirs) in pairs)


def test_an_average_of_buffers_by_hand_cannot_be_repeated() -> None:
    rank = Rank(0, "by hand")

    def move(average: nn.Module, net: nn.Module) -> None:
        for mine, buffer in zip(average.buffers(), net.buffers(), strict=True):
            mine.data.mul_(0.9).add_(buffer.data * 0.1) if buffer.is_floating_point() else mine.data.copy_(buffer.data)

    rank.move = move
    rank.step(0)
    assert re.match("an average of 1.running_mean of ema.* that the script made by itself", rank.transaction.surprise)


def test_of_two_models_that_are_built_alike_an_average_is_that_of_its_own() -> None:
    left, right = make_net(), make_net()
    with torch.no_grad():
        next(right.parameters()).add_(1)
    average = AveragedModel(right)
    optimizer = torch.optim.SGD([*left.parameters(), *right.parameters()], lr=0.1)
    state = TrackedState({"left": left, "right": right}, {"optimizer": optimizer}, {"ema": average}, {})
    transaction = Transaction(state, NoCollectives())
    transaction.begin()
    right(torch.randn(6, 4))
    transaction.prepare(early=True)
    assert {owner for owner, _ in state.rank_private.buffers} == {"right", "ema"}


def test_an_average_does_not_belong_to_one_rank() -> None:
    net = make_net()
    with pytest.raises(UsageError, match=r"per_rank=\{'ema': ...\}\) got an AveragedModel: hand it over as ema="):
        TrackedState({"model": net}, {}, {}, {"ema": AveragedModel(net)})
