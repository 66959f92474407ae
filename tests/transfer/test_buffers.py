"""The shared buffers: sizes, seals, refusals that say what to do, and nothing left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relight.errors import TransferError
from relight.transfer.io.buffers import Buffer, close_buffers, create_buffers, open_buffers


def open_count() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_one_side_writes_the_other_reads() -> None:
    before = open_count()
    made = create_buffers(2, 4096)
    mapped = open_buffers([os.dup(buffer.descriptor) for buffer in made], 4096)
    made[1].view[5:9] = b"abcd"
    assert bytes(mapped[1].view[5:9]) == b"abcd"
    assert bytes(mapped[0].view) == bytes(4096)
    for buffer in (*made, *mapped):  # of no file that has a name, in /dev/shm or elsewhere
        assert os.readlink(f"/proc/self/fd/{buffer.descriptor}").startswith("/memfd:")
    close_buffers([*made, *mapped])
    assert open_count() == before


def test_the_size_is_sealed() -> None:
    (buffer,) = create_buffers(1, 4096)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(buffer.descriptor, size)
    buffer.close()


def test_it_is_not_passed_on_to_programs_that_are_started() -> None:
    (buffer,) = create_buffers(1, 4096)
    assert not os.get_inheritable(buffer.descriptor)
    buffer.close()


def test_pages_are_reserved_when_it_is_made() -> None:
    (buffer,) = create_buffers(1, 2**20)
    assert os.fstat(buffer.descriptor).st_blocks * 512 >= 2**20
    buffer.close()


def test_closing_while_somebody_looks_at_it() -> None:
    (buffer,) = create_buffers(1, 4096)
    buffer.view[0] = 7
    view = memoryview(buffer.view)
    part = buffer.view[:16]
    buffer.close()
    assert view[0] == part[0] == 7


_LIMITED = """
import os, resource, sys
from relight.errors import TransferError
from relight.transfer.io.buffers import create_buffers
from relight.transfer.publish.publisher import Publisher

def count():
    return len(os.listdir("/proc/self/fd"))

resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
before = count()
for attempt in (lambda: create_buffers(2, 2**21), lambda: Publisher(sys.argv[1], bucket_bytes=2**21)):
    try:
        attempt()
    except TransferError as error:
        print(error)
    else:
        sys.exit("it was given")
assert count() == before, os.listdir("/proc/self/fd")
assert os.listdir(sys.argv[1]) == []
with Publisher(sys.argv[1], bucket_bytes=2**20):  # less is to be had
    assert os.listdir(sys.argv[1]) == ["weights.sock"]
"""


def test_memory_that_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _LIMITED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    refusal = "no shared buffer of 2.0 MiB: there is not enough memory; choose a smaller bucket_bytes"
    assert done.stdout.splitlines() == [refusal, refusal]


_FEW_DESCRIPTORS = """
import os, resource
from relight.errors import TransferError
from relight.transfer.io.buffers import create_buffers
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 3, used + 3))
try:
    create_buffers(50, 4096)
except TransferError as error:
    print(error)
assert len(os.listdir("/proc/self/fd")) == used
"""


def test_descriptors_that_are_refused() -> None:
    command = [sys.executable, "-c", _FEW_DESCRIPTORS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Too many open files" in done.stdout


def test_a_buffer_smaller_than_announced_and_something_else_altogether() -> None:
    before = open_count()
    small, other = create_buffers(2, 4096)
    with pytest.raises(TransferError, match="it has 4096 bytes, not 8192 as announced"):
        open_buffers([os.dup(small.descriptor), os.dup(other.descriptor)], 8192)
    read_end, write_end = os.pipe()
    os.close(write_end)
    with pytest.raises(TransferError, match="cannot be mapped"):
        open_buffers([os.dup(small.descriptor), read_end, os.dup(other.descriptor)], 4096)
    with pytest.raises(TransferError, match="cannot be mapped"):
        Buffer(os.open("/", os.O_RDONLY), 64)
    close_buffers([small, other])
    assert open_count() == before, "every descriptor that came is closed"
