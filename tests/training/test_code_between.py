"""Code between two steps changes the state: kept again where each rank has its own, compared where all share it."""

from typing import Any

import pytest
import torch
from torch import nn

from relight.training.state.rank_attributes import LateChanges
from relight.training.state.tracked import TrackedState
from relight.transfer.io.codec import decode_tree, encode_tree


class Counter:
    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Rank:
    """A rank with an object of its own, and BatchNorm's statistics."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.counter = Counter()
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.state = TrackedState({"net": self.net}, {"optimizer": optimizer}, {}, {"counter": self.counter})
        self.private = self.state.rank_private
        self.private.buffers = {("net", "1.running_mean")}

    def keep(self, *, between: bool = False) -> Any:
        late = {} if between else {"late": self.private.late}
        return decode_tree(encode_tree({**self.private.tree(), **late}, "private"))


def replace(kept: Any, survivor: Rank) -> list[str]:
    """Return why a replacement with this doubts its bits."""
    replacement = Rank()
    replacement.private.adopt_code(survivor.private.describe_code())
    replacement.private.adopt(kept)
    return replacement.private.lost(kept.get("late"))


@pytest.mark.parametrize("what", ["object", "buffer"])
def test_what_each_rank_has_is_kept_again_and_told_before_that(what: str) -> None:
    lost, survivor = Rank(), Rank()
    at_barrier = lost.keep()
    survivor.keep()
    changed = [("net", "1.running_mean")] if what == "buffer" else []
    for rank in (lost, survivor):
        rank.counter.seen += what == "object"
        assert rank.private.see_code(1, changed)

    assert replace(lost.keep(between=True), survivor) == []
    assert ("counter" if what == "object" else "1.running_mean") in " ".join(replace(at_barrier, survivor))


def test_nothing_is_kept_again_where_no_code_changed_anything() -> None:
    rank = Rank()
    rank.keep()
    assert not rank.private.see_code(1, [])
    assert not rank.private.see_code(2, [("net", "0.weight")])


def test_what_a_step_changed_that_is_undone_after_its_barrier_is_no_change_between_steps() -> None:
    rank = Rank()
    rank.keep()
    rank.counter.seen = 5
    rank.keep()
    rank.counter.seen = 0
    rank.private.roll_back()
    assert not rank.private.see_code(1, [])


def test_weights_that_are_changed_alike_have_one_number() -> None:
    one, same, other = Rank(), Rank(), Rank()
    for rank in (one, same, other):
        with torch.no_grad():
            rank.net.get_parameter("0.weight").fill_(2.0 if rank is not other else 3.0)
        weight, bias = ("net", "0.weight"), ("net", "0.bias")
        rank.private.see_code(1, [weight, bias] if rank is one else [bias, weight])  # in any order
    number = one.private.number()
    assert number == same.private.number() != other.private.number()
    assert "0.bias of net, 0.weight of net changed after `with step`, and not alike" in str(one.private.refusal())
    one.private.see_code(2, [])
    assert one.private.number() == 0


def test_changes_that_are_seen_twice_before_a_step_are_still_the_first() -> None:
    """After a recovery the loop asks for the same step again."""
    changes = LateChanges()
    changes.see(4, ["a"])
    changes.see(4, [])
    assert changes.lost([]) == ["a"]  # here for the first time, so perhaps there as well
    changes.see(5, ["a"])
    assert changes.lost([]) == []
    assert changes.lost(["a"]) == ["a"]
    assert changes.lost(["b"]) == ["b"]  # there alone, so it is not known whether this time
    assert changes.lost(None) == []
