import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from relight.agent.processes.readings.page import MAX_PRIVATE_BYTES, Page, Pages
from relight.core.protocol.position import (
    BATCH_MARK,
    LIFE_LOCK_OFFSET,
    MAPPING_BYTES,
    PRIVATE_HEADER,
    PRIVATE_OFFSET,
    PRIVATE_SLOT_BYTES,
    TRACE_INDEX_OFFSET,
    TRACE_OFFSET,
    TRACE_RECORD,
    TRACE_RECORDS,
    WORD,
    Phase,
    Position,
)
from tests.agent.encode_page import encode_page
from tests.wire.holder import fork_holder, wait_for_a_signal

DEADLINE_SECONDS = 30.0
FUTEX_WAITERS = 1 << 31  # in the first word of a lock: a thread sleeps until it is free


@pytest.fixture
def pages() -> Iterator[Pages]:
    pages = Pages.create()
    yield pages
    pages.close()


@pytest.fixture
def page(pages: Pages) -> Iterator[Page]:
    """Not the first one."""
    pages.add().close()
    page = pages.add()
    yield page
    page.close()


@pytest.fixture
def worker(pages: Pages, page: Page) -> Iterator[mmap.mmap]:
    """Map the memory as a worker sees it."""
    with mmap.mmap(pages.descriptor, MAPPING_BYTES, offset=page.offset) as mapping:
        yield mapping


def put(worker: mmap.mmap, position: Position) -> None:
    words = encode_page(position)
    worker[: len(words)] = words


def write_trace(worker: mmap.mmap, first: int, count: int) -> None:
    for index in range(first, first + count):
        offset = TRACE_OFFSET + index % TRACE_RECORDS * TRACE_RECORD.size
        TRACE_RECORD.pack_into(worker, offset, index, 1, 2, 3, 4)
        struct.pack_into("<q", worker, TRACE_INDEX_OFFSET, index + 1)


def test_a_blank_page_is_a_worker_that_has_not_stamped(page: Page) -> None:
    assert page.position() == Position()
    assert page.drain_trace() == ()
    assert page.read_private(0) is None
    assert page.read_private(1) is None


def test_a_position_round_trips(page: Page, worker: mmap.mmap) -> None:
    position = Position(
        generation=3,
        rank=1,
        step=118,
        attempt=1,
        phase=Phase.BARRIER,
        version=117,
        prepared=118,
        torn=True,
        collectives=9,
        progress=2**40,
        stamp_ns=5,
        fault_ns=6,
        private_versions=(116, 117),
        loss=0.25,
    )
    data = encode_page(position)
    worker[: len(data)] = data
    assert page.position() == position


def test_pages_are_sparse_and_cannot_be_cut_short(pages: Pages, page: Page) -> None:
    assert page.offset == 2 * MAPPING_BYTES
    assert os.fstat(pages.descriptor).st_blocks * 512 < 2**20
    with pytest.raises(PermissionError):
        os.ftruncate(pages.descriptor, 0)


@pytest.mark.parametrize("offset", [-1, 0, MAPPING_BYTES + 4096, 3 * MAPPING_BYTES])
def test_a_page_begins_where_one_was_added(pages: Pages, page: Page, offset: int) -> None:
    with pytest.raises(ValueError, match="no position page"):
        pages.at(offset)
    same = pages.at(page.offset)
    page.write_private(1, b"seen by both")
    assert same.read_private(1) == b"seen by both"
    same.close()


def test_what_is_cleared_takes_no_memory_and_others_stay(pages: Pages, page: Page) -> None:
    other = pages.add()
    page.write_private(1, b"kept")
    other.write_private(1, bytes(2**22))
    held = os.fstat(pages.descriptor).st_blocks
    other.clear()
    assert os.fstat(pages.descriptor).st_blocks <= held - 2**22 // 512
    assert page.read_private(1) == b"kept"
    assert pages.at(3 * MAPPING_BYTES).read_private(1) is None


def test_scribbled_words_read_as_no_position(page: Page, worker: mmap.mmap) -> None:
    struct.pack_into("<q", worker, 8 * WORD["stamp_ns"], 1)
    struct.pack_into("<q", worker, 8 * WORD["phase"], 99)
    assert page.position() == Position()


def test_trace_records_come_once_and_in_order(page: Page, worker: mmap.mmap) -> None:
    write_trace(worker, 0, 3)
    assert page.drain_trace() == ((0, 1, 2, 3, 4), (1, 1, 2, 3, 4), (2, 1, 2, 3, 4))
    assert page.drain_trace() == ()
    write_trace(worker, 3, 1)
    assert [record[0] for record in page.drain_trace()] == [3]


def test_an_overrun_trace_goes_on_with_what_is_still_there(page: Page, worker: mmap.mmap) -> None:
    write_trace(worker, 0, 5)
    page.drain_trace()
    written = 2 * TRACE_RECORDS + 7
    write_trace(worker, 5, written - 5)
    # The oldest slot is the one that the worker may be writing at this moment.
    assert [record[0] for record in page.drain_trace()] == list(range(written - TRACE_RECORDS + 1, written))


@pytest.mark.parametrize("count", [-1, -(2**63), 2**63 - 1])
def test_a_scribbled_trace_count_costs_no_more_than_the_ring(page: Page, worker: mmap.mmap, count: int) -> None:
    struct.pack_into("<q", worker, TRACE_INDEX_OFFSET, count)
    assert len(page.drain_trace()) <= TRACE_RECORDS
    struct.pack_into("<q", worker, TRACE_INDEX_OFFSET, 0)
    assert page.drain_trace() == ()
    write_trace(worker, 0, 2)
    assert [record[0] for record in page.drain_trace()] == [0, 1]


def test_private_state_of_two_versions_is_kept(page: Page) -> None:
    for version in (6, 7, 8):
        page.write_private(version, b"state %d" % version)
    assert page.read_private(8) == b"state 8"
    assert page.read_private(7) == b"state 7"
    assert page.read_private(6) is None


@pytest.mark.parametrize("offset", [0, 8, 16, PRIVATE_HEADER.size, PRIVATE_HEADER.size + 5])
def test_a_torn_private_slot_is_not_returned(page: Page, worker: mmap.mmap, offset: int) -> None:
    page.write_private(8, b"payload of version 8")
    page.write_private(9, b"payload of version 9")
    worker[PRIVATE_OFFSET + offset] ^= 0xFF
    assert page.read_private(8) is None
    assert page.read_private(9) == b"payload of version 9"


@pytest.mark.parametrize("size", [-1, MAX_PRIVATE_BYTES + 1, 2**62])
def test_an_impossible_private_size_is_not_followed(page: Page, worker: mmap.mmap, size: int) -> None:
    PRIVATE_HEADER.pack_into(worker, PRIVATE_OFFSET + PRIVATE_SLOT_BYTES, 9, size, 0)
    assert page.read_private(9) is None


def test_private_state_has_a_limit(page: Page) -> None:
    with pytest.raises(ValueError, match="over"):
        page.write_private(0, bytes(MAX_PRIVATE_BYTES + 1))


def test_a_page_that_nobody_needs_is_kept_for_whoever_still_waits_in_it(pages: Pages) -> None:
    """The lock of a worker's life is part of the page, and the thread that waits for it is told by the kernel."""
    page = pages.add()
    with mmap.mmap(pages.descriptor, MAPPING_BYTES, offset=page.offset) as worker:
        pid = fork_holder(worker, LIFE_LOCK_OFFSET, wait_for_a_signal)
        told: list[bool] = []
        waiter = threading.Thread(target=lambda: told.append(page.await_death()), daemon=True)
        waiter.start()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not struct.unpack_from("<I", worker, LIFE_LOCK_OFFSET)[0] & FUTEX_WAITERS:
            assert time.monotonic() < deadline, "no thread waits"
        page.clear()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        waiter.join(DEADLINE_SECONDS)
        assert told == [True]
        assert worker[:] == bytes(MAPPING_BYTES)  # its memory has been given back after all
        assert not page.await_death()


def test_what_a_predecessor_left_comes_to_who_has_nothing_yet(page: Page, worker: mmap.mmap) -> None:
    mark = BATCH_MARK.pack(4, 77)
    put(worker, Position(stamp_ns=1, private_versions=(-1, -1)))
    page.inherit(3, b"three", mark)
    assert page.read_private(3) == b"three"
    page.write_private(5, b"its own")
    put(worker, Position(stamp_ns=2, private_versions=(4, 5)))
    page.inherit(3, b"three", mark)  # late, from another host, in the same slot
    assert page.read_private(5) == b"its own"


def test_a_mark_of_another_size_is_refused(page: Page) -> None:
    with pytest.raises(ValueError, match="a batch's mark has 16 bytes, not 3"):
        page.inherit(3, b"three", b"abc")
    assert page.read_private(3) is None
