"""Every order of events of small jobs, and planted bugs that such a search must find. See `make simulate-nightly`."""

import inspect
import re

import msgspec
import pytest

from relight.core.recovery.attempt import RecoveryAttempt
from relight.sim.model.contents import Violation
from relight.sim.model.shapes import ONE_WRITE, Pattern
from relight.sim.model.worker.worker import SimulatedWorker
from relight.sim.planted.mutations import MUTATIONS, find_mutation
from relight.sim.search import sameness
from relight.sim.search.copies import parts_of
from relight.sim.search.exhaustive import Script, Searched, explore, situation
from relight.sim.search.left_out import LEFT_OUT
from relight.sim.timed.job import PRODUCTION, Parts


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
@pytest.mark.timeout(3600)
def test_one_death_anywhere_with_all_that_can_be_told_apart() -> None:
    search(2, 2, fine=True)


@pytest.mark.all
@pytest.mark.timeout(3600)
def test_two_deaths_of_three_ranks() -> None:
    assert search(3, 2).situations > 40_000


@pytest.mark.all
@pytest.mark.timeout(3600)
def test_two_deaths_of_four_ranks() -> None:
    assert search(4, 2).situations > 200_000


# --- situations that differ in names only are followed once -------------------------------------------------------
ALL_KINDS = ("kill", "freeze", "cut")


def check_renaming_changes_nothing(
    ranks: int, faults: int, kinds: tuple[str, ...], *, fine: bool = False, pattern: Pattern = ONE_WRITE
) -> None:
    """Follow situations apart that differ in names: those with one key must lead to situations with the same keys."""
    start = situation(ranks, 2, faults, kinds, fine=fine, pattern=pattern)
    seen, stack = {start.exact_key()}, [start]
    follow: dict[int, frozenset[int]] = {}
    while stack:
        here = stack.pop()
        if here.end is not None:
            continue
        keys = set()
        for choice in here.choices():
            there = here.copy()
            there.happen(choice)
            keys.add(0 if there.end is not None else there.key())
            exact = there.exact_key()
            if exact not in seen:
                seen.add(exact)
                stack.append(there)
        assert follow.setdefault(here.key(), frozenset(keys)) == frozenset(keys)
    reduced = explore(situation(ranks, 2, faults, kinds, fine=fine, pattern=pattern))
    assert set(follow) == reduced.keys
    assert len(follow) < 0.7 * len(seen)


def test_renaming_changes_nothing() -> None:
    check_renaming_changes_nothing(2, 1, ALL_KINDS)


@pytest.mark.all
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("ranks", "faults", "kinds", "fine"),
    [
        (3, 1, ("kill",), False),
        (2, 2, ALL_KINDS, False),
        (3, 1, ALL_KINDS, False),
        (4, 1, ("kill",), False),
        (2, 1, ("kill",), True),
    ],
)
def test_renaming_changes_nothing_in_larger_jobs(ranks: int, faults: int, kinds: tuple[str, ...], fine: bool) -> None:
    check_renaming_changes_nothing(ranks, faults, kinds, fine=fine)


def ends(ranks: int, faults: int, parts: Parts = PRODUCTION, *, exact: bool) -> set[str]:
    """In which ways jobs end, where all ranks but 0 are called alike; or that an invariant breaks."""
    found = explore(situation(ranks, 2, faults, ("kill",), parts), exact=exact)
    if found.violation:
        return {"an invariant breaks"}
    assert found.complete
    texts = set(found.ends)
    for rank in range(1, ranks):
        texts = {text.replace(f"rank {rank} ", "another rank ") for text in texts}
    return texts


def test_nothing_that_somebody_remembers_is_forgotten_in_the_keys() -> None:
    """A new field of a controller or a worker needs a description of its meaning for the search."""
    here = situation(2, 2, 1, ("kill",))
    worker = here.workers["w0"]
    parts = parts_of(here.controller)
    remembered = {
        **{type(part).__name__: {name for name, v in vars(part).items() if v not in parts} for part in parts},
        "RecoveryAttempt": set(RecoveryAttempt.__slots__),
        "Members": set(vars(here.controller.members)),
        "Process": set(vars(here.controller.members.processes["w0"])),
        "SimulatedAgent": set(type(here.agents["node-0"]).__slots__),
        "Host": set(vars(here.agents["node-0"].decisions)),
        "SimulatedWorker": set(SimulatedWorker.__slots__),
        "Worker": set(vars(worker.machine)),
        "Page": set(type(worker.page).__slots__),
    }
    words = set(re.findall(r"[a-z_0-9]+", inspect.getsource(sameness).partition("@lru_cache")[2]))
    for kind, names in remembered.items():
        left_out = set(LEFT_OUT.get(kind, ()))
        assert left_out <= names, f"{kind} has no {sorted(left_out - names)} any more"
        assert names - left_out <= words, f"{kind}: {sorted(names - left_out - words)} are not in the keys"


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=[pytest.mark.all, pytest.mark.timeout(3600)])])
def test_jobs_end_in_the_same_ways_whether_names_are_told_apart_or_not(ranks: int) -> None:
    assert ends(ranks, 1, exact=False) == ends(ranks, 1, exact=True)


@pytest.mark.all
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [mutation.name for mutation in MUTATIONS])
def test_the_same_planted_bugs_are_found_whether_names_are_told_apart_or_not(name: str) -> None:
    for ranks, faults in ((2, 1), (2, 2), (3, 1)):
        with find_mutation(name).planted() as parts:
            assert ends(ranks, faults, parts, exact=False) == ends(ranks, faults, parts, exact=True)


@pytest.mark.parametrize(
    "name",
    [
        "forward-if-any",
        "always-back",
        "prepared-not-asked",
        "copies-over-intact",
        "before-all-are-paused",
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


def test_copies_of_a_situation_share_nothing_that_changes() -> None:
    """Or what happens in one of them would happen in the other."""
    here = situation(2, 2, 1, ("kill",))
    there = here.copy()
    there._own_controller()
    for mine, other in zip(parts_of(here.controller), parts_of(there.controller), strict=True):
        assert mine is not other
        for name, value in vars(mine).items():
            if value is getattr(other, name) and name not in LEFT_OUT.get(type(mine).__name__, ()):
                assert isinstance(value, bool | int | float | str | tuple | frozenset | None | msgspec.Struct), name
