"""Output of a command may not arrive: its reader goes away, or a disk is full."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import Command

Begin = Callable[..., Command]
COMMANDS = [
    ("weights", "plan", "--model", "dense:layers=32,hidden=4096,ffn=14336,vocab=128256,kv=1024", "--json"),
    ("chaos", "--explain"),  # so short that it is all written at the end
]


@pytest.mark.parametrize("command", COMMANDS, ids=["long", "short"])
def test_a_reader_that_went_away(begin: Begin, command: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = begin(*command, output=writing).finish()
    finally:
        os.close(writing)
    assert (result.status, result.errors) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("command", COMMANDS, ids=["long", "short"])
def test_a_full_disk(begin: Begin, command: tuple[str, ...]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        result = begin(*command, output=full).finish()
    finally:
        os.close(full)
    assert (result.status, result.errors) == (1, "relight: the output cannot be written: the disk is full\n")
