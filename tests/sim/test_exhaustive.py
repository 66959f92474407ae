"""Every order of events of small jobs, and planted bugs that such a search must find. See `make simulate-nightly`."""

import pytest

from relight.sim.contents import Violation
from relight.sim.exhaustive import Script, Searched, explore, situation
from relight.sim.mutations import find_mutation


def search(ranks: int, faults: int, kinds: tuple[str, ...] = ("kill",), *, fine: bool = False) -> Searched:
    found = explore(situation(ranks, 2, faults, kinds, fine=fine))
    assert found.complete
    assert not found.violation, (found.violation, found.script)
    return found


def test_a_job_without_faults_ends_well_in_every_order() -> None:
    assert set(search(3, 0).ends) == {"finished"}
    assert set(search(2, 0, fine=True).ends) == {"finished"}


def test_one_death_anywhere() -> None:
    found = search(3, 1)
    assert "finished" in found.ends
    assert not any("replica" in end for end in found.ends)


def test_one_fault_of_any_kind_anywhere() -> None:
    found = search(2, 1, ("kill", "freeze", "cut"))
    assert "finished" in found.ends


def test_two_deaths_of_two_ranks_may_lose_everything_and_nothing_else() -> None:
    found = search(2, 2)
    assert "every replica lost" in found.ends


def test_the_search_is_the_same_every_time() -> None:
    first, second = search(2, 1), search(2, 1)
    assert (first.situations, first.steps, first.ends) == (second.situations, second.steps, second.ends)


@pytest.mark.all
def test_one_death_anywhere_with_all_that_can_be_told_apart() -> None:
    search(2, 2, fine=True)


@pytest.mark.all
@pytest.mark.timeout(3600)
def test_two_deaths_of_three_ranks() -> None:
    assert search(3, 2).situations > 100_000


@pytest.mark.parametrize(
    "name",
    [
        "forward-if-any",
        "always-back",
        "prepared-not-asked",
        "copies-over-intact",
        "before-all-stand-still",
        "no-barrier",
        "published-before-all-hold-it",
        "preparation-forgotten",
    ],
)
def test_planted_bugs_are_found(name: str) -> None:
    with find_mutation(name).planted() as parts:
        found = explore(situation(3, 2, 1, ("kill",), parts))
        assert found.violation, f"{name} breaks nothing in {found.situations} situations"
        script = Script(ranks=3, steps=2, faults=1, kinds=("kill",), choices=found.script)
        with pytest.raises(Violation, match=found.violation.partition(":")[0]):
            script.follow(parts)
    assert "command Begin" not in script.follow()  # without the bug the same choices are possible, and all is well
