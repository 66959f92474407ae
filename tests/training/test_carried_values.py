"""Values that are carried: remembered, put back with their identities, and written down for another process."""

import ctypes
import multiprocessing
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from relight.training.carried.values.homes import Homes
from relight.training.carried.values.trees.reader import Reader
from relight.training.carried.values.trees.words import Unsupported
from relight.training.carried.values.trees.writer import Writer, write_down
from relight.training.state.values.kinds import kind_of
from relight.training.state.values.marks import changed, put_back, remember
from relight.transfer.io.codec import decode_tree, encode_tree

Pair = namedtuple("Pair", "left right")


@dataclass
class Meter:
    total: float = 0.0
    recent: list[float] = field(default_factory=list)


class Counting(random.Random):
    """Counts its draws."""

    draws = 0

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.log = [1.0]

    def random(self) -> float:
        self.draws += 1
        return super().random()


class Node:
    def __init__(self, parent: "Node | None") -> None:
        self.parent = parent
        self.children: list[Node] = []


class Slotted:
    __slots__ = ("count", "other")

    def __init__(self) -> None:
        self.count = 1


class Point(ctypes.Structure):
    _fields_ = [("x", ctypes.c_int), ("y", ctypes.c_double)]


class Hidden:
    __slots__ = ("__count",)

    def __init__(self) -> None:
        self.__count = 1

    def grow(self) -> None:
        self.__count += 1

    def __repr__(self) -> str:
        return f"{self.__count}"


class Latents(torch.Tensor):
    bounds: list[int]


RECORD = np.dtype([("time", np.int32), ("state", np.uint8, (2, 2))])


def _latents() -> Latents:
    made = torch.arange(4.0).as_subclass(Latents)
    made.bounds = [0, 1]
    return made


def _objects() -> Any:
    made = np.empty(3, object)
    made[0], made[1] = [1, 2], np.arange(3)
    return made


def _push(value: list[Any]) -> None:
    value[0]["a"].append(5)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1, 2.5], lambda v: v.append(3)),
    "nested list": (lambda: [{"a": [1]}], _push),
    "dict": (lambda: {"a": 1, 2: "b"}, lambda v: v.update(a=7)),
    "order of a dict": (lambda: {"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a"))),
    "set": (lambda: {1, 2}, lambda v: v.add(9)),
    "deque": (lambda: deque([1, 2, 3], maxlen=3), lambda v: v.append(4)),
    "counter": (lambda: Counter("aab"), lambda v: v.update("b")),
    "defaultdict": (lambda: defaultdict(list, a=[1]), lambda v: v["b"].append(2)),
    "ordered dict": (lambda: OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
    "tensor": (lambda: torch.arange(4.0), lambda v: v.add_(1)),
    "dataset of torch's": (lambda: [TensorDataset(torch.ones(2))], lambda v: v.append(TensorDataset(torch.ones(3)))),
    "tensor of a class": (_latents, lambda v: v.normal_()),
    "attribute of such a tensor": (_latents, lambda v: v.bounds.append(2)),
    "array of objects": (_objects, lambda v: v[0].append(3)),
    "another object in an array": (_objects, lambda v: v.__setitem__(1, "other")),
    "array of records": (lambda: np.zeros(3, RECORD), lambda v: v["state"].fill(4)),
    "array of texts": (lambda: np.array(["a", "bc"]), lambda v: v.__setitem__(0, "x")),
    "text of NumPy": (lambda: [np.str_("a")], lambda v: v.append(np.str_("b"))),
    "tensor's data": (lambda: torch.arange(4.0), lambda v: setattr(v, "data", torch.zeros(4))),
    "part of a tensor": (lambda: torch.arange(4.0), lambda v: v[1:2].zero_()),
    "tensor in a tuple": (lambda: (torch.zeros(2), 1), lambda v: v[0].add_(1)),
    "bfloat16": (lambda: torch.ones(3, dtype=torch.bfloat16), lambda v: v.mul_(2)),
    "parameter": (lambda: torch.ones(3, requires_grad=True), lambda v: v.data.mul_(2)),
    "array": (lambda: np.arange(4.0), lambda v: v.__setitem__(1, 9)),
    "bytearray": (lambda: bytearray(b"ab"), lambda v: v.__setitem__(0, 9)),
    "torch generator": (lambda: torch.Generator().manual_seed(1), lambda v: torch.rand(1, generator=v)),
    "random.Random": (lambda: random.Random(1), lambda v: v.gauss(0, 1)),
    "numpy generator": (lambda: np.random.default_rng(1), lambda v: v.normal()),
    "numpy Mersenne twister": (lambda: np.random.Generator(np.random.MT19937(1)), lambda v: v.normal()),
    "RandomState": (lambda: np.random.RandomState(1), lambda v: v.normal()),
    "dataclass": (lambda: Meter(1.0, [2.0]), lambda v: v.recent.append(3.0)),
    "attribute of a dataclass": (Meter, lambda v: setattr(v, "total", 4.0)),
    "new attribute": (Meter, lambda v: setattr(v, "fresh", 4.0)),
    "slots": (Slotted, lambda v: setattr(v, "count", 4)),
    "number of C": (lambda: ctypes.c_double(1.5), lambda v: setattr(v, "value", 2.5)),
    "numbers of C": (lambda: (ctypes.c_int * 3)(1, 2, 3), lambda v: v.__setitem__(1, 9)),
    "structure of C": (lambda: Point(1, 2), lambda v: setattr(v, "y", 7)),
    "shared number": (lambda: multiprocessing.Value("i", 4), lambda v: setattr(v, "value", 5)),
    "shared numbers": (lambda: multiprocessing.Array("d", [1, 2]), lambda v: v.__setitem__(0, 5)),
    "slots with hidden names": (Hidden, lambda v: v.grow()),
    "objects in a list": (lambda: [Meter(), Meter(2.0)], lambda v: v[1].recent.append(1.0)),
    "buffer of transitions": (
        lambda: deque([(torch.ones(2), 0.5, False)]),
        lambda v: v.append((torch.zeros(2), 1.0, True)),
    ),
}


def shown(value: Any) -> Any:
    """The value as bytes, to be compared."""
    return encode_tree({"v": write_down(value)}, "value")


def through_bytes(value: Any) -> Any:
    return decode_tree(encode_tree({"v": write_down(value)}, "value"))["v"]


def read_back(tree: Any, old: Any, *, in_place: bool) -> Any:
    homes = Homes()
    if in_place:
        homes.add("v", old)
    return Reader(homes).read("v", tree)


@pytest.mark.parametrize("name", CHANGES)
def test_is_put_back_in_place(name: str) -> None:
    make, change = CHANGES[name]
    value = make()
    before, mark = shown(value), remember(value)
    assert not changed(mark, value)
    change(value)
    assert changed(mark, value)
    assert shown(value) != before
    assert put_back(mark) is value
    assert shown(value) == before
    assert not changed(remember(value), value)


@pytest.mark.parametrize("name", CHANGES)
def test_is_put_into_another_process_in_place(name: str) -> None:
    make, change = CHANGES[name]
    origin, other = make(), make()
    change(origin)
    tree = through_bytes(origin)
    in_place = read_back(tree, other, in_place=True)
    assert shown(in_place) == shown(origin)
    if not isinstance(origin, tuple):
        assert in_place is other


def test_memory_of_c_is_not_made_anew() -> None:
    tree = through_bytes(ctypes.c_int(3))
    with pytest.raises(Unsupported, match="a c_int, which this process does not have"):
        read_back(tree, None, in_place=False)


@pytest.mark.parametrize("name", [name for name, (make, _) in CHANGES.items() if kind_of(make()) != "cells"])
def test_is_made_anew_in_another_process(name: str) -> None:
    make, change = CHANGES[name]
    origin, other = make(), make()
    change(origin)
    before = shown(other)
    made = read_back(through_bytes(origin), other, in_place=False)
    assert made is not other
    assert shown(made) == shown(origin)
    assert shown(other) == before
    assert type(made) is type(origin)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        -(2**70),
        2.5,
        float("inf"),
        1 + 2j,
        "text",
        b"bytes",
        (1, (2, "x")),
        frozenset({1}),
        torch.Size([2]),
    ],
    ids=repr,
)
def test_constants_go_through_bytes(value: Any) -> None:
    mark = remember(value)
    assert not changed(mark, value)
    assert put_back(mark) is value
    made = read_back(through_bytes(value), None, in_place=True)
    assert made == value
    assert type(made) is type(value)


def test_scalars_of_numpy_stay_scalars() -> None:
    made = read_back(through_bytes(np.float32(2.5)), None, in_place=False)
    assert type(made) is np.float32
    assert made == np.float32(2.5)


def test_named_tuples_keep_their_names() -> None:
    made = read_back(through_bytes(Pair(1, torch.ones(2))), None, in_place=False)
    assert isinstance(made, Pair)
    assert made.right.tolist() == [1, 1]


TABLES: dict[str, tuple[dict[Any, Any], dict[Any, Any]]] = {
    "another value": ({"a": 1, "b": 2.5}, {"a": 1, "b": 2.0}),
    "the same number of another type": ({"a": 1, "b": 2}, {"a": 1, "b": 2.0}),
    "a zero of another sign": ({"a": 0.0}, {"a": -0.0}),
    "one more": ({number: str(number) for number in range(600)}, {number: str(number) for number in range(601)}),
    "another key for the same value": ({"a": 1, "b": 2}, {"a": 1, "c": 2}),
    "another order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "a list instead": ({"a": 1}, {"a": [1]}),
    "none left": ({"a": 1}, {}),
}


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda items: defaultdict(list, items)])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_plain_values_goes_back(name: str, kind: Callable[[Any], dict[Any, Any]]) -> None:
    before, after = TABLES[name]
    value = kind(before)
    for mark, holder in ((remember(value), value), (remember([value]), [value])):
        marked = mark.saved[0] if mark.kind == "list" else mark
        assert not changed(marked, value)
        value.clear()
        value.update(after)
        assert changed(marked, value)
        assert put_back(marked) is value
        assert repr([*value.items()]) == repr([*before.items()])
        assert not changed(marked, value), holder


def test_nan_is_no_change() -> None:
    value = float("nan")
    assert not changed(remember(value), float("nan"))
    assert changed(remember(0.0), -0.0)
    assert changed(remember(1), 1.0)


def test_generators_go_on_alike() -> None:
    for make, draw in (
        (lambda: np.random.default_rng(3), lambda g: g.normal()),
        (lambda: random.Random(3), lambda g: g.gauss(0, 1)),
        (lambda: np.random.RandomState(3), lambda g: g.normal()),
        (lambda: torch.Generator().manual_seed(3), lambda g: float(torch.randn((), generator=g))),
    ):
        origin = make()
        draw(origin)
        made = read_back(through_bytes(origin), None, in_place=False)
        assert [draw(made) for _ in range(5)] == [draw(origin) for _ in range(5)]


def test_attributes_of_a_generator_belong_to_it() -> None:
    generator = Counting(1)
    held, saved = generator.log, remember(generator)
    generator.log.append(2.0)
    vars(generator)["new"] = "a"
    assert changed(saved, generator)
    put_back(saved)
    assert generator.log is held
    assert held == [1.0]
    assert "new" not in vars(generator)
    generator.draws = 5
    made = read_back(through_bytes(generator), Counting(9), in_place=True)
    assert (made.draws, made.log) == (5, [1.0])


def test_state_with_a_graph_is_carried_without_it() -> None:
    weight = torch.ones(2, requires_grad=True)
    made = read_back(through_bytes(weight * 2), None, in_place=True)
    assert made.tolist() == [2, 2]
    assert not made.requires_grad


def test_a_growing_list_is_cut_and_not_copied() -> None:
    losses = [0.5] * 100_000
    mark = remember(losses, grows=True)
    losses.append(1.0)
    assert changed(mark, losses)
    put_back(mark)
    assert len(losses) == 100_000


@pytest.mark.parametrize(
    "value",
    [iter([1]), lambda: 0, object(), torch.nn.Linear(1, 1), [iter([1])]],
    ids=["iterator", "function", "object", "module", "in a list"],
)
def test_what_cannot_be_written_down_is_named(value: Any) -> None:
    with pytest.raises(Unsupported, match=type(value).__name__ if not isinstance(value, list) else "iterator"):
        write_down(value)


def test_what_holds_itself_holds_itself_again() -> None:
    value: list[Any] = [1]
    value.append(value)
    made = read_back(through_bytes(value), None, in_place=False)
    assert made[0] == 1
    assert made[1] is made


def test_what_is_shared_is_one_object_again() -> None:
    inner, origin, other = [1], Meter(1.0), Meter(9.0)
    values = {"list": [inner, inner, origin], "inner": inner, "meter": origin}
    writer, reader = Writer(Homes()), Reader(Homes())
    trees = {name: writer.write(name, value) for name, value in values.items()}
    made = {name: reader.read(name, decode_tree(encode_tree({"v": tree}, ""))["v"]) for name, tree in trees.items()}
    assert made["list"][0] is made["list"][1] is made["inner"] == [1]
    assert made["list"][2] is made["meter"] is not other


def test_objects_of_the_beginning_are_the_other_process_s_own() -> None:
    def begin() -> tuple[list[Any], Any, Homes]:
        outer, homes = [[0], [1], Meter()], Homes()
        homes.add("outer", outer)
        return outer, outer[1], homes

    here, inner, homes = begin()
    there, same, homes_there = begin()
    inner.append(2)
    here[0], here[1] = [7], here[2]  # a new list; and one that was elsewhere
    here.append(inner)
    tree = decode_tree(encode_tree({"v": Writer(homes).write("outer", here)}, ""))["v"]
    meter, first = there[2], there[0]
    made = Reader(homes_there).read("outer", tree)
    assert made is there
    assert made[0] == [7]
    assert made[0] is not first
    assert first == [0]
    assert made[1] is made[2] is meter
    assert made[3] is same
    assert same == [1, 2]


def test_a_value_that_leads_back_to_its_holder_means_the_holder() -> None:
    """A tree whose children know their parent: only the root's attributes are carried, and the root stays itself."""

    def grown(children: int) -> Node:
        root = Node(None)
        root.children += [Node(root) for _ in range(children)]
        return root

    here, there = grown(2), grown(0)
    writer = Writer(Homes(), holders={id(here): "root"})
    tree = decode_tree(encode_tree({"v": writer.write("root.children", here.children)}, ""))["v"]
    children = Reader(Homes(), holder_at={"root": there}.__getitem__).read("root.children", tree)
    assert len(children) == 2
    assert all(child.parent is there for child in children)


@pytest.mark.parametrize(
    "value",
    [{}, {"loss": 0.5, "steps": 3}, {"a": None, "b": True, "c": "x", "d": b"y", "e": -0.0, "f": -(2**62)}],
)
def test_a_dictionary_of_words_is_written_alike_in_both_ways(value: Any) -> None:
    quick, slow = Writer(Homes()), Writer(Homes())
    found = quick.write_words("meter", value)
    assert found is not None
    mark, lasting = found
    assert decode_tree(encode_tree(lasting.tree, "")) == decode_tree(encode_tree(slow.write("meter", value), ""))
    general = slow.lasting(slow.write("other", value))
    assert general is None  # it refers to what was written under another name
    assert not changed(mark, value)
    assert quick.write_again(lasting) is None  # the same object twice is one object: written as the second of two
    assert Writer(Homes()).write_again(lasting) is lasting.tree


@pytest.mark.parametrize("value", [{1: 2}, {"a": [1]}, {"a": 2**70}, {"a": np.float32(1)}, {"a": torch.ones(())}])
def test_other_dictionaries_are_written_one_by_one(value: Any) -> None:
    writer = Writer(Homes())
    assert writer.write_words("meter", value) is None
    assert not writer._alive


def test_a_value_lasts_only_if_its_mark_tells_all_of_it() -> None:
    def lasts(value: Any, *, grows: bool = True) -> bool:
        writer = Writer(Homes())
        return writer.lasting(writer.write("v", value, grows=grows)) is not None

    assert all(map(lasts, [1.5, "x", None, [1, [2.0]], (1, "a"), {"a": {"b": [None]}}, deque([1], maxlen=3)]))
    others = [{1: 2}, {1, 2}, [np.float32(0)], [torch.ones(2)], [0.0] * 300, Point(1, 2), [torch.float32]]
    assert not any(map(lasts, others))
    assert lasts([0.0] * 300, grows=False)
    assert not lasts([0.0, {1: 2}], grows=False)


def test_zeros_of_numpy_have_a_sign() -> None:
    assert changed(np.float32(0.0), np.float32(-0.0))
    assert changed(0.0, -0.0)
    assert changed(1.0, float("nan"))
    assert not changed(float("nan"), float("nan"))
    assert not changed(0.5, float("0.5"))
