"""Plain values that a rank keeps of its layers' attributes."""

import itertools
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch

from relight.training.state.modules.plain_values import MOST_BYTES, pack, plain_bytes, put_in_place, unpack
from relight.training.state.values.kinds import attributes_of, blocks_in, can_be_carried
from relight.training.state.values.marks import changed, remember
from relight.transfer.io.codec import decode_tree, encode_tree


class Bare:
    pass


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


class Words(list[str]):
    """A container of a class of its own."""


def kept(value: Any) -> Any:
    """The value as a replacement gets it."""
    return unpack(decode_tree(encode_tree(pack(value), "attribute")))


def test_a_tensor_in_a_graph_is_kept_without_it() -> None:
    hidden = torch.ones(3, requires_grad=True) * 2
    assert plain_bytes(hidden) is None
    assert plain_bytes(hidden, in_graphs=True) is not None
    assert torch.equal(kept(hidden), hidden.detach())
    assert not kept(hidden).requires_grad


def test_a_pair_of_states_in_a_graph() -> None:
    pair = (torch.ones(2, requires_grad=True) * 2, torch.zeros(2))
    assert plain_bytes(pair) is None
    assert plain_bytes(pair, in_graphs=True) is not None
    assert [part.tolist() for part in kept(pair)] == [[2.0, 2.0], [0.0, 0.0]]


def test_a_leaf_goes_on_requiring_a_gradient() -> None:
    leaf = torch.ones(3, requires_grad=True)
    again = kept({"leaf": leaf})["leaf"]
    assert again.requires_grad
    assert again.is_leaf
    assert torch.equal(again, leaf)


def test_no_value_is_written_through_a_graph() -> None:
    mine = torch.ones(3, requires_grad=True) * 2
    given = torch.zeros(3)
    assert put_in_place(mine, given) is given
    assert mine.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(torch.eye(2).to_sparse(), id="sparse"),
        pytest.param(torch.eye(2).to_sparse_csr(), id="by rows"),
        pytest.param(torch.nested.nested_tensor([torch.ones(1)]), id="nested"),
        pytest.param(torch.empty(2, device="meta"), id="without memory"),
        pytest.param(torch.empty(MOST_BYTES), id="large"),
        pytest.param({torch.ones(1)}, id="tensors in a set"),
        pytest.param({torch.ones(1): 1}, id="tensors as keys"),
        pytest.param(Bare(), id="object"),
        pytest.param(defaultdict(lambda: 1), id="function without a name"),
        pytest.param(np.array([None]), id="array of objects"),
        pytest.param(CYCLE, id="contains itself"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_not_plain(value: Any) -> None:
    assert plain_bytes(value, in_graphs=True) is None


def test_attributes_beside_what_a_container_holds_are_kept() -> None:
    words = Words(["a", "b"])
    vars(words)["seen"] = 3
    again = kept(words)
    assert (type(again), again, vars(again)) == (Words, ["a", "b"], {"seen": 3})
    mine = Words(["c"])
    vars(mine)["gone"] = 1
    assert put_in_place(mine, again) is mine
    assert (mine, vars(mine)) == (["a", "b"], {"seen": 3})


def test_the_order_of_keys_is_kept() -> None:
    ordered = OrderedDict(a=1, b=2)
    ordered.move_to_end("a")
    mine = OrderedDict(a=0, b=0)
    assert list(put_in_place(mine, kept(ordered)).items()) == [("b", 2), ("a", 1)]
    assert list(mine) == ["b", "a"]


class Holder:
    """Has attributes."""


class Guarded:
    """Counts how often its attributes are asked for, and answers with errors of its own."""

    __slots__ = ("asked", "value")

    def __init__(self) -> None:
        object.__setattr__(self, "asked", 0)
        object.__setattr__(self, "value", 3)

    def __getattribute__(self, name: str) -> Any:
        object.__setattr__(self, "asked", object.__getattribute__(self, "asked") + 1)
        raise KeyError(name)


def test_attributes_are_read_without_code_of_the_class() -> None:
    assert attributes_of(Guarded()) == {"asked": 0, "value": 3}


@pytest.mark.parametrize("kind", ["dict", "list", "set", "deque", "object"])
def test_a_thread_may_change_a_value_that_is_looked_at(kind: str) -> None:
    value: Any = {"dict": {}, "list": [], "set": set(), "deque": deque(), "object": Holder()}[kind]
    done = threading.Event()

    def change() -> None:
        turns = itertools.cycle(range(100))
        while not done.is_set():
            key = next(turns)
            if kind in ("dict", "object"):
                table = value if kind == "dict" else vars(value)
                table[f"n{key}"] = key
                if key == 60:
                    table.clear()
            elif kind == "set":
                value.add(key)
                value.discard(key - 30)
            else:
                value.append(key)
                if key == 60:
                    value.clear()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(1000):
            mark = remember(value)
            changed(mark, value)
            list(blocks_in(value, ("tensor",)))
            can_be_carried(value)
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
