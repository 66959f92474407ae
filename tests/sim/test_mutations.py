"""Planted bugs: the simulation must find each, and soon; and each has a recorded schedule that still shows it."""

from pathlib import Path

import pytest

from relight.sim.planted.mutations import HUNTED, MUTATIONS, Mutation, find_mutation
from relight.sim.search.golden import format_golden, parse_golden, read_golden, rewritten
from relight.sim.search.shrink import shrink
from relight.sim.timed.job import run_schedule

RECORDED = {path.stem: path for path in sorted((Path(__file__).parent / "regressions").glob("*.txt"))}
SOON = 200  # schedules; what takes longer to find is hunted by `make test-all`


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(m, id=m.name, marks=[pytest.mark.all, pytest.mark.timeout(3600)] if m.within > SOON else [])
        for m in HUNTED
    ],
)
def test_the_simulation_finds(mutation: Mutation) -> None:
    found = mutation.hunt()
    assert found is not None, f"{mutation.name}: not found by {mutation.within} random schedules"
    count, violation = found
    print(f"{mutation.name}: found by schedule {count} of {mutation.within}: {str(violation).partition(chr(10))[0]}")


def test_every_planted_bug_has_a_recorded_schedule() -> None:
    assert {mutation.name for mutation in MUTATIONS} <= {read_golden(path).mutation for path in RECORDED.values()}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_schedule_still_shows_its_bug_and_nothing_else_has_changed(name: str) -> None:
    """If orders have changed on purpose: python -m relight.sim --rewrite tests/sim/regressions/*.txt"""
    text = RECORDED[name].read_text()
    golden = parse_golden(text)
    if golden.mutation:
        violation = find_mutation(golden.mutation).breaks(golden.schedule)
        assert violation is not None, f"{golden.mutation} breaks nothing in this schedule any more: record it anew"
        assert violation.invariant == golden.breaks
    assert format_golden(rewritten(golden)) == text


def test_nothing_stays_planted() -> None:
    golden = read_golden(RECORDED["no-barrier"])
    assert find_mutation("forward-if-any").hunt() is not None
    run_schedule(golden.schedule)


def test_what_fails_is_made_small() -> None:
    mutation = find_mutation("dead-ranks-tag")
    found = mutation.hunt(100)
    assert found is not None
    count, violation = found
    large = mutation.schedule(100 + count - 1)
    small = shrink(large, mutation.breaks)
    again = mutation.breaks(small)
    assert again is not None
    assert again.invariant == violation.invariant
    assert len(small.faults) <= len(large.faults)
    assert (small.world_size, small.until) <= (large.world_size, large.until)
    assert shrink(small, mutation.breaks) == small
