"""A checkpoint on disk: what lies where, and how it appears all at once.

    checkpoints/
        step-0000000500/
            .metadata, __0_0.distcp   tensors, as torch.distributed.checkpoint (DCP) writes and reads them: of a state
            __1_0.distcp, ...         that is divided, a file of each part, by the first rank that holds it
            part-0.msgpack, ...       what else there is to say of these parts
            rank-0.msgpack, ...       what only that rank has: statistics of BatchNorm, the place in the data, streams
            relight.msgpack           everything else; the last file written
        step-0000001000.4f1c90d2-0.incomplete/   not yet
            left-out-1            and never will be: rank 1 was still writing another one when this one was due

Every rank writes its own files, and rank 0 the rest. The directory gets its name, by a rename, when all of it is on the
disk; a job that dies in the middle leaves one that is called incomplete. Its name has the history that it is of: which
run, and since when nothing of it was undone. So a part that another run left there, of the same step and perhaps with
another learning rate, is never taken for a part of this one. Each `.msgpack` ends with a digest of the rest of it.
"""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException

from relight.errors import CheckpointError
from relight.training.checkpoint import dcp
from relight.training.checkpoint.dcp import Piece, Stored
from relight.words import first_line

FORMAT = 5
_META = "relight.msgpack"
_SEAL_BYTES = 16
_NAME = re.compile(r"step-(\d{10})(\..*incomplete)?")


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a whole checkpoint."""

    format: int = FORMAT
    version: int  # optimizer steps applied
    lineage: str
    world_size: int
    derivable: bool  # nothing belongs to one rank alone: any number of ranks may continue from it
    gradients_to_none: bool
    parts: dict[str, int]  # the key of each part of the state, and the rank that wrote it
    doubts: tuple[str, ...] = ()  # why its bits may not be those of a run that was never disturbed
    risk: str = ""  # why those of a job that goes on from it may not be
    lacks_last_code: bool = False  # it was written before the code that follows the steps of the last epoch


class Doubts(msgspec.Struct, frozen=True):
    """The words of one rank about the bits."""

    doubts: tuple[str, ...] = ()  # see Meta
    risk: str = ""


class _OldMeta(msgspec.Struct, frozen=True):
    """Description of a checkpoint of a format that ends with no digest."""

    format: int


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the state; all of it, if it is not divided."""

    key: str
    layout: str  # digest of names, shapes and dtypes of the whole
    digest: str  # of this part, bit for bit
    private_buffers: list[list[str]]
    besides: dict[str, Any] = {}  # see TrackedState.besides
    tree: Any
    pieces: list[Piece]  # its tensors, in the order in which the tree numbers them
    stored: list[Stored]  # and where they lie


def place_of(root: Path, version: int) -> Path:
    """Return the directory of a complete checkpoint."""
    return root / f"step-{version:010d}"


def _building_site(root: Path, version: int, history: str) -> Path:
    return root / f"step-{version:010d}.{history}.incomplete"


def prepare(root: Path) -> None:
    """Make the directory, and raise OSError now, not after many steps, if nothing can be written there."""
    root.mkdir(parents=True, exist_ok=True)
    probe = root / f".probe-{os.getpid()}"
    _write(probe, b"")
    probe.unlink()


def published(root: Path) -> list[int]:
    """Return the versions of complete checkpoints, newest first."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    found = [match for name in names if (match := _NAME.fullmatch(name)) and not match[2]]
    return sorted((int(m[1]) for m in found if (root / m[0] / _META).exists()), reverse=True)


def write_private(root: Path, version: int, history: str, rank: int, payload: bytes) -> None:
    """Write a rank's private state, unless it is there: every writer writes the same content. Raises OSError."""
    if place_of(root, version).exists() or has_private(root, version, history, rank):
        return
    place = _building_site(root, version, history)
    place.mkdir(parents=True, exist_ok=True)
    _write(place / _private_name(rank), _sealed(payload))


def has_private(root: Path, version: int, history: str, rank: int) -> bool:
    """Return whether that rank's part of a checkpoint that is not complete is there."""
    return (_building_site(root, version, history) / _private_name(rank)).exists()


def write_doubts(root: Path, version: int, history: str, rank: int, doubts: Doubts) -> None:
    """Write what a rank says of the bits, in front of its private state: `publish` gathers it. Raises OSError."""
    if doubts != Doubts() and not place_of(root, version).exists():
        place = _building_site(root, version, history)
        place.mkdir(parents=True, exist_ok=True)
        _write(place / _doubts_name(rank), _sealed(msgspec.msgpack.encode(doubts)))


def leave_out(root: Path, version: int, history: str, rank: int) -> None:
    """Mark a checkpoint as one that this rank writes no part of, so that no other waits for it. Raises OSError."""
    if not place_of(root, version).exists():
        place = _building_site(root, version, history)
        place.mkdir(parents=True, exist_ok=True)
        (place / _left_out_name(rank)).touch()


def leave_out_older(root: Path, version: int, history: str, rank: int, *, writes_part: bool) -> None:
    """Mark those before `version` that lack files of this rank, and are not complete, as left out. Never raises."""
    with contextlib.suppress(OSError):
        for place in root.glob(f"step-*.{history}.incomplete"):
            match = _NAME.fullmatch(place.name)
            names = [_private_name(rank), *([_part_name(rank)] if writes_part else [])]
            if match is not None and int(match[1]) < version and not all((place / name).exists() for name in names):
                leave_out(root, int(match[1]), history, rank)


def withdraw(root: Path, version: int, history: str, rank: int) -> None:
    """Remove the files that this rank has begun and could not finish, and mark the checkpoint as left out.

    So a full disk does not stay full because of them. Never raises.
    """
    place = _building_site(root, version, history)
    begun = [] if (place / _part_name(rank)).exists() else [f"__{rank}_*"]
    with contextlib.suppress(OSError):
        for path in [path for pattern in (*begun, f"*.{os.getpid()}.part") for path in place.glob(pattern)]:
            path.unlink(missing_ok=True)
        leave_out(root, version, history, rank)


def clear(root: Path, version: int, history: str) -> None:
    """Remove what there is of earlier checkpoints of this history that some rank has left out. Never raises."""
    with contextlib.suppress(OSError):
        for place in root.glob(f"step-*.{history}.incomplete"):
            match = _NAME.fullmatch(place.name)
            if match is not None and int(match[1]) < version and any(place.glob(_left_out_name("*"))):
                shutil.rmtree(place, ignore_errors=True)


def is_left_out(root: Path, version: int, history: str, rank: int) -> bool:
    """Return whether that rank writes no part of a checkpoint that is not complete."""
    return (_building_site(root, version, history) / _left_out_name(rank)).exists()


def read_private(root: Path, version: int, rank: int) -> bytes:
    """Read a rank's private state. Raises CheckpointError."""
    return _unsealed(place_of(root, version) / _private_name(rank))


def write_part(root: Path, version: int, history: str, rank: int, part: Part, tensors: Sequence[torch.Tensor]) -> None:
    """Write a part of the state, `tensors` in host memory. Raises OSError or CheckpointError."""
    if place_of(root, version).exists():
        return
    place = _building_site(root, version, history)
    place.mkdir(parents=True, exist_ok=True)
    try:
        stored = dcp.write(place, rank, part.pieces, tensors)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(_summary(error)) from error
    _write(place / _part_name(rank), _sealed(msgspec.msgpack.encode(msgspec.structs.replace(part, stored=stored))))


def has_part(root: Path, version: int, history: str, rank: int) -> bool:
    """Return whether the part of a checkpoint that this rank writes is there; the checkpoint is not complete."""
    return (_building_site(root, version, history) / _part_name(rank)).exists()


def read_part(root: Path, version: int, rank: int) -> Part:
    """Read a part of a complete checkpoint. Raises CheckpointError."""
    return _read_part(place_of(root, version), rank)


def _read_part(place: Path, rank: int) -> Part:
    path = place / _part_name(rank)
    try:
        return msgspec.msgpack.decode(_unsealed(path), type=Part)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_tensors(root: Path, version: int, pieces: Sequence[Piece], into: Sequence[torch.Tensor]) -> None:
    """Fill these tensors, each with a piece, however the whole was divided. Raises CheckpointError."""
    place = place_of(root, version)
    try:
        dcp.read(place, pieces, into)
    except (Exception, CheckpointException) as error:  # any error that damaged files make DCP raise
        raise CheckpointError(f"the tensors in {place} cannot be read: {_summary(error)}") from error


def publish(root: Path, history: str, meta: Meta) -> None:
    """Give a checkpoint its name, once all parts are there. It tells the doubts of all ranks.

    Raises OSError or CheckpointError.
    """
    place, whole = _building_site(root, meta.version, history), place_of(root, meta.version)
    if not whole.exists():
        parts = [_read_part(place, rank) for rank in meta.parts.values()]
        try:
            dcp.describe(place, [(part.pieces, part.stored) for part in parts])
        except (Exception, CheckpointException) as error:
            raise CheckpointError(_summary(error)) from error
        for mark in place.glob(_left_out_name("*")):  # of ranks that wrote their part of the last one after all
            mark.unlink()
        meta = _with_doubts(meta, sorted(place.glob(_doubts_name("*"))))
        _write(place / _META, _sealed(msgspec.msgpack.encode(meta)))
        os.rename(place, whole)
        _sync(root)


def _with_doubts(meta: Meta, paths: Sequence[Path]) -> Meta:
    told = [msgspec.msgpack.decode(_unsealed(path), type=Doubts) for path in paths]
    return msgspec.structs.replace(
        meta,
        doubts=tuple(dict.fromkeys([*meta.doubts, *(doubt for one in told for doubt in one.doubts)])),
        risk=next(filter(None, (meta.risk, *(one.risk for one in told))), ""),
    )


def read_meta(root: Path, version: int) -> Meta:
    """Read the description of a complete checkpoint. Raises CheckpointError."""
    path = place_of(root, version) / _META
    try:
        found = msgspec.msgpack.decode(path.read_bytes(), type=_OldMeta).format
    except (OSError, msgspec.DecodeError):
        found = FORMAT
    if found != FORMAT:
        raise CheckpointError(f"{path} is of format {found}; this relight reads format {FORMAT}")
    try:
        return msgspec.msgpack.decode(_unsealed(path), type=Meta)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def prune(root: Path, keep: int, trusted: int | None = None) -> None:
    """Remove all but the newest `keep`, and what was left incomplete before them. Never raises.

    `trusted`: a version that was compared; the newest one up to it stays as well, should later ones prove corrupted.
    """
    versions = published(root)
    if not versions:
        return
    kept = {*versions[:keep], *[version for version in versions if trusted is not None and version <= trusted][:1]}
    for name in os.listdir(root):
        match = _NAME.fullmatch(name)
        if match is None or (int(match[1]) > versions[0] if match[2] else int(match[1]) in kept):
            continue
        with contextlib.suppress(OSError):  # first what makes it one: half of a checkpoint is none
            (root / name / _META).unlink(missing_ok=True)
        shutil.rmtree(root / name, ignore_errors=True)


def set_aside(root: Path, version: int) -> Path:
    """Rename a complete checkpoint, so that its step's can be written again. Raises OSError."""
    place = place_of(root, version)
    names = (place.with_name(f"{place.name}.unused{number}") for number in ("", *range(2, 1000)))
    aside = next(name for name in names if not name.exists())
    os.rename(place, aside)
    _sync(root)
    return aside


def discard(root: Path, version: int) -> None:
    """Remove those of `version` and later, whole ones and others. Raises OSError."""
    for name in os.listdir(root):
        match = _NAME.fullmatch(name)
        if match is not None and int(match[1]) >= version:
            (root / name / _META).unlink(missing_ok=True)
            shutil.rmtree(root / name)


def _summary(error: BaseException) -> str:
    """Summarize an error of DCP in a line. Its own exception, which is no Exception, holds one for each rank."""
    if isinstance(error, CheckpointException):
        error = next((cause for cause, _ in error.failures.values()), error)
    return first_line(error)


def _part_name(rank: int) -> str:
    return f"part-{rank}.msgpack"


def _private_name(rank: int) -> str:
    return f"rank-{rank}.msgpack"


def _doubts_name(rank: int | str) -> str:
    return f"doubts-{rank}.msgpack"


def _left_out_name(rank: int | str) -> str:
    return f"left-out-{rank}"


def _sealed(payload: bytes) -> bytes:
    return payload + hashlib.blake2b(payload, digest_size=_SEAL_BYTES).digest()


def _unsealed(path: Path) -> bytes:
    """Read a file that was written sealed. Raises CheckpointError."""
    try:
        sealed = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    payload = sealed[:-_SEAL_BYTES]
    if _sealed(payload) != sealed:
        raise CheckpointError(f"{path} cannot be read: its bytes are not those that were written")
    return payload


def _write(path: Path, payload: bytes) -> None:
    """All of it or nothing, and on the disk when this returns."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    _sync(path.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
