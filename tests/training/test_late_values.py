"""Values that code changes after the barrier: offered by one rank, taken by the replacement of another."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from relight.training.carried.finding.kept import Kept
from relight.training.carried.finding.spots.spot import DictSpot
from relight.training.carried.late_values import offered, taken, taken_in_part
from relight.training.carried.values.homes import Homes
from relight.training.carried.values.parts import NoParts
from relight.training.carried.values.trees.reader import Reader
from relight.training.carried.values.trees.words import TAG
from relight.training.carried.values.trees.writer import Writer
from relight.training.state.values.late import changed_likewise

PART = torch.ones(2)


class OnePart(NoParts):
    """Knows one tensor."""

    def name_of(self, value: Any) -> Any:
        return ["net", "weight"] if value is PART else None


def captured(names: dict[str, Any], unsettled: Sequence[str] = (), lacking: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a rank keeps at its barrier."""
    writer = Writer(Homes(), OnePart())
    trees = {name: writer.write("", value) for name, value in names.items()}
    return {"names": trees, "unsettled": [*unsettled], "lacking": [*lacking]}


def changed_to(before: dict[str, Any], now: dict[str, Any]) -> bytes:
    """Return what a rank offers that kept these values, all of which code may change, and has those now."""
    places = {key: Kept(key, key, "", DictSpot(now, key), feeds=True, late=True) for key in (*before, *now)}
    return offered(captured(before, unsettled=[*before]), places, OnePart())


def values(trees: dict[str, Any]) -> dict[str, Any]:
    return {key: Reader(Homes()).read("", tree) for key, tree in trees.items()}


def test_those_are_taken_that_both_ranks_had_kept_alike() -> None:
    before = {"rate": 0.1, "best": None, "waited": 3, "log": [1.0]}
    offer = changed_to(before, {"rate": 0.05, "best": (2, "b"), "waited": 3, "log": [1.0, 2.0]})
    own = captured({**before, "waited": 2}, unsettled=["rate", "waited"], lacking=["best", "log"])
    assert values(taken(own, offer)) == {"rate": 0.05, "best": (2, "b"), "log": [1.0, 2.0]}


def test_none_is_taken_that_the_lost_rank_kept_again_after_that_code() -> None:
    offer = changed_to({"rate": 0.1, "waited": 0}, {"rate": 0.05, "waited": 1})
    assert not taken(captured({"rate": 0.1, "waited": 0}), offer)
    assert [*taken(captured({"rate": 0.1, "waited": 0}, lacking=["waited"]), offer)] == ["waited"]
    assert not taken(None, offer)
    assert not taken(captured({"rate": 0.1}, unsettled=["rate"]), b"")


@pytest.mark.parametrize("bits", [0.0, -0.0])
def test_tensors_are_alike_in_all_bits(bits: float) -> None:
    offer = changed_to({"centres": torch.tensor([bits, 1.0])}, {"centres": torch.tensor([4.0, 5.0])})
    found = values(taken(captured({"centres": torch.tensor([0.0, 1.0])}, unsettled=["centres"]), offer))
    assert [one.tolist() for one in found.values()] == ([[4.0, 5.0]] if str(bits) == "0.0" else [])


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (None, PART),  # a copy of it would not be the part
        (PART, None),
        (None, [PART]),
        (None, object()),  # cannot be written down
        (None, "x" * 2**20),
    ],
    ids=["a part now", "a part then", "in a list", "unknown", "too large"],
)
def test_some_are_not_offered(before: Any, now: Any) -> None:
    assert not changed_to({"it": before}, {"it": now})


def test_what_shares_an_object_with_another_is_not_offered() -> None:
    shared = [1]
    offer = changed_to({"a": shared, "b": shared}, {"a": [2], "b": [2]})
    assert [*taken(captured({"a": [1], "b": [1]}, unsettled=["a", "b"]), offer)] == ["a"]


def test_a_name_that_is_gone_is_not_offered() -> None:
    assert not changed_to({"a": 1}, {})
    assert not offered(None, {}, NoParts())


def test_of_values_that_differ_the_change_alone_is_taken() -> None:
    ended: dict[str, Any] = {"started": None, "runs": 4, "open": [], "name": "b"}
    timer = {"started": 1.5, "runs": 3, "open": ["a"], "name": "b"}
    offer = changed_to({"timer": {**timer, "started": 2.5}}, {"timer": ended})
    own = captured({"timer": timer}, unsettled=["timer"])
    assert not taken(own, offer)
    assert values(taken_in_part(own, offer)) == {"timer": ended}
    assert not taken_in_part(captured({"timer": timer}), offer)


def test_of_values_that_differ_those_stay_that_each_rank_computes() -> None:
    offer = changed_to({"sum": 2.5, "seen": [1]}, {"sum": 4.0, "seen": [1, 7]})
    assert not taken_in_part(captured({"sum": 1.5, "seen": [2]}, unsettled=["sum", "seen"]), offer)
    both = captured({"sum": 2.5, "seen": [2]}, unsettled=["sum", "seen"])
    assert values(taken(both, offer)) == {"sum": 4.0}
    assert not taken_in_part(both, offer)


@pytest.mark.parametrize(
    ("own", "before", "now", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, {"a": 3, "c": 4}, {"a": 3, "b": 2, "c": 4}),
        ({"a": 1, "b": 2}, {"a": 9, "b": 3}, {"b": 4}, {"b": 2}),
        ([1, 2], [1, 3], [5, 0], [5, 0]),
        ([1, 2], [1, 3], [5, 6, 7], [1, 2]),
        ((1, 2.0), (2, 2.0), (2, 3.0), (1, 3.0)),
        (True, False, True, True),
        (-0.0, 0.0, 1.0, -0.0),
    ],
)
def test_changed_likewise(own: Any, before: Any, now: Any, expected: Any) -> None:
    found = changed_likewise(own, before, now)
    assert repr(found) == repr(expected)


def test_values_as_the_loop_asked_for_a_step_that_was_undone() -> None:
    before = {"running": 1.0, "total": 3, "gone": 1, "log": [1]}
    places = {key: Kept(key, key, "", DictSpot({**before}, key), feeds=True, late=True) for key in before}
    kept, again = captured(before, unsettled=[*before]), captured({"running": None, "total": 4, "log": [2]})
    again["names"]["log"] = {TAG: "new", "v": again["names"]["log"]}
    offer = offered(kept, places, OnePart(), again)
    assert values(taken(captured(before, lacking=[*before]), offer)) == {"running": None, "total": 4, "log": [2]}
