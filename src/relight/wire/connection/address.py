"""The file in which a controller says where it listens: in its host's private directory, and in the run directory.

The first is for its own host. The second is for hosts that share the run's storage: a controller that is started on
another host, because the first one's is gone, is found there. It is no secret, and proves nothing: controller
and agents prove to each other knowledge of the job's token.
"""

import os
from pathlib import Path

import msgspec


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """`controller.json`. The pid tells a controller from its successor."""

    host: str
    port: int
    pid: int


def bracketed(host: str) -> str:
    """Return a host as it is written before a colon and a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def announce(directory: Path, host: str, port: int) -> None:
    """Say where this process listens. A reader sees all of it or what was there before."""
    draft = directory / f"controller.json.{os.getpid()}"
    draft.write_bytes(msgspec.json.encode(Address(host=host, port=port, pid=os.getpid())))
    draft.replace(directory / "controller.json")


def find_address(directory: Path) -> Address | None:
    """Return the address that the last controller announced here; None if there was none."""
    try:
        return msgspec.json.decode((directory / "controller.json").read_bytes(), type=Address)
    except (OSError, msgspec.DecodeError):
        return None


def read_address(*directories: Path) -> tuple[str, int] | None:
    """Host and port of `find_address`, in the first of these directories that has one."""
    for directory in directories:
        found = find_address(directory)
        if found is not None:
            return found.host, found.port
    return None
