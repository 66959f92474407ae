"""Where the job's controller listens, as it says itself in the private directory of its host."""

import os
from pathlib import Path

import msgspec


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """`controller.json`. The pid tells a controller from its successor."""

    host: str
    port: int
    pid: int


def announce(private_dir: Path, host: str, port: int) -> None:
    """Say where this process listens. A reader sees all of it or what was there before."""
    draft = private_dir / "controller.json.tmp"
    draft.write_bytes(msgspec.json.encode(Address(host=host, port=port, pid=os.getpid())))
    draft.replace(private_dir / "controller.json")


def find_address(private_dir: Path) -> Address | None:
    """What the last controller on this host announced; None if there was none."""
    try:
        return msgspec.json.decode((private_dir / "controller.json").read_bytes(), type=Address)
    except (OSError, msgspec.DecodeError):
        return None


def read_address(private_dir: Path) -> tuple[str, int] | None:
    """Host and port of `find_address`."""
    found = find_address(private_dir)
    return None if found is None else (found.host, found.port)
