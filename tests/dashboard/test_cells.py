"""Cells at any width against a plain count of nanoseconds."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from relight.core.protocol.position import Phase
from relight.dashboard.model.cells import NOTHING, Level
from relight.dashboard.model.row import TILE_CELLS, Row

CODES = [int(phase) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.BARRIER, Phase.OPTIMIZER, Phase.OUTSIDE)]


@given(st.lists(st.tuples(st.sampled_from(CODES), st.integers(1, 400)), min_size=1, max_size=60), st.integers(0, 300))
def test_the_activity_of_a_stretch_is_the_one_that_took_most_of_it(pieces: list[tuple[int, int]], start: int) -> None:
    level = Level(shift=5)
    spent: dict[int, dict[int, int]] = {}
    at = start
    for code, length in pieces:
        level.add(code, at, at + length)
        for ns in range(at, at + length):
            cell = spent.setdefault(ns >> 5, {})
            cell[code] = cell.get(code, 0) + 1
        at += length
    count = (at >> 5) + 3
    cells = level.cells(0, count)
    assert len(cells) == count
    for number, code in enumerate(cells):
        if number not in spent:
            assert code == NOTHING
        else:
            assert spent[number][code] == max(spent[number].values())


@given(st.lists(st.tuples(st.sampled_from(CODES), st.integers(1, 4000)), min_size=1, max_size=80))
def test_levels_above_add_up_the_ones_below(pieces: list[tuple[int, int]]) -> None:
    below, apart = Level(shift=4), Level(shift=8)
    above = below.stack(Level(shift=8))
    at = 0
    for code, length in pieces:
        below.add(code, at, at + length)
        apart.add(code, at, at + length)
        at += length
    closed = (at >> 8) - 1  # the newest stretch of `below` is not in `above` yet
    assert above.cells(0, max(0, closed)) == apart.cells(0, max(0, closed))


def test_memory_is_bounded_and_old_times_are_forgotten() -> None:
    level = Level(shift=4, kept=64)
    for number in range(10_000):
        level.add(CODES[number % 5], number * 16, number * 16 + 16)
    assert len(level._cells) <= 64 + 8
    assert level.since_ns > 9_000 * 16
    assert set(level.cells(0, 100)) == {NOTHING}
    assert NOTHING not in level.cells(10_000 - 60, 59)


def test_a_gap_longer_than_the_memory_is_no_loop() -> None:
    level = Level(shift=4, kept=64)
    level.add(CODES[0], 0, 32)
    level.add(CODES[1], 2**60, 2**61)
    assert level.cells((2**61 >> 4) - 3, 3) == bytes([CODES[1]]) * 3


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(12, 30))
def test_a_tile_shows_each_time_what_went_on_then(seed: int, shift: int) -> None:
    draw = random.Random(seed)
    row, at, changes = Row(kept=10_000), draw.randrange(10**9), []
    for step in range(200):
        for code in CODES:
            row.add("w0", at, 1, step, code, step)
            changes.append((at, code))
            at += draw.randrange(1, 2 << shift)
    tile = draw.randrange((at >> (shift + 8)) + 1)
    cells = row.cells(shift, tile, at)
    assert len(cells) == TILE_CELLS
    for index, code in enumerate(cells):
        begin = (tile * TILE_CELLS + index) << shift
        end = begin + (1 << shift)
        present = {
            what
            for (since, what), (until, _) in zip(changes, [*changes[1:], (at, 0)], strict=True)
            if since < end and begin < until
        }
        assert code in present or (code == NOTHING and not present)


def test_a_row_forgets_exact_changes_but_not_what_went_on() -> None:
    row = Row(kept=100)
    for step in range(2000):
        row.add("w0", step * 10**8, 1, step, CODES[step % 2], step)
    assert len(row._times) <= 125
    end_ns = 2000 * 10**8
    assert NOTHING not in row.cells(29, 0, end_ns)[: (1900 * 10**8) >> 29]
    old = row.cells(24, 0, end_ns)  # finer than what is still known of that time
    assert set(old) <= {*CODES[:2], NOTHING}
    assert NOTHING not in old[:250]
