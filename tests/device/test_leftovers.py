"""Names that a killed worker leaves in shared memory, and that are removed."""

import os
from pathlib import Path

from relight.device.leftovers import remove_names_of


def test_names_of_this_process_alone_are_removed(tmp_path: Path) -> None:
    own = ["torch_3445_2691698743_0", f"cuda.shm.{os.getuid()}.d75.1"]
    others = ["torch_34451_2691698743_0", f"cuda.shm.{os.getuid()}.d751.1", "cuda.shm.99.d75.1", "sem.mp-3445", "3445"]
    for name in (*own, *others):
        (tmp_path / name).touch()
    remove_names_of(3445, tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(others)
    remove_names_of(3445, tmp_path / "missing")
