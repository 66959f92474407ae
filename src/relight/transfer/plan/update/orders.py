"""Orders of an update. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Write:
    """Order `source` to put the bucket into the buffer and to report it `written`."""

    source: str
    bucket: int
    buffer: int


@dataclass(frozen=True)
class Load:
    """Order `engine` to take the bucket out of the buffer, to verify it, and to report it `loaded` or `damaged`."""

    engine: str
    bucket: int
    buffer: int
    digest: int


@dataclass(frozen=True)
class Commit:
    """Order `engine`, which holds every bucket, to take the new version and to report `committed`."""

    engine: str


@dataclass(frozen=True)
class Drop:
    """Drop `member` (a source or an engine) from this update."""

    member: str
    why: str


@dataclass(frozen=True)
class Abandon:
    """End the update: no engine takes the new version."""

    why: str


@dataclass(frozen=True)
class Finished:
    """End the update: `engines` have the new version; `Update.dropped` names the others."""

    engines: tuple[str, ...]


Order = Write | Load | Commit | Drop | Abandon | Finished
