"""Death is told by the lock before it is told by the pidfd, whatever the manner of dying."""

import mmap
import os
import select
import signal
from collections.abc import Callable

import pytest

from relight.wire.memory import lifelock
from tests.wire.holder import fork_holder, wait_for_a_signal

DEADLINE_SECONDS = 30


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
        pid = fork_holder(mapping, 0, die)
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
    """A process with much memory: when the lock is released the process is still being torn down."""
    with mmap.mmap(-1, mmap.PAGESIZE) as mapping:
        early = 0
        for _ in range(5):

            def fill_memory() -> None:
                block = bytearray(256 * 2**20)
                block[:: mmap.PAGESIZE] = b"x" * len(range(0, len(block), mmap.PAGESIZE))
                os.kill(os.getpid(), signal.SIGKILL)

            pid = fork_holder(mapping, 0, fill_memory)
            descriptor = os.pidfd_open(pid)
            assert lifelock.await_death(mapping, 0)
            readable, _, _ = select.select([descriptor], [], [], 0)
            early += not readable
            select.select([descriptor], [], [], DEADLINE_SECONDS)
            os.waitpid(pid, 0)
            os.close(descriptor)
        assert early >= 1
