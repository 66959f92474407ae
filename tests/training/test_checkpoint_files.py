"""Directories of checkpoints: what counts as a part of one, and what does not."""

import os
from pathlib import Path

import msgspec
import pytest
import torch

from relight.training.checkpoint import files
from relight.training.checkpoint.dcp import Piece
from relight.training.checkpoint.files import Meta, Part
from relight.transfer.io.codec import spec_of

WEIGHT = torch.arange(4.0)
PART = Part(
    key="",
    layout="",
    digest="",
    private_buffers=[],
    tree=None,
    pieces=[Piece("weight", spec_of(WEIGHT), (4,), (0,))],
    stored=[],
)


def meta_of(version: int) -> Meta:
    return Meta(version=version, lineage="", world_size=2, derivable=False, gradients_to_none=True, parts={"": 0})


def test_what_another_run_left_of_the_same_step_is_no_part_of_this_one(tmp_path: Path) -> None:
    """Its learning rate may have been another one; and it is removed once there is something newer."""
    files.write_private(tmp_path, 4, "before-0", 1, b"of the run before")
    files.write_part(tmp_path, 4, "before-0", 0, PART, [WEIGHT])
    assert not files.has_private(tmp_path, 4, "now-0", 1)
    assert not files.has_part(tmp_path, 4, "now-0", 0)
    files.write_part(tmp_path, 4, "now-0", 0, PART, [2 * WEIGHT])
    for rank in (0, 1):
        files.write_private(tmp_path, 4, "now-0", rank, b"of this run")
    files.publish(tmp_path, "now-0", meta_of(4))
    assert files.read_private(tmp_path, 4, 1) == b"of this run"
    read = torch.empty(4)
    files.read_tensors(tmp_path, 4, PART.pieces, [read])
    assert torch.equal(read, 2 * WEIGHT)
    assert files.published(tmp_path) == [4]
    files.prune(tmp_path, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000004"]


def test_doubts_of_all_ranks_are_told(tmp_path: Path) -> None:
    """A rank that has none writes nothing, and rank 0, which publishes it, says its own in the description."""
    files.write_part(tmp_path, 4, "now-0", 0, PART, [WEIGHT])
    files.write_doubts(tmp_path, 4, "now-0", 1, files.Doubts())
    files.write_doubts(tmp_path, 4, "now-0", 2, files.Doubts(("a", "b"), risk="a file"))
    files.write_doubts(tmp_path, 4, "now-0", 3, files.Doubts(("c",), risk="a queue"))
    files.publish(tmp_path, "now-0", msgspec.structs.replace(meta_of(4), doubts=("b",)))
    found = files.read_meta(tmp_path, 4)
    assert found.doubts == ("b", "a", "c")
    assert found.risk == "a file"


def test_what_was_undone_is_no_part_of_what_comes_after(tmp_path: Path) -> None:
    """Generation 3 went back behind step 4, of which generation 1 had written a part."""
    files.write_private(tmp_path, 4, "now-0", 1, b"undone")
    assert not files.has_private(tmp_path, 4, "now-3", 1)


# --- which are removed --------------------------------------------------------------------------------------------
def make(root: Path, *versions: int) -> None:
    for version in versions:
        files.write_part(root, version, "now-0", 0, PART, [WEIGHT])
        files.publish(root, "now-0", meta_of(version))


@pytest.mark.parametrize(
    ("trusted", "kept"),
    [
        (None, [40, 30]),
        (-1, [40, 30]),  # nothing was compared
        (20, [40, 30, 20]),
        (29, [40, 30, 20]),  # the newest up to it
        (40, [40, 30]),
    ],
)
def test_of_old_ones_the_newest_that_can_be_trusted_stays(tmp_path: Path, trusted: int | None, kept: list[int]) -> None:
    make(tmp_path, 10, 20, 30, 40)
    files.prune(tmp_path, 2, trusted)
    assert files.published(tmp_path) == kept


def test_none_that_is_not_trusted_is_left_complete_or_not(tmp_path: Path) -> None:
    make(tmp_path, 10, 20, 30)
    files.write_private(tmp_path, 40, "now-0", 0, b"")
    (tmp_path / "notes.txt").touch()
    files.discard(tmp_path, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-0000000010"]


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.glob("*/*"))


def test_what_a_rank_could_not_finish_takes_no_room(tmp_path: Path) -> None:
    """The disk was full while the tensors, or what is to be said of them, were written. Others keep their files."""
    site = tmp_path / "step-0000000004.now-0.incomplete"
    files.write_part(tmp_path, 4, "now-0", 1, PART, [WEIGHT])
    for begun in ("__0_0.distcp", f"part-0.msgpack.{os.getpid()}.part", "__10_0.distcp"):
        (site / begun).write_bytes(b"half")
    files.withdraw(tmp_path, 4, "now-0", 0)
    left = ("__10_0.distcp", "__1_0.distcp", "left-out-0", "part-1.msgpack")
    assert names(tmp_path) == sorted(f"{site.name}/{name}" for name in left)
    files.withdraw(tmp_path, 4, "now-0", 1)  # its part is whole: another one may count on it
    assert files.has_part(tmp_path, 4, "now-0", 1)
    assert "__1_0.distcp" in " ".join(names(tmp_path))


def test_earlier_checkpoints_that_will_never_be_whole_are_cleared(tmp_path: Path) -> None:
    for version, history in ((2, "now-0"), (4, "now-0"), (6, "now-0"), (2, "before-0")):
        files.write_part(tmp_path, version, history, 0, PART, [WEIGHT])
    for version, history in ((2, "now-0"), (6, "now-0"), (2, "before-0")):
        files.leave_out(tmp_path, version, history, 1)
    (tmp_path / "step-0000000001.now-0.incomplete").touch()  # a file and no directory
    files.clear(tmp_path, 6, "now-0")
    assert not files.has_part(tmp_path, 2, "now-0", 0)
    assert files.has_part(tmp_path, 4, "now-0", 0)  # some rank may still be writing it
    assert files.has_part(tmp_path, 6, "now-0", 0)
    assert files.has_part(tmp_path, 2, "before-0", 0)


def test_what_a_rank_never_finished_is_left_out_by_the_process_that_takes_it(tmp_path: Path) -> None:
    """The next one is its own to write; what is there already, and what ranks of another history write, stays."""
    for version, history in ((2, "now-0"), (3, "now-0"), (4, "now-0"), (2, "before-0")):
        files.write_private(tmp_path, version, history, 0, b"")
    files.write_private(tmp_path, 3, "now-0", 1, b"")
    files.leave_out_older(tmp_path, 4, "now-0", 1, writes_part=False)
    assert [files.is_left_out(tmp_path, version, "now-0", 1) for version in (2, 3, 4)] == [True, False, False]
    assert not files.is_left_out(tmp_path, 2, "before-0", 1)
    files.leave_out_older(tmp_path, 4, "now-0", 1, writes_part=True)
    assert files.is_left_out(tmp_path, 3, "now-0", 1)
