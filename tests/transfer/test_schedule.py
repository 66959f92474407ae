"""Schedules: each bucket once through each stage, sources in turns, nothing overwritten while it is read.

The order of the operations proves little, since the engine overlaps them. So the buffers are watched while operations
of any length run, limited by their dependencies alone; and `violations` must find every error that is planted.
"""

import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.errors import UsageError
from relight.transfer.plan.schedule import IPC_BUFFERS, Form, Kind, Operation, Schedule, make_schedule
from tests.transfer.schedule_judge import violations

schedules = st.builds(
    make_schedule,
    st.sampled_from(Form),
    devices=st.integers(1, 6),
    buckets=st.integers(0, 20),
    from_host=st.booleans(),
)


def changed(schedule: Schedule, index: int, /, **fields: object) -> Schedule:
    """The schedule with one operation altered."""
    operations = list(schedule.operations)
    operations[index] = msgspec.structs.replace(operations[index], **fields)
    return msgspec.structs.replace(schedule, operations=tuple(operations))


def run(schedule: Schedule, seed: int) -> list[tuple[float, float]]:
    """Start and end of each operation, if lengths are drawn and each starts as soon as it may."""
    draw = random.Random(seed)
    times: list[tuple[float, float]] = []
    for operation in schedule.operations:
        start = max((times[index][1] for index in operation.after), default=0.0)
        times.append((start, start + draw.choice([0.1, 1.0, 10.0]) * (1 + draw.random())))
    return times


@given(schedules)
def test_schedules_are_sound(schedule: Schedule) -> None:
    assert violations(schedule) == []


@given(schedules)
def test_every_bucket_goes_through_every_stage_once(schedule: Schedule) -> None:
    kinds = {Kind.BROADCAST, Kind.RELOAD} if schedule.from_host else set(Kind)
    done = [(operation.bucket, operation.kind) for operation in schedule.operations]
    assert len(done) == len(set(done))
    assert set(done) == {(bucket, kind) for bucket in range(schedule.buckets) for kind in kinds}


@given(schedules)
def test_sources_rotate_and_three_buffers_are_enough(schedule: Schedule) -> None:
    assert IPC_BUFFERS == 2
    for operation in schedule.operations:
        assert operation.source == operation.bucket % schedule.devices
        assert operation.round == operation.bucket // schedule.devices < schedule.rounds
        assert operation.buffer == (-1 if operation.kind is Kind.H2D else operation.bucket % 2)


@given(schedules, st.integers(0, 2**32))
def test_no_buffer_is_written_while_it_is_read_whatever_the_lengths(schedule: Schedule, seed: int) -> None:
    times = run(schedule, seed)
    uses: dict[tuple[int, int], list[tuple[float, float, Operation]]] = {}
    for operation, (start, end) in zip(schedule.operations, times, strict=True):
        places = [(-1, operation.buffer)]  # the IPC buffers of all devices are used alike
        if operation.kind is Kind.H2D:
            places = [(operation.source, -1)]
        elif operation.kind is Kind.BROADCAST and not schedule.from_host:
            places.append((operation.source, -1))
        for place in places:
            uses.setdefault(place, []).append((start, end, operation))
    for place, users in uses.items():
        users.sort(key=lambda use: use[0])
        for (_, end, first), (start, _, second) in pairwise(users):
            assert end <= start, f"{place}: {first} and {second} overlap"
        buckets = [operation.bucket for _, _, operation in users]
        pair = [Kind.BROADCAST, Kind.RELOAD] if place[0] == -1 else [Kind.H2D, Kind.BROADCAST]
        assert [operation.kind for _, _, operation in users] == pair * (len(users) // 2)
        assert buckets == sorted(buckets)
        assert len(buckets) == 2 * len(set(buckets))


@given(schedules, st.integers(0, 2**32))
def test_one_broadcast_and_one_reload_at_a_time(schedule: Schedule, seed: int) -> None:
    times = run(schedule, seed)
    for kind in (Kind.BROADCAST, Kind.RELOAD):
        of_kind = sorted(times[operation.index] for operation in schedule.operations if operation.kind is kind)
        assert all(first[1] <= second[0] for first, second in pairwise(of_kind))


@given(schedules, st.integers(0, 2**32))
def test_the_serial_form_never_overlaps_stages(schedule: Schedule, seed: int) -> None:
    if schedule.form is not Form.SERIAL:
        return
    spans = sorted(zip(run(schedule, seed), schedule.operations, strict=True), key=lambda item: item[0])
    for (first, one), (second, other) in pairwise(spans):
        assert first[1] <= second[0] or one.kind is other.kind is Kind.H2D


def test_the_reference_schedule() -> None:
    schedule = make_schedule(Form.TWO_STAGE, devices=4, buckets=8)
    assert schedule.rounds == 2
    first = [(o.kind.value, o.bucket, o.source, o.buffer, o.after) for o in schedule.operations[:13]]
    assert first == [
        ("h2d", 0, 0, -1, ()),
        ("h2d", 1, 1, -1, ()),
        ("h2d", 2, 2, -1, ()),
        ("h2d", 3, 3, -1, ()),
        ("broadcast", 0, 0, 0, (0, 1, 2, 3)),
        ("broadcast", 1, 1, 1, (1, 4)),
        ("reload", 0, 0, 0, (4,)),
        ("broadcast", 2, 2, 0, (2, 5, 6)),
        ("reload", 1, 1, 1, (5, 6)),
        ("broadcast", 3, 3, 1, (3, 7, 8)),
        ("reload", 2, 2, 0, (7, 8)),
        ("h2d", 4, 0, -1, (9,)),
        ("h2d", 5, 1, -1, (9,)),
    ]


def test_what_cannot_be_scheduled() -> None:
    for devices, buckets in ((0, 1), (-1, 1), (1, -1)):
        with pytest.raises(UsageError, match="at least one device"):
            make_schedule(Form.SERIAL, devices=devices, buckets=buckets)


# --- planted errors ---------------------------------------------------------------------------------------------
@given(schedules, st.data())
def test_a_forgotten_dependency_is_found_or_needless(schedule: Schedule, data: st.DataObject) -> None:
    """Take one away: either it is found, or no lengths can make a buffer's users overlap without it."""
    waiting = [operation for operation in schedule.operations if operation.after]
    if not waiting:
        return
    operation = data.draw(st.sampled_from(waiting))
    lost = data.draw(st.sampled_from(operation.after))
    broken = changed(schedule, operation.index, after=tuple(i for i in operation.after if i != lost))
    if violations(broken):
        return
    assert not _may_collide(broken)


def _may_collide(schedule: Schedule) -> bool:
    """Return whether two users of one buffer are in no fixed order: the plain statement of what must not be."""
    before: list[set[int]] = []
    for operation in schedule.operations:
        before.append({*operation.after, *(i for index in operation.after for i in before[index])})

    def places(operation: Operation) -> set[tuple[int, int]]:
        own = (operation.source, -1)
        if operation.kind is Kind.H2D:
            return {own}
        shared = {(-1, operation.buffer)}
        return shared | {own} if operation.kind is Kind.BROADCAST and not schedule.from_host else shared

    return any(
        places(first) & places(second) and first.index not in before[second.index]
        for second in schedule.operations
        for first in schedule.operations[: second.index]
    )


@given(st.sampled_from(Form), st.integers(1, 5), st.integers(3, 16), st.booleans())
def test_a_write_that_waits_for_nothing_is_found(form: Form, devices: int, buckets: int, from_host: bool) -> None:
    schedule = make_schedule(form, devices=devices, buckets=buckets, from_host=from_host)
    for operation in schedule.operations:
        if operation.kind is Kind.BROADCAST and operation.bucket >= IPC_BUFFERS:
            assert any("overwrite" in found for found in violations(changed(schedule, operation.index, after=())))
        if operation.kind is Kind.H2D and operation.round:
            assert any("overwrite" in found for found in violations(changed(schedule, operation.index, after=())))


def test_a_reader_that_stands_after_the_next_writer_is_found() -> None:
    b, r = Kind.BROADCAST, Kind.RELOAD
    operations = (
        Operation(0, b, 0, 0, 0, 0, ()),
        Operation(1, b, 1, 0, 0, 0, (0,)),  # into the buffer that bucket 0 is still to be read from
        Operation(2, r, 0, 0, 0, 0, (0, 1)),
        Operation(3, r, 1, 0, 0, 0, (1, 2)),
    )
    found = violations(Schedule(Form.TWO_STAGE, 1, 2, True, operations))
    assert found == ["broadcast of bucket 1 may overwrite bucket 0 while it is read"]


def test_planted_errors_are_found() -> None:
    schedule = make_schedule(Form.TWO_STAGE, devices=2, buckets=4)
    operations = schedule.operations
    index = {(operation.kind, operation.bucket): operation.index for operation in operations}
    sent, reloaded = index[Kind.BROADCAST, 1], index[Kind.RELOAD, 1]

    def one(found: Schedule) -> str:
        return "; ".join(violations(found))

    assert "bucket 1 has 0 broadcast" in one(changed(schedule, sent, bucket=0))
    assert "bucket 0 has 2 broadcast" in one(changed(schedule, sent, bucket=0))
    assert "moves bucket 9, which does not exist" in one(changed(schedule, sent, bucket=9))
    assert "though the devices are host memory" in one(msgspec.structs.replace(schedule, from_host=True))
    assert "sent into buffer 0, reloaded from 1" in one(changed(schedule, sent, buffer=0))
    assert "uses buffer 2" in one(changed(schedule, sent, buffer=2))
    assert "uses buffer -1" in one(changed(schedule, reloaded, buffer=-1))
    assert "uses buffer 0" in one(changed(schedule, 0, buffer=0))
    assert "of device 7" in one(changed(schedule, sent, source=7))
    assert "names another source" in one(changed(schedule, sent, source=0))
    assert "reload does not wait for broadcast" in one(changed(schedule, reloaded, after=()))
    assert "waits for a later one" in one(changed(schedule, sent, after=(sent,)))
    assert "or for none that exists" in one(changed(schedule, sent, after=(-1,)))
    assert "stands at place" in one(changed(schedule, sent, index=0))
    assert "has 0 reload" in one(msgspec.structs.replace(schedule, operations=operations[:-1]))
    assert "moves bucket 3, which does not exist" in one(msgspec.structs.replace(schedule, buckets=3))
