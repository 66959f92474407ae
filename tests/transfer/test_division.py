"""Weights that no source holds alone: what parts there are, how they travel, and that every bit of them arrives."""

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import relight
from relight.errors import MissingPartsError, TransferError, UsageError
from relight.transfer.plan.division import LocalOffsets, ShardSpec, as_known, divide, find_entries, parts_of
from relight.transfer.plan.manifest import Entry, Manifest, Part, make_manifest
from relight.transfer.plan.plan import ALIGNMENT, Bucket, Piece, plan_buckets
from relight.transfer.plan.update.result import SELF, Published
from relight.transfer.publish.source import SourceLink
from relight.transfer.tensors.device_staging import DeviceStaging
from relight.transfer.tensors.targets import Pairs
from relight.transfer.tensors.weights import PartSource

SECONDS = 30.0
BUCKET_BYTES = 64 * 1024
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex128, torch.float64),
    *(torch.uint8, torch.int64, torch.float16),
)


def cuts(size: int, count: int) -> list[tuple[int, int]]:
    """As torch divides a dimension: chunks of the same size, the last ones smaller or empty."""
    chunk = -(-size // count)
    starts = [min(size, chunk * index) for index in range(count)]
    return [(start, min(chunk, size - start)) for start in starts]


def boxes(shape: Sequence[int], counts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Every box, as (first, size) in each dimension, of a tensor of which dimension d is divided by counts[d]."""
    return [list(place) for place in itertools.product(*(cuts(s, c) for s, c in zip(shape, counts, strict=True)))]


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@st.composite
def divided_shapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    shape = draw(shapes)
    return shape, [draw(st.integers(1, 3)) for _ in shape]


def bytes_in(part: Part | Piece) -> list[int]:
    run = part.run or part.nbytes
    return [part.start + i * part.stride + b for i in range(part.nbytes // run) for b in range(run)]


@settings(deadline=None)
@given(divided_shapes(), st.sampled_from([1, 2, 8]))
def test_parts_are_the_bytes_of_the_box(divided: tuple[list[int], list[int]], item_bytes: int) -> None:
    shape, counts = divided
    elements = torch.arange(torch.Size(shape).numel()).view(shape)
    for box in boxes(shape, counts):
        inside = elements[tuple(slice(first, first + size) for first, size in box)].flatten().tolist()
        expected = [element * item_bytes + byte for element in inside for byte in range(item_bytes)]
        parts = parts_of(0, shape, [first for first, _ in box], [size for _, size in box], item_bytes)
        assert [byte for part in parts for byte in bytes_in(part)] == expected
        holding = LocalOffsets(parts)
        assert [holding.find(0, byte) for byte in expected] == list(range(len(expected)))


@settings(max_examples=20, deadline=None)
@given(st.lists(divided_shapes(), min_size=1, max_size=2), st.sampled_from([64, 128, 1024]), st.data())
def test_buckets_carry_every_byte_once(
    tensors: list[tuple[list[int], list[int]]], bucket_bytes: int, data: st.DataObject
) -> None:
    manifest = make_manifest(Entry(str(i), "float32", tuple(shape)) for i, (shape, _) in enumerate(tensors))
    held: dict[str, list[Part]] = {"a": [], "b": [], "c": []}
    for index, (shape, counts) in enumerate(tensors):
        for box in boxes(shape, counts):
            parts = parts_of(index, shape, [first for first, _ in box], [size for _, size in box], 4)
            for name in data.draw(st.sets(st.sampled_from("abc"), min_size=1)):
                held[name] += parts
    division = divide(tuple((name, ShardSpec(Manifest(manifest.entries, tuple(p)))) for name, p in held.items()))
    buckets = plan_buckets(division.manifest, bucket_bytes)
    holdings = {name: LocalOffsets(parts) for name, parts in held.items()}
    found: list[set[int]] = [set() for _ in tensors]
    for index, (bucket, writers) in enumerate(zip(buckets, division.writers(buckets), strict=True)):
        assert bucket.index == index
        assert sorted(writers) == sorted(division.holders[bucket.group])
        end = 0
        for piece in bucket.pieces:
            assert piece.offset % ALIGNMENT == 0
            assert piece.offset >= end
            end = piece.offset + piece.nbytes
            places = bytes_in(piece)
            assert not found[piece.tensor].intersection(places)
            found[piece.tensor].update(places)
            for name in writers:  # each of them has the piece side by side
                here = [holdings[name].find(piece.tensor, place) for place in (places[0], places[-1])]
                assert here == [here[0], here[0] + len(places) - 1]
        assert end == bucket.nbytes <= bucket_bytes
    for places_found, entry in zip(found, manifest.entries, strict=True):
        assert places_found == set(range(entry.nbytes))


def stage(index: int, count: int, *entries: Entry, holds: bool = True) -> ShardSpec:
    parts = [Part(i, 0, e.nbytes, e.nbytes, 1) for i, e in enumerate(entries) if holds and e.nbytes]
    return ShardSpec(make_manifest(entries, parts), (index,), count)


UP, DOWN, NORM = Entry("up", "float32", (4, 8)), Entry("down", "float32", (8, 4)), Entry("norm", "float32", (8,))


def test_what_stages_know_is_put_together() -> None:
    held = (("a", stage(0, 2, UP)), ("b", stage(1, 2, DOWN, NORM, holds=False)), ("c", stage(1, 2, DOWN, NORM)))
    division = divide(held)
    assert division.manifest.entries == (UP, DOWN, NORM)
    assert division.holders == (("a",), ("c",))
    assert list(find_entries(held[2][1].manifest, division.manifest.entries)) == [1, 2]
    for bucket in plan_buckets(division.manifest, 64):
        if bucket.group:
            own = as_known(bucket, {1: 0, 2: 1})
            names = [DOWN.name, NORM.name]
            assert [names[p.tensor] for p in own.pieces] == [(UP, DOWN, NORM)[p.tensor].name for p in bucket.pieces]
            assert [(p.start, p.offset, p.nbytes) for p in own.pieces] == [
                (p.start, p.offset, p.nbytes) for p in bucket.pieces
            ]
        else:
            with pytest.raises(UsageError, match="not held here"):
                as_known(bucket, {1: 0, 2: 1})


@pytest.mark.parametrize(
    ("held", "error", "why"),
    [
        ((("a", stage(0, 2, UP)),), MissingPartsError, "stage 1 of the pipeline is held by no source"),
        ((("a", stage(0, 2, UP)), ("b", stage(1, 2, DOWN, holds=False))), MissingPartsError, "down: 128 of 128 bytes"),
        ((("a", stage(0, 2, UP)), ("b", stage(1, 2, UP))), UsageError, "two stages .* a tensor named 'up'"),
        ((("a", stage(0, 1, UP)), ("b", stage(0, 1, Entry("up", "float16", (4, 8))))), UsageError, "another way"),
    ],
)
def test_stages_that_are_not_the_whole_are_refused(
    held: tuple[tuple[str, ShardSpec], ...], error: type[UsageError], why: str
) -> None:
    with pytest.raises(error, match=why) as raised:
        divide(held)
    assert type(raised.value) is error, "what is missing may come, what does not fit will not"


ROWS = Manifest((Entry("w", "uint8", (4, 6)),))


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ((Part(0, 0, 6, 6, 3),), "6 of 24 bytes are held by no source"),
        ((Part(0, 0, 6, 6, 3), Part(0, 12, 6, 6, 2)), "overlap"),
        ((Part(0, 0, 6, 6, 3), Part(0, 12, 6, 6, 1)), "overlap"),
        ((Part(0, 0, 3, 6, 4), Part(0, 2, 3, 6, 4)), "overlap"),
        ((Part(0, 0, 12, 12, 1), Part(0, 12, 6, 6, 2)), "overlap"),  # it does not, but who would know
        ((Part(0, 0, 6, 6, 4), Part(0, 18, 6, 6, 2)), "does not lie within"),
        ((Part(0, -6, 6, 6, 4),), "does not lie within"),
        ((Part(0, 0, 4, 6, 4), Part(0, 4, 4, 6, 3)), "overlap|does not lie within"),
        ((Part(1, 0, 6, 6, 4),), "does not exist"),
    ],
)
def test_parts_that_are_not_the_whole_are_refused(parts: tuple[Part, ...], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        plan_buckets(Manifest(ROWS.entries, parts), 64)


def test_a_bucket_of_what_is_not_held_is_refused() -> None:
    held = ShardSpec(Manifest(ROWS.entries, parts_of(0, (4, 6), (0, 0), (2, 6), 1)))
    source = PartSource(held, {0: torch.zeros(2, 6, dtype=torch.uint8)})
    with pytest.raises(UsageError, match="not held here"):
        source.fill(Bucket(0, 6, (Piece(0, 12, 0, 6),)), memoryview(bytearray(64)))


# --- real sources and engines --------------------------------------------------------------------------------------
def whole_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Every type; sizes that divide evenly and not; a scalar, an empty one, a large one, one that is tied."""
    generator = torch.Generator().manual_seed(seed)

    def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
        return (raw[..., 0] & 1).bool() if dtype == torch.bool else raw.view(dtype).view(shape)

    made = {f"{str(dtype)[6:]}": make(dtype, 13, 6, 10) for dtype in DTYPES}
    made |= {"embedding": make(torch.float32, 517, 96), "scalar": make(torch.float32), "empty": torch.empty(0, 4)}
    return made | {"head": made["embedding"], "row": make(torch.bfloat16, 1, 640), "plain": make(torch.float32, 33)}


LAYOUTS = {  # what each of the ranks' mesh dimensions divides: dimension of the tensor, or None
    "fsdp": ((4,), (0,)),
    "hsdp": ((2, 2), (None, 0)),
    "columns": ((4,), (-1,)),
    "rows and columns": ((2, 2), (0, -1)),
    "the middle": ((2, 2), (None, 1)),
}


def box_of(layout: str, rank: int, shape: Sequence[int]) -> list[tuple[int, int]]:
    sizes, placements = LAYOUTS[layout]
    place = (rank,) if len(sizes) == 1 else (rank // sizes[1], rank % sizes[1])
    box = [(0, size) for size in shape]
    for size, coordinate, dimension in zip(sizes, place, placements, strict=True):
        if dimension is not None and shape:
            own = max(-len(shape), min(dimension, len(shape) - 1))
            box[own] = cuts(shape[own], size)[coordinate]
    return box


def source_of(layout: str, rank: int, seed: int, kind: type[PartSource] = PartSource) -> PartSource:
    tensors = whole_tensors(seed)
    entries: list[Entry] = []
    parts: list[Part] = []
    held: dict[int, torch.Tensor] = {}
    names: dict[int, str] = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        first = names.setdefault(id(tensor), name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(name, dtype, tuple(tensor.shape), "" if first == name else first))
        box = [(0, size) for size in tensor.shape] if name == "plain" else box_of(layout, rank, tensor.shape)
        if first != name or (name == "plain" and rank):
            continue
        own = parts_of(index, tensor.shape, [f for f, _ in box], [size for _, size in box], tensor.element_size())
        if own and entries[-1].nbytes:
            parts += own
            part = tensor[tuple(slice(f, f + size) for f, size in box)]
            held[index] = part if rank % 2 else part.clone()  # a part need not be contiguous
    return kind(ShardSpec(make_manifest(entries, parts)), held)


@contextlib.contextmanager
def ranks(
    place: Path, layout: str, seed: int, kinds: dict[int, type[PartSource]] | None = None
) -> Iterator[tuple[relight.Publisher, PartSource, list[SourceLink]]]:
    """A publisher that is rank 0, and its source; and the other ranks' links."""
    with relight.Publisher(place, bucket_bytes=BUCKET_BYTES, stall_timeout_seconds=SECONDS) as publisher:
        links, threads = [], []
        for rank in (1, 2, 3):
            source = source_of(layout, rank, seed, (kinds or {}).get(rank, PartSource))
            link = SourceLink(place, source, version=seed, held=source.held, name=f"rank-{rank}")
            if isinstance(source, Ending):
                source.link = link
            links.append(link)
            threads.append(threading.Thread(target=link.run))
            threads[-1].start()
        try:
            assert publisher.wait_for_sources(3, SECONDS)
            yield publisher, source_of(layout, 0, seed), links
        finally:
            for link, thread in zip(links, threads, strict=True):
                link.stop()
                thread.join(SECONDS)
                assert not thread.is_alive()


def engine(place: Path, mode: str) -> tuple[relight.Receiver, dict[str, torch.Tensor]]:
    """With tensors of other values than any that are published; tied ones are tied."""
    live = {name: torch.zeros_like(tensor) for name, tensor in whole_tensors(0).items()}
    live["head"] = live["embedding"]
    if mode == "model":
        return relight.Receiver(place, model=live, name=mode), live

    def load(pairs: Pairs) -> None:
        for name, tensor in pairs:
            live[name].copy_(tensor)

    return relight.Receiver(place, load=load, mode=mode, name=mode), live


def publish(publisher: relight.Publisher, source: PartSource, version: int, engines: int) -> Published:
    assert publisher.wait_for_engines(engines, SECONDS)
    result = publisher.begin(source, version=version, held=source.held).wait(SECONDS)
    assert result is not None
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_get_whole_tensors(tmp_path: Path, layout: str) -> None:
    with contextlib.ExitStack() as stack:
        engines = [engine(tmp_path, mode) for mode in ("model", "staged", "in-place")]
        for receiver, _ in engines:
            stack.enter_context(receiver)
        publisher, source, _ = stack.enter_context(ranks(tmp_path, layout, 3))
        assert publisher.lacking(source.held, SECONDS) == ""
        result = publish(publisher, source, 3, 3)
        assert not result.dropped
        assert not result.error
        writers = {stage.member for stage in result.stages if stage.kind == "broadcast"}
        assert writers == {SELF, "rank-1", "rank-2", "rank-3"}, "each rank writes what it holds, replicas take turns"
        for receiver, live in engines:
            assert receiver.wait_for(3, SECONDS)
            assert relight.digest_weights(live) == relight.digest_weights(whole_tensors(3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_put_into_whole_tensors_on_devices(layout: str) -> None:
    """As an engine on a GPU does it, here in host memory: also columns, which are runs with gaps between them."""
    sources = [source_of(layout, rank, 5) for rank in range(4)]
    names = [f"rank-{rank}" for rank in range(4)]
    division = divide([(name, source.held) for name, source in zip(names, sources, strict=True)])
    buckets = plan_buckets(division.manifest, BUCKET_BYTES)
    staging = DeviceStaging(division.manifest, whole_tensors(0))
    buffer = memoryview(bytearray(BUCKET_BYTES))
    for bucket, writers in zip(buckets, division.writers(buckets), strict=True):
        for source in (sources[names.index(writer)] for writer in writers):
            digest = xxhash.xxh3_64()
            source._write_from_device(bucket, buffer, digest.update)
            assert staging.load(bucket, buffer) == digest.intdigest() == source.fill(bucket, buffer)
    assert relight.digest_weights(staging.tensors) == relight.digest_weights(whole_tensors(5))


def test_an_update_of_whole_weights_follows_one_of_divided_ones(tmp_path: Path) -> None:
    receiver, live = engine(tmp_path, "model")
    with receiver, ranks(tmp_path, "rows and columns", 3) as (publisher, source, _):
        for version in (3, 4, 5):
            if version == 4:
                publisher.publish(relight.TensorSource(whole_tensors(4)), version=4)
            else:
                result = publish(publisher, source, version, 1)
                assert bool(result.error) == (version == 5), "the ranks hold version 3"
            assert receiver.wait_for(min(version, 4), SECONDS)
            assert relight.digest_weights(live) == relight.digest_weights(whole_tensors(min(version, 4)))


class Ending(PartSource):
    """Its rank is lost while it writes its first bucket."""

    link: SourceLink

    def fill(self, bucket: Bucket, view: memoryview) -> int:
        self.link.stop()
        return super().fill(bucket, view)


def test_another_replica_writes_what_a_lost_rank_held(tmp_path: Path) -> None:
    receiver, live = engine(tmp_path, "model")
    with receiver, ranks(tmp_path, "hsdp", 3, {1: Ending}) as (publisher, source, _):
        result = publish(publisher, source, 3, 1)
        assert set(result.dropped) == {"rank-1"}
        assert receiver.wait_for(3, SECONDS)
        assert relight.digest_weights(live) == relight.digest_weights(whole_tensors(3))


def test_without_another_replica_engines_keep_their_version(tmp_path: Path) -> None:
    receiver, live = engine(tmp_path, "model")
    with receiver:
        with ranks(tmp_path, "columns", 3, {2: Ending}) as (publisher, source, _):
            result = publish(publisher, source, 3, 1)
            assert "no other source holds bucket" in result.error
            assert "rank-2" in result.dropped
            assert receiver.version == -1
            assert relight.digest_weights(live) != relight.digest_weights(whole_tensors(3))
            with pytest.raises(UsageError, match="are held by no source"):
                publisher.begin(source, version=3, held=source.held)
        with ranks(tmp_path, "columns", 4) as (publisher, source, _):
            assert not publish(publisher, source, 4, 1).error
        assert receiver.wait_for(4, SECONDS)
        assert relight.digest_weights(live) == relight.digest_weights(whole_tensors(4))


class Failing(PartSource):
    def fill(self, bucket: Bucket, view: memoryview) -> int:
        raise TransferError("its weights are being written")


def test_a_rank_that_withdraws_is_made_up_for(tmp_path: Path) -> None:
    receiver, live = engine(tmp_path, "in-place")
    with receiver, ranks(tmp_path, "hsdp", 3, {3: Failing}) as (publisher, source, _):
        result = publish(publisher, source, 3, 1)
        assert "being written" in result.dropped["rank-3"]
        assert receiver.wait_for(3, SECONDS)
        assert relight.digest_weights(live) == relight.digest_weights(whole_tensors(3))
