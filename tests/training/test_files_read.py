"""Files that change during the loop and are read in it: what is read to be copied gives the script no value."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.training.carried.finding.spots.files import Files


@pytest.fixture
def files() -> Iterator[Files]:
    files = Files()
    files.begin(())
    yield files
    files.leave()


def test_a_checkpoint_that_is_copied_was_not_read(files: Files, tmp_path: Path) -> None:
    last, best = tmp_path / "last.pt", tmp_path / "best.pt"
    last.write_bytes(b"weights")
    shutil.copyfile(last, best)
    assert files.names == set()
    assert best.read_bytes() == b"weights"
    assert files.names == {"best.pt"}
