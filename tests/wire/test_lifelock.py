"""Death is told by the lock before it is told by the pidfd, whatever the manner of dying."""

import faulthandler
import mmap
import os
import select
import signal
from collections.abc import Callable

import pytest

from relight.wire import lifelock

DEADLINE_SECONDS = 30


def fork_holder(mapping: mmap.mmap, die: Callable[[], object]) -> int:
    """A process that takes the lock, says so, and dies."""
    ready, say_ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # a child that dies on purpose shall not print how
        lifelock.hold(mapping, 0)
        os.write(say_ready, b"x")
        die()
        os._exit(9)
    os.read(ready, 1)
    os.close(ready)
    os.close(say_ready)
    return pid


def wait_for_a_signal() -> None:
    signal.pause()


@pytest.mark.parametrize(
    "die",
    [
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        lambda: os.kill(os.getpid(), signal.SIGSEGV),
        lambda: os._exit(0),
        wait_for_a_signal,
    ],
    ids=["SIGKILL", "SIGSEGV", "exit", "killed by another"],
)
def test_the_waiter_is_told(die: Callable[[], object]) -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as mapping:
        pid = fork_holder(mapping, die)
        if die is wait_for_a_signal:
            os.kill(pid, signal.SIGKILL)
        try:
            assert lifelock.await_death(mapping, 0)
        finally:
            os.waitpid(pid, 0)


def test_a_page_without_a_lock_says_so() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as mapping:
        assert not lifelock.await_death(mapping, 0)


def test_the_lock_comes_before_the_pidfd() -> None:
    """Of a process with much memory: when the lock is released the process is still being torn down."""
    with mmap.mmap(-1, mmap.PAGESIZE) as mapping:
        early = 0
        for _ in range(5):

            def fill_memory() -> None:
                block = bytearray(256 * 2**20)
                block[:: mmap.PAGESIZE] = b"x" * len(range(0, len(block), mmap.PAGESIZE))
                os.kill(os.getpid(), signal.SIGKILL)

            pid = fork_holder(mapping, fill_memory)
            descriptor = os.pidfd_open(pid)
            assert lifelock.await_death(mapping, 0)
            readable, _, _ = select.select([descriptor], [], [], 0)
            early += not readable
            select.select([descriptor], [], [], DEADLINE_SECONDS)
            os.waitpid(pid, 0)
            os.close(descriptor)
        assert early >= 1
