"""The private directory of one `relight run` on one host: settings, token and sockets, for its user alone.

A launcher removes it at its end, and controller and agent do so if the launcher was killed. If all of them were killed,
as with their control group, the next start on the host removes it: a lock tells it from the directory of a living one.
"""

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from relight.parent import remove_private_dir
from relight.wire.settings import JobSettings, encode_settings

MAX_TEMPORARY_BYTES = 60  # the agent's socket lies below it, and a socket's path has 107 bytes at most
ABANDONED_SECONDS = 60.0  # since a directory has changed: an agent that outlives its launcher may still be ending
PREFIX = "relight-"
LOCK = "lock"
_locks: list[int] = []  # of this process's directories, until the process ends


def make_private_dir(settings: JobSettings, token: bytes) -> Path:
    """Make a directory that only this user can look into, with the job's token and settings."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > MAX_TEMPORARY_BYTES:
        parent = "/tmp"
    remove_abandoned(Path(parent))
    private_dir = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # mode 0700
    try:
        for name, content in (("token", token), ("settings.json", encode_settings(settings))):
            descriptor = os.open(private_dir / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
        _locks.append(os.open(private_dir / LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        fcntl.flock(_locks[-1], fcntl.LOCK_EX)
    except OSError:
        shutil.rmtree(private_dir, ignore_errors=True)
        raise
    return private_dir


def remove_abandoned(parent: Path) -> None:
    """Remove the directories of this user whose launchers were killed, and controllers and agents with them."""
    for private_dir in parent.glob(f"{PREFIX}*"):
        try:
            is_ours = private_dir.stat(follow_symlinks=False).st_uid == os.geteuid() and not private_dir.is_symlink()
            if is_ours and time.time() - private_dir.stat().st_mtime > ABANDONED_SECONDS and _is_free(private_dir):
                remove_private_dir(private_dir)
        except OSError:  # it went meanwhile, or it is none of these
            continue


def _is_free(private_dir: Path) -> bool:
    """Return whether no living launcher holds the lock of this directory. Raises OSError if it has none."""
    descriptor = os.open(private_dir / LOCK, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
