"""Adding up the stages of an update, on updates that are made up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.transfer.plan.schedule import Form
from relight.transfer.plan.timings import Work, measure, overlap, plan_again
from relight.transfer.plan.update.result import SELF, Published
from tests.transfer.made_up import (
    ABANDONED,
    ALL,
    BUCKET_BYTES,
    DAMAGED,
    DROPPED,
    NOTHING,
    ONE,
    USUAL,
    buckets_of,
    commit,
    published,
    reload,
    write,
)


@pytest.mark.parametrize("result", ALL.values(), ids=ALL)
def test_the_three_parts_are_the_whole(result: Published) -> None:
    found = measure(result, buckets_of(result.buckets))
    assert min(found.ask_seconds, found.move_seconds, found.take_seconds) >= 0
    assert found.ask_seconds + found.move_seconds + found.take_seconds == result.seconds


def test_the_usual_update() -> None:
    found = measure(USUAL, buckets_of(3))
    assert (found.ask_seconds, found.move_seconds, found.take_seconds) == (1.0, 7.0, 2.0)
    assert found.written == (Work(SELF, 2, 0, 128, 2.0), Work("other", 1, 0, 64, 1.0))
    assert found.reloaded == (Work("a", 3, 0, 192, 3.0), Work("b", 3, 0, 192, 6.0))
    assert found.write_seconds == 1.0
    assert found.reload_seconds == 1.5
    assert found.overlapped == 2 / 3


def test_one_bucket() -> None:
    found = measure(ONE, buckets_of(1))
    assert (found.ask_seconds, found.move_seconds, found.take_seconds) == (1.0, 7.0, 2.0)
    assert (found.write_seconds, found.reload_seconds, found.overlapped) == (2.0, 4.0, 0.0)


def test_no_stages() -> None:
    found = measure(NOTHING, buckets_of(3))
    assert (found.ask_seconds, found.move_seconds, found.take_seconds) == (2.0, 0.0, 0.0)
    assert (found.written, found.reloaded, found.overlapped) == ((), (), 0.0)
    assert (found.write_seconds, found.reload_seconds) == (0.0, 0.0)


def test_weights_without_bytes_are_only_taken() -> None:
    found = measure(published([commit(1, 4)], buckets=0, seconds=5.0), ())
    assert (found.ask_seconds, found.move_seconds, found.take_seconds) == (1.0, 0.0, 4.0)


def test_what_was_done_again_is_counted_again() -> None:
    found = measure(DAMAGED, buckets_of(2))
    assert found.written == (Work(SELF, 2, 1, 3 * BUCKET_BYTES, 3.0),)
    assert found.reloaded == (Work("a", 2, 0, 128, 2.0), Work("b", 2, 2, 256, 4.0))
    assert found.reload_seconds == 1.0


def test_a_dropped_engine_did_what_it_did() -> None:
    found = measure(DROPPED, buckets_of(3))
    assert found.reloaded == (Work("a", 3, 0, 192, 3.0), Work("b", 1, 0, 64, 1.0))
    assert found.move_seconds == 34.0


def test_an_abandoned_update() -> None:
    found = measure(ABANDONED, buckets_of(3))
    assert found.written == (Work(SELF, 2, 0, 128, 2.0),)
    assert (found.move_seconds, found.take_seconds) == (3.0, 1.0)


def test_a_small_last_bucket_is_not_taken_for_a_full_one() -> None:
    result = published([write(0, 0, 4), write(1, 4, 6), reload(0, 4, 5), reload(1, 6, 7)], buckets=2, seconds=7.0)
    found = measure(result, buckets_of(2, last_bytes=BUCKET_BYTES // 2))
    assert found.write_seconds == 4.0
    assert found.written[0].nbytes == 96


def test_a_bucket_that_does_not_exist_is_left_out() -> None:
    lies = [reload(3, 0, 100), reload(-1, 0, 100), reload(10**12, 0, 100)]
    honest = measure(USUAL, buckets_of(3))
    told = published([*USUAL.stages, *lies], buckets=3, seconds=10.0, engines=("a", "b"))
    assert measure(told, buckets_of(3)) == honest


# --- overlap ------------------------------------------------------------------------------------------------------
def test_overlap_counts_no_time_twice() -> None:
    writes = [write(0, 0, 4), write(1, 2, 6)]
    assert overlap(writes, []) == 0.0
    assert overlap([], writes) == 0.0
    assert overlap(writes, [reload(0, 3, 5), reload(0, 4, 9, "b")]) == 3 / 6
    assert overlap(writes, [reload(0, 0, 6)]) == 1.0
    assert overlap([write(0, 1, 1)], [reload(0, 0, 6)]) == 0.0


_INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=12)


@given(_INTERVALS, _INTERVALS)
def test_overlap_is_what_counting_seconds_gives(ones: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    def seconds(spans: list[tuple[int, int]]) -> set[int]:
        return {second for start, length in spans for second in range(start, start + length)}

    mine, theirs = seconds(ones), seconds(others)
    expected = len(mine & theirs) / len(mine) if mine else 0.0
    found = overlap([write(0, s, s + n) for s, n in ones], [reload(0, s, s + n) for s, n in others])
    assert found == pytest.approx(expected)


# --- planned again ------------------------------------------------------------------------------------------------
def test_the_plan_of_what_was_measured() -> None:
    """Means of 1 s and 1.5 s: the first write, then reloads, with every further write hidden behind them."""
    schedule, spans = plan_again(measure(USUAL, buckets_of(3)), buckets_of(3), BUCKET_BYTES)
    assert (schedule.devices, schedule.buckets, schedule.from_host) == (1, 3, True)
    assert max(span.end_seconds for span in spans) == 1.0 + 3 * 1.5
    _, spans = plan_again(measure(USUAL, buckets_of(3)), buckets_of(3), BUCKET_BYTES, Form.SERIAL)
    assert max(span.end_seconds for span in spans) == 3 * 2.5


def test_a_plan_of_nothing() -> None:
    schedule, spans = plan_again(measure(published((), buckets=0, seconds=1.0), ()), (), 0)
    assert (schedule.operations, spans) == ((), ())
    _, spans = plan_again(measure(NOTHING, buckets_of(3)), buckets_of(3), BUCKET_BYTES)
    assert {span.end_seconds for span in spans} == {0.0}
