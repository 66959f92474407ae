"""Makes a failing schedule small: fewer faults, ranks, steps and oddities, as long as the same invariant breaks."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from relight.sim.model.contents import Violation
from relight.sim.model.schedule import SAMPLE_SECONDS, NetworkFault, ProcessFault, Schedule

Breaks = Callable[[Schedule], Violation | None]
_MAX_TRIES = 2000
_SIMPLEST: dict[str, Any] = {  # of fields that can be made simple independently; what is more has a greater value
    "slow_messages": 0.0,
    "repeated_messages": 0.0,
    "late_messages": 0.0,
    "seen_dying": 0.0,
    "slow_rank": -1,
    "watched": False,
    "gathers": False,
    "parts": 1,
    "relearns": False,
    "learns": False,
    "shapes": (),
    "bug_step": -1,
    "verify_every": 1,
    "sample_seconds": SAMPLE_SECONDS,
}


def shrink(schedule: Schedule, breaks: Breaks) -> Schedule:
    """Return the smallest schedule found that breaks the same invariant; `schedule` itself if none is smaller."""
    first = breaks(schedule)
    if first is None:
        return schedule
    tries = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _simpler(schedule):
            tries += 1
            if tries > _MAX_TRIES:
                return schedule
            violation = breaks(candidate)
            if violation is not None and violation.invariant == first.invariant:
                schedule, smaller = candidate, True
                break
    return schedule


def _simpler(schedule: Schedule) -> Iterator[Schedule]:
    """Smaller schedules to try, the greatest step first."""
    change = msgspec.structs.replace
    for index in range(len(schedule.faults)):
        yield change(schedule, faults=_without(schedule.faults, index))
    for index in range(len(schedule.network)):
        yield change(schedule, network=_without(schedule.network, index))
    for name, simplest in _SIMPLEST.items():
        if getattr(schedule, name) > simplest:
            yield change(schedule, **{name: simplest})
    for index in range(len(schedule.shapes) if len(schedule.shapes) > 1 else 0):
        yield change(schedule, shapes=_without(schedule.shapes, index))
    fewer = schedule.world_size - schedule.nodes  # as many on each host
    if fewer >= max(2, schedule.nodes):
        yield change(schedule, world_size=fewer, slow_rank=-1)
    if schedule.nodes > 1:
        yield change(schedule, nodes=1)
    if schedule.nodes > 2:
        ranks = schedule.world_size // schedule.nodes * (schedule.nodes - 1)
        yield change(schedule, nodes=schedule.nodes - 1, world_size=ranks, slow_rank=-1)
    if schedule.until > 1:
        yield change(schedule, until=schedule.until - 1)
    if schedule.standbys:
        yield change(schedule, standbys=0)
        yield change(schedule, standbys=schedule.standbys - 1)
    for index, fault in enumerate(schedule.faults):
        for simpler in _simpler_fault(fault):
            yield change(schedule, faults=_with(schedule.faults, index, simpler))
    for index, trouble in enumerate(schedule.network):
        for milder in _milder(trouble):
            yield change(schedule, network=_with(schedule.network, index, milder))
    for seed in range(min(schedule.seed, 10)):
        yield change(schedule, seed=seed)


def _simpler_fault(fault: ProcessFault) -> Iterator[ProcessFault]:
    change = msgspec.structs.replace
    if fault.thaw_seconds:
        yield change(fault, thaw_seconds=0.0)
    if fault.holds_lock:
        yield change(fault, holds_lock=False)
    if fault.pick:
        yield change(fault, pick=0)
    for nth in sorted({1, fault.nth // 2, fault.nth - 1}):
        if 1 <= nth < fault.nth:
            yield change(fault, nth=nth)


def _milder(trouble: NetworkFault) -> Iterator[NetworkFault]:
    change = msgspec.structs.replace
    for seconds in (0.1, 1.0, round(trouble.seconds / 2, 3)):
        if seconds < trouble.seconds:
            yield change(trouble, seconds=seconds)
    for nth in sorted({trouble.nth // 2, trouble.nth - 1}):
        if nth >= 1:
            yield change(trouble, nth=nth)


def _without(items: tuple[object, ...], index: int) -> tuple[object, ...]:
    return items[:index] + items[index + 1 :]


def _with(items: tuple[object, ...], index: int, item: object) -> tuple[object, ...]:
    return (*items[:index], item, *items[index + 1 :])
