"""Snapshots that a worker makes, keeps and overwrites."""

import pytest

from relight.core.worker.snapshots import Due, Slot, SnapshotSlots

RANK, WARD, EARLIER_WARD, RANKS = 1, 0, 2, 3
BUDDIES = (1, 2, 0)  # rank 1 keeps the snapshots of rank 0


def fill(slot: Slot | None, rank: int, version: int) -> None:
    assert slot is not None
    slot.clear()
    slot.rank, slot.version, slot.complete = rank, version, True


def snapshot(slots: SnapshotSlots[Slot], version: int) -> None:
    """Make a snapshot of a version, and fetch the ward's."""
    fill(slots.begin(version), RANK, version)
    fill(slots.room_for_ward(), WARD, version)
    slots.have = version


def versions(slots: SnapshotSlots[Slot]) -> list[tuple[int, int]]:
    return sorted((slot.rank, slot.version) for slot in slots.complete())


@pytest.fixture
def slots() -> SnapshotSlots[Slot]:
    slots = SnapshotSlots(Slot)
    slots.assign(RANK, BUDDIES, keep=-1)
    return slots


def test_the_first_boundary_of_a_generation_is_due(slots: SnapshotSlots[Slot]) -> None:
    assert slots.ward == WARD
    assert slots.is_due(7, every=5) is Due.YES
    slots.begin(7)
    assert slots.is_due(8, every=5) is Due.NO


def test_none_is_due_without_buddies() -> None:
    slots = SnapshotSlots(Slot)
    slots.assign(RANK, (), keep=-1)
    assert slots.is_due(10, every=5) is Due.NO


def test_the_next_one_waits_until_the_newest_is_established(slots: SnapshotSlots[Slot]) -> None:
    snapshot(slots, 5)
    assert slots.is_due(10, every=5) is Due.SKIPPED
    assert slots.count(RANKS - 1, RANKS) == []
    assert slots.is_due(10, every=5) is Due.SKIPPED
    slots.count(RANKS, RANKS)
    assert slots.is_due(10, every=5) is Due.YES


def test_a_rank_votes_once_it_has_both(slots: SnapshotSlots[Slot]) -> None:
    fill(slots.begin(5), RANK, 5)
    assert slots.vote() == 0
    fill(slots.room_for_ward(), WARD, 5)
    assert slots.vote() == 0  # until its driver says that the fetch is complete
    slots.have = 5
    assert slots.vote() == 1


def test_what_is_established_stays(slots: SnapshotSlots[Slot]) -> None:
    for version in (5, 10):
        snapshot(slots, version)
        slots.count(RANKS, RANKS)
    snapshot(slots, 15)  # not established
    assert versions(slots) == [(WARD, 10), (WARD, 15), (RANK, 10), (RANK, 15)]


def test_what_a_recovery_keeps_stays_whoever_it_is_of(slots: SnapshotSlots[Slot]) -> None:
    for slot, rank in zip(slots.kept, (EARLIER_WARD, WARD), strict=True):
        fill(slot, rank, 5)
    fill(slots.own[0], RANK, 5)
    slots.assign(RANK, BUDDIES, keep=5)
    snapshot(slots, 6)
    assert (EARLIER_WARD, 5) in versions(slots)
    assert (WARD, 5) in versions(slots)
    given_up = slots.count(RANKS, RANKS)
    assert len(slots.kept) == 2
    assert all(slot.version == 5 for slot in given_up)


def test_a_snapshot_that_is_there_is_not_made_again(slots: SnapshotSlots[Slot]) -> None:
    snapshot(slots, 5)
    slots.assign(RANK, BUDDIES, keep=5)
    assert slots.begin(5) is None
    assert slots.room_for_ward() is None
    assert slots.vote() == 1


def test_versions_that_are_undone_go(slots: SnapshotSlots[Slot]) -> None:
    snapshot(slots, 5)
    slots.count(RANKS, RANKS)
    snapshot(slots, 10)
    for slot in slots.newer_than(5):
        slot.clear()
    assert versions(slots) == [(WARD, 5), (RANK, 5)]
    assert slots.find_own(10) is None
