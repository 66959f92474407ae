"""Trees survive the trip to bytes and back, bit for bit, and what cannot be carried is named."""

import enum
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relight.errors import UsageError
from relight.transfer.io.codec import (
    PIECE_BYTES,
    Flat,
    TensorSpec,
    TensorTable,
    decode_tree,
    digest_of,
    empty_like,
    encode_tree,
    pieces,
    raw_bytes,
    tensor_digests,
    unflatten,
)

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(-9, 9), inner, max_size=4)
    ),
    max_leaves=20,
)
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@given(PLAIN)
def test_plain_trees_come_back_equal(tree: object) -> None:
    assert decode_tree(encode_tree(tree, "tree")) == tree


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)], ids=str)
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(torch.tensor(shape).prod()) if shape else 1
    source = empty_like(TensorSpec(str(dtype).removeprefix("torch."), shape))
    raw_bytes(source)[:] = random.Random(1).randbytes(count * source.element_size())
    back = decode_tree(encode_tree({"t": source}, "tree"))["t"]
    assert (back.dtype, back.shape) == (source.dtype, source.shape)
    assert bytes(raw_bytes(back)) == bytes(raw_bytes(source))


def test_non_contiguous_tensor_and_parameter() -> None:
    matrix = torch.arange(12.0).reshape(3, 4).t()
    parameter = torch.nn.Parameter(torch.ones(2))
    back = decode_tree(encode_tree([matrix, parameter], "tree"))
    assert torch.equal(back[0], matrix)
    assert torch.equal(back[1], parameter)


@given(st.permutations(range(4)), st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_axes_keep_their_order_in_memory(axes: list[int], shape: list[int]) -> None:
    """Products are summed in the order of memory: columns of LAPACK, channels_last."""
    made = torch.arange(float(math.prod(shape))).reshape([shape[axis] for axis in axes])
    tensor = made.permute([axes.index(axis) for axis in range(4)])
    (back,) = decode_tree(encode_tree([tensor], ""))
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()


def test_gaps_between_elements_are_left_out() -> None:
    for tensor in (torch.randn(6, 4)[:, ::2], torch.randn(3, 1).expand(3, 4)):
        (back,) = decode_tree(encode_tree([tensor], ""))
        assert torch.equal(back, tensor)
        assert back.is_contiguous()


def test_a_tensor_that_was_received_elsewhere_is_laid_out_as_it_was_sent() -> None:
    by_column, by_row = torch.randn(3, 4).t(), torch.randn(3, 4)
    flat = Flat([by_column, by_row])
    one, two = unflatten(flat.tree, [torch.zeros(4, 3), torch.zeros(4, 3).t()])
    assert (one.stride(), two.stride()) == ((1, 4), (4, 1))


def test_numpy_values() -> None:
    tree: dict[str, Any] = {"array": np.arange(6).reshape(2, 3), "scalar": np.float32(1.5)}
    back = decode_tree(encode_tree(tree, "tree"))
    assert np.array_equal(back["array"], tree["array"])
    assert back["scalar"] == 1.5
    assert type(back["scalar"]) is np.float32


def test_arrays_keep_their_order_in_memory() -> None:
    array = np.asfortranarray(np.random.default_rng(0).normal(size=(3, 4)))
    back = decode_tree(encode_tree(array, ""))
    assert np.array_equal(back, array)
    assert back.strides == array.strides


def test_numbers_of_numpy_keep_their_type() -> None:
    """np.float64 is a float too, but it makes a float64 of a float32, which a float does not."""
    tree = [np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True), np.array(2.5), 0.1]
    back = decode_tree(encode_tree(tree, "tree"))
    assert [type(value) for value in back] == [type(value) for value in tree]
    assert back == tree


def test_streams_of_python() -> None:
    tree = {"stream": random.getstate()}
    back = decode_tree(encode_tree(tree, "tree"))
    assert back["stream"] == tree["stream"]


def test_what_cannot_be_carried_is_named_with_its_path() -> None:
    with pytest.raises(UsageError, match=r"optimizer\.groups\[0\]\.callback is a builtins\.function"):
        Flat({"optimizer": {"groups": [{"callback": lambda: None}]}})


class Switches(enum.Flag):
    ONE = enum.auto()
    TWO = enum.auto()


def test_several_flags_at_once_and_none_are_written_by_their_number() -> None:
    tree = {"flags": [Switches.ONE, Switches.ONE | Switches.TWO, Switches(0), ~Switches.TWO]}
    assert decode_tree(encode_tree(tree, "tree")) == tree


def test_an_enumeration_that_another_process_does_not_find_is_named_with_its_path() -> None:
    local = enum.Enum("local", "A B")
    with pytest.raises(UsageError, match=r"state\.mode is of the class local, which another process cannot find"):
        encode_tree({"mode": local["A"]}, "state")


def test_sets_are_written_in_one_order() -> None:
    assert encode_tree({"c", "a", "b"}, "s") == encode_tree({"b", "c", "a"}, "s")


@given(st.integers(0, 3 * PIECE_BYTES + 1))
def test_pieces_cover_each_byte_once(count: int) -> None:
    ranges = list(pieces(count))
    assert sum(end - start for start, end in ranges) == count
    assert all(b[0] == a[1] for a, b in itertools.pairwise(ranges))


def test_digest_sees_a_single_bit() -> None:
    tensor = torch.zeros(1000)
    flat = Flat({"t": tensor})
    before = digest_of(flat, [tensor_digests(tensor)])
    tensor.view(torch.int32)[500] ^= 1
    assert digest_of(flat, [tensor_digests(tensor)]) != before


def test_a_digest_is_one_of_values_however_they_lie_in_memory() -> None:
    tensor = torch.randn(3, 4)
    flats = [Flat({"a": [one]}) for one in (tensor, tensor.t().contiguous().t())]
    assert flats[0].tree != flats[1].tree
    assert len({digest_of(flat, [[1]]) for flat in flats}) == 1


def test_a_digest_is_one_of_values_wherever_they_lie() -> None:
    """A meta tensor stands for one on a device that this process does not have."""
    flats = [Flat({"a": [one]}) for one in (torch.zeros(3), torch.zeros(3, device="meta"))]
    assert flats[0].tree != flats[1].tree
    assert len({digest_of(flat, [[1]]) for flat in flats}) == 1
    assert unflatten(flats[1].tree, [torch.ones(3)])["a"][0].tolist() == [1, 1, 1]


def test_digest_sees_names_and_plain_values() -> None:
    digests = {digest_of(Flat(tree), []) for tree in ({"lr": 0.1}, {"lr": 0.2}, {"Lr": 0.1})}
    assert len(digests) == 3


def test_unflatten_uses_the_tensors_it_is_given() -> None:
    flat = Flat({"a": torch.ones(2), "b": (torch.zeros(1), 3)})
    tree = unflatten(flat.tree, [torch.full((2,), 7.0), torch.full((1,), 8.0)])
    assert tree["a"].tolist() == [7, 7]
    assert tree["b"][0].tolist() == [8]
    assert tree["b"][1] == 3


def test_a_table_of_tensors_is_written_as_a_dict_of_them_whatever_became_of_them() -> None:
    table = TensorTable("buffers")
    mean, count, matrix = torch.ones(3), torch.tensor(2), torch.randn(2, 3)

    def is_written_as_a_dict(tensors: dict[str, torch.Tensor]) -> bool:
        trees = [{"buffers": one, "more": {"last": torch.zeros(2)}} for one in (tensors, table.look_at(tensors))]
        paths = [Flat(tree).paths for tree in trees]
        return encode_tree(trees[0], "") == encode_tree(trees[1], "") and paths[0] == paths[1]

    tensors = {"mean": mean, "count": count, "matrix": matrix}
    assert is_written_as_a_dict(tensors)
    mean += 1
    assert is_written_as_a_dict(tensors)
    mean.data = torch.full((3,), 7.0)
    assert is_written_as_a_dict(tensors)
    matrix.t_()
    assert is_written_as_a_dict(tensors)
    count.data = torch.tensor(2.0)
    assert is_written_as_a_dict(tensors)
    mean.resize_(0)
    assert is_written_as_a_dict(tensors)
    assert is_written_as_a_dict(
        {"other": mean, "count": count, "matrix": torch.view_as_complex(torch.ones(2, 2)).conj()}
    )
    assert is_written_as_a_dict({"count": count, "mean": torch.ones(2).to_sparse().to_dense()})
    assert is_written_as_a_dict({})
    assert encode_tree([torch.ones(1), table.look_at(tensors)], "") == encode_tree([torch.ones(1), tensors], "")
