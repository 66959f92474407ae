"""The command line under test, with everything it started ended by process id."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.command import Command, Result

Relight = Callable[..., Result]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start `relight` with these arguments in a directory of its own."""
    commands: list[Command] = []

    def begin(*arguments: str, file_bytes: int = 0, output: int | None = None, errors: int | None = None) -> Command:
        commands.append(Command(*arguments, cwd=tmp_path, file_bytes=file_bytes, output=output, errors=errors))
        return commands[-1]

    try:
        yield begin
    finally:
        for command in commands:
            command.close()


@pytest.fixture
def relight(begin: Callable[..., Command]) -> Relight:
    """Run `relight` to its end."""

    def run(*arguments: str, file_bytes: int = 0) -> Result:
        return begin(*arguments, file_bytes=file_bytes).finish()

    return run


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that says that it is up, and waits."""
    path = tmp_path / "wait.py"
    path.write_text("import os, signal\nprint('up as rank', os.environ['RANK'], flush=True)\nsignal.pause()\n")
    return path
