"""Finds mistakes of a schedule: stages that are missing, out of order, or overwrite what is still read."""

import itertools
from collections import defaultdict

from relight.transfer.plan.schedule import IPC_BUFFERS, Kind, Operation, Schedule


def violations(schedule: Schedule) -> list[str]:
    """Return the mistakes of a schedule, a sentence each.

    Each bucket is copied (unless from host), broadcast and reloaded once, in this order and through one buffer, and
    no buffer is written while it may still be read, whatever the operations' durations are.
    """
    found = _misplaced(schedule)
    if found:  # what follows relies on the order
        return found
    before = _ancestors(schedule)
    uses: dict[tuple[Kind, int], list[Operation]] = defaultdict(list)
    for operation in schedule.operations:
        uses[operation.kind, operation.bucket].append(operation)
    kinds = [Kind.BROADCAST, Kind.RELOAD] if schedule.from_host else list(Kind)
    for bucket in range(schedule.buckets):
        for kind in kinds:
            if len(uses[kind, bucket]) != 1:
                found.append(f"bucket {bucket} has {len(uses[kind, bucket])} {kind} operations")
        chain = [uses[kind, bucket][0] for kind in kinds if uses[kind, bucket]]
        for first, second in itertools.pairwise(chain):
            if not before[second.index] >> first.index & 1:
                found.append(f"bucket {bucket}: {second.kind} does not wait for {first.kind}")
            if first.source != second.source:
                found.append(f"bucket {bucket}: {second.kind} names another source than {first.kind}")
            if first.kind is Kind.BROADCAST and first.buffer != second.buffer:
                found.append(f"bucket {bucket}: sent into buffer {first.buffer}, reloaded from {second.buffer}")
    return found + _overwritten(schedule, before)


def _misplaced(schedule: Schedule) -> list[str]:
    """Operations out of order, and operations on devices, buffers or buckets that do not exist."""
    found = []
    for place, operation in enumerate(schedule.operations):
        if operation.index != place:
            found.append(f"operation {operation.index} stands at place {place}")
        if any(not 0 <= before < place for before in operation.after):
            found.append(f"operation {place} waits for a later one, or for none that exists")
        buffers = (-1,) if operation.kind is Kind.H2D else range(IPC_BUFFERS)
        if operation.buffer not in buffers or not 0 <= operation.source < schedule.devices:
            found.append(f"operation {place} uses buffer {operation.buffer} of device {operation.source}")
        if not 0 <= operation.bucket < schedule.buckets:
            found.append(f"operation {place} moves bucket {operation.bucket}, which does not exist")
        if operation.kind is Kind.H2D and schedule.from_host:
            found.append(f"operation {place} copies to a device, though the devices are host memory")
    return found


def _overwritten(schedule: Schedule, before: list[int]) -> list[str]:
    """Writes of a buffer that do not wait for the reader of what it held, wherever in the order that reader stands."""
    found = []
    readers = {(operation.kind, operation.bucket): operation for operation in schedule.operations}
    held: dict[tuple[int, int], Operation] = {}  # (device or -1, buffer) -> what wrote it last
    for operation in schedule.operations:
        if operation.kind is Kind.RELOAD:
            continue
        is_copy = operation.kind is Kind.H2D
        place = (operation.source, -1) if is_copy else (-1, operation.buffer)
        writer = held.get(place)
        if writer is not None:
            reader = readers.get((Kind.BROADCAST if is_copy else Kind.RELOAD, writer.bucket))
            if reader is None or not before[operation.index] >> reader.index & 1:
                what = f"{operation.kind} of bucket {operation.bucket}"
                found.append(f"{what} may overwrite bucket {writer.bucket} while it is read")
        held[place] = operation
    return found


def _ancestors(schedule: Schedule) -> list[int]:
    """For each operation, the set of those that are over before it begins: bit k is operation k."""
    before: list[int] = []
    for operation in schedule.operations:
        mine = 0
        for index in operation.after:
            mine |= before[index] | 1 << index
        before.append(mine)
    return before
