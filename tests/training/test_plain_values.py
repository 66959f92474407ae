"""Plain values that a rank keeps of its layers' attributes."""

from typing import Any, NamedTuple

import pytest
import torch

from relight.training.state.modules.plain_values import MOST_BYTES, pack, plain_bytes, put_back, unpack
from relight.transfer.io.codec import decode_tree, encode_tree


class Pair(NamedTuple):
    first: int
    second: int


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
    assert put_back(mine, given) is given
    assert mine.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(torch.eye(2).to_sparse(), id="sparse"),
        pytest.param(torch.eye(2).to_sparse_csr(), id="by rows"),
        pytest.param(torch.nested.nested_tensor([torch.ones(1)]), id="nested"),
        pytest.param(torch.empty(2, device="meta"), id="without memory"),
        pytest.param(torch.empty(MOST_BYTES), id="large"),
        pytest.param(Pair(1, 2), id="named tuple"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_not_plain(value: Any) -> None:
    assert plain_bytes(value, in_graphs=True) is None
