"""Checkpoints: real files read bucket by bucket, byte for byte, and every kind of garbage refused with its reason."""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from relight.errors import UsageError
from relight.transfer.io.codec import raw_bytes
from relight.transfer.plan.manifest import ITEM_BYTES
from relight.transfer.plan.plan import Bucket, Piece, plan_buckets
from relight.transfer.tensors.checkpoint import DTYPES, INDEX_NAME, MAX_HEADER_BYTES, Checkpoint, open_checkpoint

TYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8]


def make_tensors(shapes: Iterable[tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for number, shape in enumerate(shapes):
        values = torch.randint(0, 2, shape, generator=generator)
        tensors[f"layer.{number}"] = values.to(TYPES[number % len(TYPES)])
    return tensors


def read_tensors(checkpoint: Checkpoint, bucket_bytes: int) -> dict[str, bytes]:
    """All tensors' bytes, read through one buffer that starts full of rubbish each time."""
    entries = checkpoint.manifest.entries
    found = {entry.name: bytearray(entry.nbytes) for entry in entries}
    for bucket in plan_buckets(checkpoint.manifest, bucket_bytes):
        buffer = bytearray(b"\xaa" * (bucket_bytes + 3))
        checkpoint.read_into(memoryview(buffer), bucket)
        used = bytearray(bucket.nbytes)
        for piece in bucket.pieces:
            data = buffer[piece.offset : piece.offset + piece.nbytes]
            used[piece.offset : piece.offset + piece.nbytes] = data
            found[entries[piece.tensor].name][piece.start : piece.start + piece.nbytes] = data
        assert buffer[: bucket.nbytes] == used  # gaps are zero
        assert buffer[bucket.nbytes :] == b"\xaa" * (bucket_bytes + 3 - bucket.nbytes)
    return {name: bytes(data) for name, data in found.items()}


def check(path: Path, tensors: Mapping[str, torch.Tensor], bucket_bytes: int = 256) -> None:
    with open_checkpoint(path) as checkpoint:
        described = {entry.name: (entry.dtype, entry.shape) for entry in checkpoint.manifest.entries}
        assert described == {
            name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()
        }
        expected = {name: bytes(raw_bytes(tensor)) for name, tensor in tensors.items()}
        assert read_tensors(checkpoint, bucket_bytes) == expected


def write_shards(directory: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> dict[str, str]:
    """A sharded checkpoint as Hugging Face's libraries write it; returns its index."""
    names = sorted(tensors)
    index: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = {name: tensors[name] for name in names[shard::shards]}
        save_file(mine, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(mine, file)
    write_index(directory, index)
    return index


def write_index(directory: Path, index: Mapping[str, object]) -> None:
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))


def by_hand(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


def one(**fields: Any) -> dict[str, Any]:
    """A tensor of four bytes in a header, with these fields altered."""
    return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **fields}


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- reading ----------------------------------------------------------------------------------------------------
@settings(max_examples=30)
@given(
    st.lists(st.lists(st.integers(0, 12), max_size=3).map(tuple), max_size=8),
    st.integers(1, 16).map(lambda count: count * 64),
)
def test_every_byte_arrives(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], bucket_bytes: int
) -> None:
    tensors = make_tensors(shapes)
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    path.write_bytes(save(tensors))
    check(path, tensors, bucket_bytes)
    check(path.parent, tensors, bucket_bytes)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards_are_read_as_one(tmp_path: Path, shards: int) -> None:
    tensors = make_tensors([(50,), (7, 9), (), (0, 3), (1, 1, 5), (300,)])
    write_shards(tmp_path, tensors, shards)
    check(tmp_path, tensors, 64)
    check(tmp_path, tensors, 64 * 100)


def test_shards_may_be_links_as_in_a_download_cache(tmp_path: Path) -> None:
    tensors = make_tensors([(5,), (6,)])
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for file in set(write_shards(snapshot, tensors, 2).values()):
        (snapshot / file).rename(blobs / file)
        (snapshot / file).symlink_to(Path("..") / "blobs" / file)
    check(snapshot, tensors)


def test_the_order_is_that_of_the_bytes(tmp_path: Path) -> None:
    """Not that of the header: so one file is read from its beginning to its end."""
    header = {
        "b": one(data_offsets=[8, 12]),
        "c": one(data_offsets=[0, 4]),
        "a": one(data_offsets=[4, 8]),
        "__metadata__": {"format": "pt"},
        "z": one(shape=[0], data_offsets=[4, 4]),
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(by_hand(header, bytes(range(12))))
    with open_checkpoint(path) as checkpoint:
        assert [entry.name for entry in checkpoint.manifest.entries] == ["c", "z", "a", "b"]
        assert read_tensors(checkpoint, 64) == {"c": b"\0\1\2\3", "z": b"", "a": b"\4\5\6\7", "b": b"\x08\t\n\x0b"}


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_types_keep_their_bytes(tmp_path: Path, name: str) -> None:
    size = ITEM_BYTES[DTYPES[name]]
    path = tmp_path / "x.safetensors"
    path.write_bytes(by_hand({"a": one(dtype=name, shape=[3], data_offsets=[0, 3 * size])}, bytes(range(3 * size))))
    with open_checkpoint(path) as checkpoint:
        assert isinstance(getattr(torch, checkpoint.manifest.entries[0].dtype), torch.dtype)
        assert read_tensors(checkpoint, 64) == {"a": bytes(range(3 * size))}


def test_more_pieces_than_one_system_call_takes(tmp_path: Path) -> None:
    tensors = {f"t{number:04d}": torch.full((1,), number, dtype=torch.int64) for number in range(2500)}
    save_file(tensors, tmp_path / "model.safetensors")
    check(tmp_path, tensors, 64 * 2500)


def test_pieces_may_come_in_any_order(tmp_path: Path) -> None:
    save_file({"a": torch.arange(8, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    buffer = bytearray(68)
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.read_into(memoryview(buffer), Bucket(0, 68, (Piece(0, 4, 0, 4), Piece(0, 0, 64, 4))))
    assert buffer == bytes([4, 5, 6, 7, *[0] * 60, 0, 1, 2, 3])


def test_nothing_stays_open(tmp_path: Path) -> None:
    write_shards(tmp_path, make_tensors([(5,), (6,)]), 2)
    before = open_descriptors()
    with open_checkpoint(tmp_path) as checkpoint:
        assert open_descriptors() == before + 2
    checkpoint.close()
    assert open_descriptors() == before


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    with open_checkpoint(path) as checkpoint:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(UsageError, match="cut short after it was opened"):
            read_tensors(checkpoint, 64)


# --- garbage ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"", "it has only 0 bytes", id="empty"),
        pytest.param(b"1234567", "it has only 7 bytes", id="seven bytes"),
        pytest.param(b"PK\3\4\0\0\x08\x08" + bytes(100), "one of torch.save; write", id="torch.save"),
        pytest.param(b"PK\3\4" + bytes(100), "cut short|would have", id="another format"),
        pytest.param(b"\x80\x02}q\0(X\1\0" * 9, "one of torch.save; write", id="pickle"),
        pytest.param(by_hand({}, length=MAX_HEADER_BYTES + 1), f"would have {MAX_HEADER_BYTES + 1} bytes", id="huge"),
        pytest.param(by_hand({}, length=3), "its header should end at byte 11", id="header cut"),
        pytest.param(by_hand(b"{not json"), "cannot be read", id="no json"),
        pytest.param(by_hand(b'{"\xff": 1}'), "cannot be read", id="no utf-8"),
        pytest.param(by_hand(b'{"a":' + b"[" * 100_000), "cannot be read", id="deep"),
        pytest.param(by_hand([1]), "cannot be read", id="no object"),
        pytest.param(by_hand({"a": 1}), "cannot be read", id="no tensor"),
        pytest.param(by_hand({"a": {"dtype": "F32", "shape": [1]}}), "data_offsets", id="no offsets"),
        pytest.param(by_hand({"a": one(shape="1")}, bytes(4)), "cannot be read", id="shape in words"),
        pytest.param(by_hand({"a": one(shape=[1.5])}, bytes(4)), "cannot be read", id="half a row"),
        pytest.param(by_hand({"a": one(shape=[10**30])}, bytes(4)), "cannot be read", id="astronomic"),
        pytest.param(by_hand(b'{"a":{"shape":[' + b"9" * 5000 + b"]}}"), "cannot be read", id="beyond int()"),
        pytest.param(by_hand({"a": one(shape=[1] * 65)}, bytes(4)), "length <= 64", id="dimensions"),
        pytest.param(by_hand({"a": one(shape=[2**62] * 9)}, bytes(4)), "needs .* bytes", id="product astronomic"),
        pytest.param(by_hand({"a": one(data_offsets=[0, 4, 8])}, bytes(4)), "cannot be read", id="three offsets"),
        pytest.param(by_hand({"a": one(dtype="F4")}, bytes(4)), "type 'F4', which relight does not move", id="type"),
        pytest.param(by_hand({"a": one(shape=[-1])}, bytes(4)), "Expected `int` >= 0", id="negative shape"),
        pytest.param(by_hand({"a": one(shape=[2])}, bytes(4)), "needs 8 bytes, its offsets are 0 to 4", id="bytes"),
        pytest.param(by_hand({"a": one(data_offsets=[4, 0])}, bytes(4)), "needs 4 bytes", id="backwards"),
        pytest.param(by_hand({"a": one(data_offsets=[-4, 0])}, bytes(4)), "Expected `int` >= 0", id="negative offset"),
        pytest.param(by_hand({"a": one()}, bytes(3)), "cut short: its tensors have 4 bytes, 3 are there", id="cut"),
        pytest.param(by_hand({"a": one()}, bytes(5)), "has 1 bytes after its last tensor", id="rest"),
        pytest.param(by_hand({"a": one(data_offsets=[4, 8])}, bytes(8)), "no tensor begins", id="late start"),
        pytest.param(
            by_hand({"a": one(), "b": one(data_offsets=[2, 6])}, bytes(8)), "'a' and 'b' overlap", id="overlap"
        ),
        pytest.param(by_hand({"a": one(), "b": one(data_offsets=[8, 12])}, bytes(12)), "'b' have a gap", id="gap"),
    ],
)
def test_files_that_cannot_be_believed(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    before = open_descriptors()
    with pytest.raises(UsageError, match=words) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert open_descriptors() == before


@given(st.binary(max_size=300))
def test_no_bytes_do_anything_but_open_or_be_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("garbage") / "model.safetensors"
    for data in (content, by_hand(content)):
        path.write_bytes(data)
        try:
            open_checkpoint(path).close()
        except UsageError:
            pass


@given(st.data())
def test_a_damaged_file_is_refused_or_still_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """One byte of the header changed: every tensor that is still described lies in the file."""
    content = bytearray(save(make_tensors([(3,), (2, 2), (5,)])))
    place = data.draw(st.integers(0, len(content) - 40))
    content[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(path)
    except UsageError:
        return
    with checkpoint:
        assert sum(map(len, read_tensors(checkpoint, 64).values())) == checkpoint.manifest.total_bytes


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        open_checkpoint(tmp_path / "missing")
    with pytest.raises(UsageError, match=r"no file \*.safetensors and no model.safetensors.index.json"):
        open_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(UsageError, match="is not a plain file"):
        open_checkpoint(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match=r"2 files \*.safetensors and no"):
        open_checkpoint(tmp_path)
    with pytest.raises(UsageError, match="cannot be opened"):
        open_checkpoint(Path("nul\0byte"))


def test_an_index_that_names_a_missing_file(tmp_path: Path) -> None:
    index = write_shards(tmp_path, make_tensors([(5,), (6,)]), 2)
    (tmp_path / index["layer.1"]).unlink()
    before = open_descriptors()
    with pytest.raises(UsageError, match=r"there is no file .*model-00002-of-00002.safetensors"):
        open_checkpoint(tmp_path)
    assert open_descriptors() == before


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", ".", "", "a/b.safetensors", "nul\0"])
def test_an_index_stays_in_its_directory(tmp_path: Path, name: str) -> None:
    write_index(tmp_path, {"a": name})
    with pytest.raises(UsageError, match="only files of its own directory"):
        open_checkpoint(tmp_path)


def test_an_index_and_its_files_must_agree(tmp_path: Path) -> None:
    index = write_shards(tmp_path, make_tensors([(5,), (6,)]), 2)
    write_index(tmp_path, index | {"more": index["layer.0"]})
    with pytest.raises(UsageError, match=r"'more' is in .*, which does not hold it"):
        open_checkpoint(tmp_path)
    write_index(tmp_path, dict.fromkeys(index, index["layer.0"]))
    with pytest.raises(UsageError, match=r"'layer.1' is in .*, which does not hold it"):
        open_checkpoint(tmp_path)
    save_file({"layer.1": torch.zeros(1), "other": torch.zeros(1)}, tmp_path / index["layer.1"])
    write_index(tmp_path, index)
    with pytest.raises(UsageError, match=r"holds 'other', which model.safetensors.index.json does not list"):
        open_checkpoint(tmp_path)
    save_file({"layer.0": torch.zeros(1), "layer.1": torch.zeros(1)}, tmp_path / index["layer.1"])
    with pytest.raises(UsageError, match=r"'layer.0' is in model-00001-of-00002.safetensors and again in"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": {}}', '{"a":' * 9999])
def test_what_is_no_index(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX_NAME).write_text(content)
    with pytest.raises(UsageError, match=r"is no index of a checkpoint|lists no tensors"):
        open_checkpoint(tmp_path)


def test_an_index_is_bounded(tmp_path: Path) -> None:
    with (tmp_path / INDEX_NAME).open("wb") as file:
        file.truncate(MAX_HEADER_BYTES + 1)
    with pytest.raises(UsageError, match="an index has at most"):
        open_checkpoint(tmp_path)
