"""Predicted times: simulation and closed forms agree, more overlap never costs, and the choice is explained."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.errors import UsageError
from relight.transfer.plan.cost import NEAR, Costs, choose, predict, simulate
from relight.transfer.plan.plan import Bucket
from relight.transfer.plan.schedule import Form, Kind, make_schedule

FULL = 1024
times = st.integers(0, 12)
counts = st.integers(1, 6)
cores = st.none() | st.integers(1, 8)


def full_buckets(count: int) -> tuple[Bucket, ...]:
    return tuple(Bucket(index, FULL, ()) for index in range(count))


@st.composite
def uneven_buckets(draw: st.DrawFn) -> tuple[Bucket, ...]:
    sizes = draw(st.lists(st.integers(1, FULL), max_size=12))
    return tuple(Bucket(index, size, ()) for index, size in enumerate(sizes))


def costs_of(h: float, b: float, r: float, **options: object) -> Costs:
    return Costs(h, b, r, bucket_bytes=FULL, **options)  # type: ignore[arg-type]


def slot_by_slot(h: int, b: int, r: int, devices: int, rounds: int) -> int:
    """The two-stage form if every slot waited for all of the slot before: what the schedule stays below."""
    return h + (rounds - 1) * max(h, r) + rounds * (b + (devices - 1) * max(b, r)) + r


# --- closed forms ----------------------------------------------------------------------------------------------
def closed_form(form: Form, h: float, b: float, r: float, devices: int, rounds: int) -> float:
    """Seconds for `rounds` full rounds; h, b, r: one bucket's copy, broadcast and reload. From host: h is 0.

    All but the serial form: the first bucket's way through all stages, the slowest stage of the rest of its round,
    and for each further round either the slowest stage or the wait for its copies. In the two-stage form that wait
    begins with the last broadcast, which ends before the reload beside it if reloads are slower.
    """
    if form is Form.SERIAL:
        return rounds * (h + devices * (b + r))
    slower = max(b, r)
    first = h + b + (devices - 1) * slower + r
    if form is Form.THREE_STAGE:
        return first + (rounds - 1) * max(devices * slower, h + b)
    beside = slower - b if devices > 1 else 0.0
    return first + (rounds - 1) * ((devices - 1) * slower + max(r, h + b - beside))


@given(st.sampled_from(Form), times, times, times, counts, counts)
def test_closed_forms_are_the_simulation(form: Form, h: int, b: int, r: int, devices: int, rounds: int) -> None:
    schedule = make_schedule(form, devices=devices, buckets=devices * rounds)
    simulated = predict(schedule, full_buckets(devices * rounds), costs_of(h, b, r))
    assert simulated == closed_form(form, h, b, r, devices, rounds)


@given(st.sampled_from(Form), times, times, counts, counts)
def test_closed_forms_from_host_have_no_copies(form: Form, b: int, r: int, devices: int, rounds: int) -> None:
    schedule = make_schedule(form, devices=devices, buckets=devices * rounds, from_host=True)
    simulated = predict(schedule, full_buckets(devices * rounds), costs_of(99, b, r))
    assert simulated == closed_form(form, 0, b, r, devices, rounds)


@given(times, times, times, counts, counts)
def test_without_a_barrier_between_slots_it_is_never_slower(h: int, b: int, r: int, devices: int, rounds: int) -> None:
    seconds = closed_form(Form.TWO_STAGE, h, b, r, devices, rounds)
    assert seconds <= slot_by_slot(h, b, r, devices, rounds)
    if h >= r and b >= r:
        assert seconds == slot_by_slot(h, b, r, devices, rounds)


# --- any buckets -----------------------------------------------------------------------------------------------
@given(uneven_buckets(), times, times, times, counts, st.booleans(), st.integers(0, 3))
def test_more_overlap_never_costs_and_no_stage_is_faster_than_alone(
    buckets: tuple[Bucket, ...], h: int, b: int, r: int, devices: int, from_host: bool, fixed: int
) -> None:
    costs = costs_of(h, b, r, operation_seconds=float(fixed))
    serial, two, three = (
        predict(make_schedule(form, devices=devices, buckets=len(buckets), from_host=from_host), buckets, costs)
        for form in Form
    )
    assert serial >= two - 1e-9
    assert two >= three - 1e-9
    for seconds in (b, r):
        assert three >= sum(fixed + seconds * bucket.nbytes / FULL for bucket in buckets) - 1e-9
    for bucket in buckets:  # its own way through all stages
        stages = [b, r] if from_host else [h, b, r]
        assert three >= sum(fixed + seconds * bucket.nbytes / FULL for seconds in stages) - 1e-9


@given(st.sampled_from(Form), uneven_buckets(), times, times, times, counts, cores, counts)
def test_every_operation_waits_and_takes_its_time(
    form: Form, buckets: tuple[Bucket, ...], h: int, b: int, r: int, devices: int, shared: int | None, engines: int
) -> None:
    schedule = make_schedule(form, devices=devices, buckets=len(buckets))
    spans = simulate(schedule, buckets, costs_of(h, b, r, cores=shared, engines=engines))
    alone = {Kind.H2D: h, Kind.BROADCAST: b, Kind.RELOAD: r}
    for operation, span in zip(schedule.operations, spans, strict=True):
        assert span.index == operation.index
        assert span.start_seconds == max((spans[index].end_seconds for index in operation.after), default=0.0)
        least = alone[operation.kind] * buckets[operation.bucket].nbytes / FULL
        assert span.end_seconds - span.start_seconds >= least - 1e-9


@given(st.sampled_from(Form), uneven_buckets(), times, times, times, counts, st.integers(1, 8), counts)
def test_cores_do_no_more_than_they_can(
    form: Form, buckets: tuple[Bucket, ...], h: int, b: int, r: int, devices: int, shared: int, engines: int
) -> None:
    schedule = make_schedule(form, devices=devices, buckets=len(buckets))
    fulls = sum(bucket.nbytes for bucket in buckets) / FULL
    seconds = predict(schedule, buckets, costs_of(h, b, r, cores=shared, engines=engines))
    assert seconds * shared >= fulls * (h + b + r * engines) - 1e-6
    plenty = costs_of(h, b, r, cores=devices + engines + 1, engines=engines)
    assert predict(schedule, buckets, plenty) == pytest.approx(predict(schedule, buckets, costs_of(h, b, r)))


@given(st.sampled_from(Form), uneven_buckets(), times, times, counts, st.integers(2, 8), st.integers(10, 30))
def test_crowding_slows_down_what_runs_beside_others(
    form: Form, buckets: tuple[Bucket, ...], b: int, r: int, engines: int, shared: int, tenths: int
) -> None:
    schedule = make_schedule(form, devices=1, buckets=len(buckets), from_host=True)
    plain, crowded = (
        predict(schedule, buckets, costs_of(0, b, r, cores=shared, engines=engines, crowding=crowding))
        for crowding in (1.0, tenths / 10)
    )
    assert plain - 1e-6 <= crowded <= plain * tenths / 10 + 1e-6
    if form is Form.SERIAL and engines == 1:
        assert crowded == pytest.approx(plain), "one copy at a time crowds no other"


def test_crowding_grows_with_the_cores_at_work() -> None:
    schedule = make_schedule(Form.SERIAL, devices=1, buckets=1, from_host=True)
    for engines, seconds in ((1, 10.0), (2, 12.0), (3, 14.0), (6, 28.0)):
        costs = costs_of(0, 0, 10, cores=3, engines=engines, crowding=1.4)
        assert predict(schedule, full_buckets(1), costs) == pytest.approx(seconds)


def test_on_one_core_nothing_is_won_by_overlapping() -> None:
    choice = choose(full_buckets(8), costs_of(1, 2, 3, cores=1), devices=4)
    assert choice.seconds_by_form == {"serial": 48.0, "two-stage": 48.0, "three-stage": 48.0}
    assert choice.form is Form.SERIAL
    assert choice.why == (
        "serial: overlapping the stages would gain at most 2 %: 48 s on 1 shared core against two-stage 48 s, "
        "three-stage 48 s"
    )


def test_two_engines_on_one_core_take_twice_as_long() -> None:
    schedule = make_schedule(Form.SERIAL, devices=1, buckets=1)
    spans = simulate(schedule, full_buckets(1), costs_of(1, 2, 3, cores=1, engines=2))
    assert [(span.start_seconds, span.end_seconds) for span in spans] == [(0, 1), (1, 3), (3, 9)]


# --- the choice ------------------------------------------------------------------------------------------------
@given(uneven_buckets(), times, times, times, counts, st.booleans(), cores)
def test_the_choice_is_the_simplest_near_the_fastest(
    buckets: tuple[Bucket, ...], h: int, b: int, r: int, devices: int, from_host: bool, shared: int | None
) -> None:
    choice = choose(buckets, costs_of(h, b, r, cores=shared), devices=devices, from_host=from_host)
    seconds = choice.seconds_by_form
    assert list(seconds) == [str(form) for form in Form]
    assert choice.seconds == seconds[choice.form] <= NEAR * min(seconds.values())
    simpler = list(Form)[: list(Form).index(choice.form)]
    assert all(seconds[form] > NEAR * min(seconds.values()) for form in simpler)
    assert choice.why.startswith(f"{choice.form}: ")
    if from_host:
        assert choice.form is not Form.THREE_STAGE


def test_reasons_in_words() -> None:
    two = choose(full_buckets(40), costs_of(0.01, 1.0, 0.5), devices=4)
    assert two.why == (
        "two-stage: the reloads (20 s in all) hide behind the broadcasts (40 s), and copying during broadcasts as well "
        "would gain at most 2 %: 40.6 s against serial 60.1 s, three-stage 40.5 s"
    )
    three = choose(full_buckets(8), costs_of(1, 1, 0.5), devices=4)
    assert three.why == (
        "three-stage: the reloads (4 s in all) hide behind the broadcasts (8 s), and the next round's copies (2 s) "
        "behind both if the bus is free: 9.5 s against serial 14 s, two-stage 10.5 s"
    )
    single = choose(full_buckets(1), costs_of(0.01, 1.0, 0.5), devices=4)
    assert single.why == "serial: there is nothing to overlap in 1 bucket"
    assert choose((), costs_of(1, 1, 1), devices=4).seconds == 0


def test_what_cannot_be_predicted() -> None:
    schedule = make_schedule(Form.SERIAL, devices=1, buckets=2)
    with pytest.raises(UsageError, match="cannot move 1"):
        simulate(schedule, full_buckets(1), costs_of(1, 1, 1))
    for costs in (costs_of(-1, 1, 1), costs_of(1, float("nan"), 1), costs_of(1, 1, float("inf"))):
        with pytest.raises(UsageError, match="none may be negative"):
            simulate(schedule, full_buckets(2), costs)
    for costs in (costs_of(1, 1, 1, cores=0), costs_of(1, 1, 1, engines=0)):
        with pytest.raises(UsageError, match="at least 1"):
            simulate(schedule, full_buckets(2), costs)
