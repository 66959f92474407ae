"""Tensors that may be moved, and whether two sides mean the same."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.errors import UsageError
from relight.transfer.plan.manifest import (
    ITEM_BYTES,
    Entry,
    Manifest,
    describe_bytes,
    differences,
    make_manifest,
    parse_bytes,
)

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
dtypes = st.sampled_from(sorted(ITEM_BYTES))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """A few tensors of any type and shape, some of them known by two names."""
    tied = draw(st.lists(st.booleans(), max_size=8))
    entries: list[Entry] = []
    for number, is_tied in enumerate(tied):
        originals = [entry for entry in entries if not entry.same_as]
        if originals and is_tied:
            twin = draw(st.sampled_from(originals))
            entries.append(Entry(f"t{number}", twin.dtype, twin.shape, twin.name))
        else:
            entries.append(Entry(f"t{number}", draw(dtypes), draw(shapes)))
    return make_manifest(entries)


@given(manifests())
def test_tied_tensors_are_counted_once(manifest: Manifest) -> None:
    own = [entry for entry in manifest.entries if not entry.same_as]
    assert manifest.total_bytes == sum(math.prod(entry.shape) * ITEM_BYTES[entry.dtype] for entry in own)


@given(manifests())
def test_a_manifest_fits_itself_in_any_order(manifest: Manifest) -> None:
    assert differences(manifest, manifest) == []
    assert differences(Manifest(tuple(reversed(manifest.entries))), manifest) == []


@given(manifests(), manifests())
def test_manifests_fit_exactly_if_names_types_and_shapes_agree(one: Manifest, other: Manifest) -> None:
    def facts(manifest: Manifest) -> set[tuple[str, str, tuple[int, ...]]]:
        return {(entry.name, entry.dtype, entry.shape) for entry in manifest.entries}

    assert (not differences(one, other)) == (facts(one) == facts(other))


def test_differences_are_named_and_bounded() -> None:
    offered = make_manifest([Entry("a", "float32", (2,)), Entry("b", "float32", (2,)), Entry("c", "float32", (2,))])
    wanted = make_manifest([Entry("a", "bfloat16", (3,)), Entry("b", "float32", (2,)), Entry("d", "float32", (2,))])
    assert differences(offered, wanted) == [
        "d is missing",
        "c is not known here",
        "a comes as float32, wanted is bfloat16",
        "a comes as [2], wanted is [3]",
    ]
    assert differences(offered, wanted, limit=1) == ["d is missing", "and 3 more"]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([Entry("a", "int8", (1,)), Entry("a", "int8", (1,))], "two tensors named 'a'"),
        ([Entry("a", "float4", (1,))], "no tensors of type 'float4'"),
        ([Entry("a", "int8", (2, -1))], r"a shape of \[2, -1\]"),
        ([Entry("a", "int8", (1,), "b")], "same tensor as 'b'"),
        ([Entry("a", "int8", (1,)), Entry("b", "int8", (2,), "a")], "same tensor as 'a'"),
        ([Entry("a", "int8", (1,)), Entry("b", "int8", (1,), "a"), Entry("c", "int8", (1,), "b")], "as 'b'"),
        ([Entry("a", "int8", (1,), "a")], "same tensor as 'a'"),
    ],
)
def test_what_cannot_be_moved_is_refused(entries: list[Entry], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_manifest(entries)


@given(st.integers(0, 2**50))
def test_bytes_in_words(count: int) -> None:
    assert parse_bytes(str(count)) == count
    assert parse_bytes(f"{count} B") == count
    assert parse_bytes(f"{count}kib") == count * 1024
    assert parse_bytes(describe_bytes(count)) == pytest.approx(count, rel=0.06)


@pytest.mark.parametrize("text", ["", "MiB", "1.5", "8 apples", "1e400MiB", "nanMiB", "8MB"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(ValueError):
        parse_bytes(text)
