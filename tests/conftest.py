"""For all tests."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Processes of jobs compile relight anew at each start if nothing keeps what was compiled: half of the time of a start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tensors of tests are tiny, and the threads that would share their work wait for each other where cores are busy: the
# same tests took three times the processor time. As in a job of several ranks.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes is the machine's business: benchmarks measure, tests do not.
settings.register_profile("relight", deadline=None)
settings.load_profile("relight")

# A shell starts what runs in its background with SIGINT ignored; programs that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Keep the collected tests, a million objects, out of every search for garbage, and of forked processes' copies."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a small file system with these options."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        disk = tmp_path / f"disk-{len(mounted)}"
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("needs the right to mount a file system")
        mounted.append(disk)
        return disk

    try:
        yield mount
    finally:
        for disk in mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)
