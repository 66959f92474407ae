import os
import subprocess
from collections.abc import Hashable, Iterator
from pathlib import Path

import pytest

from tests.survival.harness import Bench, Outcome


@pytest.fixture(scope="session")
def references() -> dict[Hashable, Outcome]:
    """Ends of undisturbed jobs: computed when first asked for, once in a session."""
    return {}


@pytest.fixture
def bench(tmp_path: Path, references: dict[Hashable, Outcome]) -> Bench:
    """Runs jobs, each in a directory of its own."""
    directories = (tmp_path / f"job-{number}" for number in range(10_000))
    return Bench(lambda: next(directories), references)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def fill(disk: Path) -> Path:
    """Take all room that is left; returns the file that has it."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return ballast
