"""Ranks and standbys on the devices of a host."""

import dataclasses

import pytest

from relight.device.placement import Devices, Placement, place
from relight.errors import UsageError

FOUR = Devices(4, "late", has_gloo=True, backend_name="own")
ALONE = dataclasses.replace(FOUR, has_gloo=False)


@pytest.mark.parametrize("late", [None, False, True])
def test_a_cpu_has_room_for_all(late: bool | None) -> None:
    assert place(Devices(0), 64, 8, late_standby=late) == Placement(has_own_collectives=False, builds_late=bool(late))


@pytest.mark.parametrize("devices", [FOUR, ALONE])
def test_with_a_spare_device_a_standby_is_warm(devices: Devices) -> None:
    assert place(devices, 3, 1, late_standby=None) == Placement(has_own_collectives=True, builds_late=False)


@pytest.mark.parametrize("devices", [FOUR, ALONE])
def test_without_a_spare_device_a_standby_builds_late_and_it_is_said(devices: Devices) -> None:
    placed = place(devices, 4, 1, late_standby=None)
    assert (placed.has_own_collectives, placed.builds_late) == (True, True)
    assert "4 ranks and 1 standbys have 4 devices of type 'late'" in placed.notice
    asked = place(devices, 4, 1, late_standby=True)
    assert asked == Placement(has_own_collectives=True, builds_late=True), "as the script says: nothing to tell"


def test_ranks_that_share_a_device_are_carried_by_gloo_and_it_is_said() -> None:
    placed = place(FOUR, 5, 1, late_standby=None)
    assert (placed.has_own_collectives, placed.builds_late) == (False, False)
    assert "With 5 devices" in placed.notice
    warm = place(FOUR, 4, 1, late_standby=False)
    assert not warm.has_own_collectives
    assert "With 5 devices" in warm.notice


def test_ranks_that_share_a_device_are_refused_where_gloo_cannot_carry_them() -> None:
    with pytest.raises(UsageError, match=r"5 ranks and 0 standbys have 4 devices of type 'late'.*5 devices"):
        place(ALONE, 5, 0, late_standby=None)
    with pytest.raises(UsageError, match=r"4 ranks and 1 standbys have 4 devices.*5 devices"):
        place(ALONE, 4, 1, late_standby=False)


def test_without_collectives_of_the_devices_gloo_carries_tensors_or_the_job_is_refused() -> None:
    placed = place(dataclasses.replace(FOUR, backend_name=None), 2, 1, late_standby=None)
    assert not placed.has_own_collectives
    assert "torch has no collectives for devices of type 'late' here" in placed.notice
    with pytest.raises(UsageError, match=r"type 'late' here: import the package"):
        place(dataclasses.replace(ALONE, backend_name=None), 2, 0, late_standby=None)
