"""Files of torch.distributed.checkpoint (DCP) without its collectives: every interface of it that relight leans on.

DCP has the ranks agree on a plan before they write. That is not needed here: each part of the state is written by one
rank, which knows where in the whole its tensors lie, and the rank that gathers these notes describes the whole. The
result equals what DCP itself would have written, so its tools read it, into any other layout.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from relight.errors import CheckpointError
from relight.training.torch_private.distributed.dcp import storage_info
from relight.transfer.io.codec import TensorSpec, empty_like


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A block of one tensor of the state: all of it, or what one rank holds."""

    path: str
    spec: TensorSpec  # of the block
    whole: tuple[int, ...]  # shape of the tensor
    offset: tuple[int, ...]  # where in it the block begins


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """The place of a piece: a file of the checkpoint, and bytes in it. No file: the piece is empty."""

    file: str
    offset: int
    length: int


def write(place: Path, rank: int, pieces: Sequence[Piece], tensors: Sequence[torch.Tensor]) -> list[Stored]:
    """Write these pieces into a file of this rank. They are on the disk when this returns."""
    held = {piece.path: tensor for piece, tensor in zip(pieces, tensors, strict=True)}
    items = [_item(piece) for piece in pieces if held[piece.path].numel()]
    if not items:
        return [Stored("", 0, 0) for _ in pieces]
    writer = FileSystemWriter(place)
    writer.set_up_storage_writer(False)
    (*_, plan) = writer.prepare_global_plan([SavePlan([])] * rank + [SavePlan(items)])
    found = {
        result.index.fqn: Stored(
            result.storage_data.relative_path, result.storage_data.offset, result.storage_data.length
        )
        for result in writer.write_data(plan, _Holder(held)).wait()
    }
    return [found.get(piece.path, Stored("", 0, 0)) for piece in pieces]


def describe(place: Path, parts: Sequence[tuple[Sequence[Piece], Sequence[Stored]]]) -> None:
    """Write the metadata once all pieces are written. A piece that several ranks have written is listed once."""
    wholes: dict[str, TensorStorageMetadata] = {}
    results: dict[MetadataIndex, WriteResult] = {}
    for pieces, stored in parts:
        for piece, where in zip(pieces, stored, strict=True):
            item = _item(piece)
            if item.tensor_data is None or item.index in results:
                continue
            whole = wholes.setdefault(
                piece.path, TensorStorageMetadata(item.tensor_data.properties, torch.Size(piece.whole), [])
            )
            if where.file or not any(piece.whole):
                index = dataclasses.replace(item.index, index=len(whole.chunks))
                whole.chunks.append(item.tensor_data.chunk)
                results[index] = WriteResult(index, where.length, storage_info(where.file, where.offset, where.length))
    writer = FileSystemWriter(place)
    writer.set_up_storage_writer(True)
    writer.finish(Metadata(state_dict_metadata=dict(wholes)), [list(results.values())])


def read(place: Path, pieces: Sequence[Piece], into: Sequence[torch.Tensor]) -> None:
    """Fill each tensor with its piece, from wherever parts of that were written. Raises CheckpointError."""
    reader = FileSystemReader(place)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    items = []
    for piece, tensor in zip(pieces, into, strict=True):
        known = metadata.state_dict_metadata.get(piece.path)
        if not isinstance(known, TensorStorageMetadata) or tuple(known.size) != piece.whole:
            raise CheckpointError(f"{piece.path} of shape {list(piece.whole)} is not in it")
        chunk = ChunkStorageMetadata(offsets=torch.Size(piece.offset), sizes=torch.Size(tensor.shape))
        if tensor.numel():
            items += create_read_items_for_chunk_list(piece.path, known, [chunk])
    held = {piece.path: tensor for piece, tensor in zip(pieces, into, strict=True)}
    reader.read_data(LoadPlan(items), _Receiver(held)).wait()


def _item(piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(offsets=torch.Size(piece.offset), sizes=torch.Size(piece.spec.shape))
    properties = TensorProperties(dtype=empty_like(TensorSpec(piece.spec.dtype, ())).dtype)
    data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(piece.whole))
    return WriteItem(index=MetadataIndex(piece.path, piece.offset), type=WriteItemType.SHARD, tensor_data=data)


class _Holder(DefaultSavePlanner):
    """Gives DCP the tensors that are written."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._tensors[write_item.index.fqn].detach()


class _Receiver(DefaultLoadPlanner):
    """Gives DCP the tensors that are read into."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._tensors[index.fqn]
