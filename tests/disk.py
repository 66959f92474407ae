"""Filling a file system, for tests of what a full disk does."""

from pathlib import Path


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
