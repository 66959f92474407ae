"""Checkpoints of divided state: what relight writes is what torch.distributed.checkpoint reads, divided in any way."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_loader import load

from relight.errors import CheckpointError
from relight.training.checkpoint import dcp
from relight.training.checkpoint.dcp import Piece
from relight.transfer.io.codec import spec_of

WHOLE = {
    "weights": torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5),
    "counts": torch.arange(3, dtype=torch.int64),
    "step": torch.tensor(12.0),
    "half": torch.randn(6, 2, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
}


def divide(parts: int) -> list[list[tuple[Piece, torch.Tensor]]]:
    """As FSDP2 does: along the first dimension, the last parts shorter or empty; what has none is on every rank."""
    divided: list[list[tuple[Piece, torch.Tensor]]] = [[] for _ in range(parts)]
    for path, whole in WHOLE.items():
        blocks = [whole] * parts if whole.ndim == 0 else list(whole.split(-(-len(whole) // parts)))
        start = 0
        for rank in range(parts):
            block = blocks[rank].clone() if rank < len(blocks) else whole[:0].clone()
            offset = () if whole.ndim == 0 else (min(start, len(whole)), *[0] * (whole.ndim - 1))
            divided[rank].append((Piece(path, spec_of(block), tuple(whole.shape), offset), block))
            start += 0 if whole.ndim == 0 else len(block)
    return divided


def save(place: Path, parts: int) -> None:
    place.mkdir(parents=True)
    written = []
    for rank, held in enumerate(divide(parts)):
        pieces = [piece for piece, _ in held]
        written.append((pieces, dcp.write(place, 3 * rank, pieces, [block for _, block in held])))
    dcp.describe(place, written)


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_torch_itself_reads_it(tmp_path: Path, parts: int) -> None:
    save(tmp_path / "c", parts)
    found = {path: torch.zeros_like(whole) for path, whole in WHOLE.items()}
    load(dict(found), checkpoint_id=tmp_path / "c", no_dist=True)
    for path, whole in WHOLE.items():
        assert torch.equal(found[path], whole), path


@settings(max_examples=8, deadline=None)
@given(written=st.integers(1, 8), wanted=st.integers(1, 8))
def test_it_is_read_into_any_other_division(
    tmp_path_factory: pytest.TempPathFactory, written: int, wanted: int
) -> None:
    place = tmp_path_factory.mktemp("checkpoints") / "c"
    save(place, written)
    for held in divide(wanted):
        into = [torch.full_like(block, 99) for _, block in held]
        dcp.read(place, [piece for piece, _ in held], into)
        for (piece, block), found in zip(held, into, strict=True):
            assert torch.equal(found, block), piece


def test_what_is_not_in_it_is_named(tmp_path: Path) -> None:
    save(tmp_path / "c", 2)
    other = torch.zeros(7, 6)
    with pytest.raises(CheckpointError, match=r"weights of shape \[7, 6\] is not in it"):
        dcp.read(tmp_path / "c", [Piece("weights", spec_of(other), (7, 6), (0, 0))], [other])
    with pytest.raises(CheckpointError, match="bias of shape"):
        dcp.read(tmp_path / "c", [Piece("bias", spec_of(other), (7, 6), (0, 0))], [other])
