"""Steps of several writes, and steps with their barrier at the end: undone, finished or torn, and never half of it."""

from collections import Counter

import pytest

from relight.core.protocol.commands import Restore
from relight.core.protocol.events import RestoreFailed, Stopped
from relight.core.protocol.fault import Action
from relight.sim.model.contents import Violation, reference
from relight.sim.model.schedule import ProcessFault, Schedule, schedule_of
from relight.sim.model.shapes import SHAPES, pattern_of
from relight.sim.model.worker.points import AGREE_POINTS, RECOVERY_POINTS, SHAPE_POINTS, SHARE_POINTS
from relight.sim.planted.mutations import find_mutation
from relight.sim.search.exhaustive import Script, Searched, explore, situation
from relight.sim.search.swarm import search
from relight.sim.timed.job import SimulatedJob
from tests.sim.test_exhaustive import check_renaming_changes_nothing

SEVERAL = tuple(name for name in SHAPES if name != "one")
ALWAYS = ("two-early", "two-end")  # the barrier before the last write, and at the end


def run(schedule: Schedule) -> SimulatedJob:
    job = SimulatedJob(schedule)
    try:
        job.run()
    except Violation as violation:
        pytest.fail(str(violation), pytrace=False)
    return job


def search_all(ranks: int, faults: int, *shapes: str, relearns: bool = False, fine: bool = False) -> Searched:
    found = explore(situation(ranks, 2, faults, ("kill",), fine=fine, pattern=pattern_of(shapes, relearns=relearns)))
    assert found.complete
    assert not found.violation, (found.violation, found.script)
    return found


def search_learning(ranks: int, steps: int, faults: int, *shapes: str) -> Searched:
    found = explore(situation(ranks, steps, faults, ("kill",), pattern=pattern_of(shapes, learns=True)))
    assert found.complete
    assert not found.violation, (found.violation, found.script)
    return found


# --- what is computed -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("one", "other"),
    [("one", "one-end"), ("two-early", "two-end"), ("late-private", "surprise"), ("two-end", "unexpected")],
)
def test_where_the_barrier_stands_changes_no_bit(one: str, other: str) -> None:
    assert reference(3, 4, pattern_of((one,))) == reference(3, 4, pattern_of((other,)))


def test_what_a_step_consists_of_does() -> None:
    contents = {reference(3, 1, pattern_of((name,))).states[1].content for name in ("one", "two-end")}
    assert len(contents) == 2
    private = {reference(3, 1, pattern_of((name,))).privates[1] for name in ("two-end", "late-private")}
    assert len(private) == 2


def test_a_schedule_that_says_nothing_has_steps_of_one_write() -> None:
    job = run(Schedule(seed=0, world_size=2))
    assert job.pattern == pattern_of(("one",))


# --- random schedules -----------------------------------------------------------------------------------------------
def test_random_schedules() -> None:
    found = search(11_000_000, 500, kinds=("writes",))
    assert found.schedules == 500
    assert not found.violations


@pytest.mark.all
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "kinds",
    [
        ("writes",),
        ("writes", "fallback"),
        ("writes", "hosts"),
        ("writes", "flips"),
        ("writes", "hosts", "fallback", "flips"),
    ],
    ids="+".join,
)
def test_many_more_random_schedules(kinds: tuple[str, ...]) -> None:
    found = search(12_000_000, 20_000, kinds=kinds)
    assert found.schedules == 20_000
    assert not found.violations


def test_the_schedules_reach_what_matters() -> None:
    """A simulation that undoes nothing, or that is never torn, proves nothing."""
    seen: Counter[str] = Counter()
    for seed in range(13_000_000, 13_000_500):
        job = run(schedule_of(seed, ("writes",)))
        error = job.controller.report().error
        seen["finished"] += not error
        seen["relearns"] += job.pattern.relearns
        seen["a surprise, and every copy is lost"] += "no intact replica" in error and job.pattern.has_surprises
        for entry in job.journal:
            match entry.event:
                case Stopped(torn=True):
                    seen["torn"] += 1
                case RestoreFailed(evidence=evidence) if "is at version" in evidence:
                    seen["could not finish by itself"] += 1
            for command in entry.commands:
                if isinstance(command, Restore):
                    seen[command.why.partition(" ")[0]] += 1
    floor = {
        "finished": 250,
        "relearns": 120,
        "torn": 20,
        "could not finish by itself": 3,
        "a surprise, and every copy is lost": 3,
        "forward": 40,
        "back": 200,
    }
    assert not {what: (seen[what], least) for what, least in floor.items() if seen[what] < least}


@pytest.mark.parametrize("action", [Action.KILL, Action.CUT, Action.FREEZE, Action.RAISE])
def test_a_fault_at_every_point_of_a_step(action: Action) -> None:
    struck = 0
    for name in SEVERAL:
        for point in (*SHAPE_POINTS, *SHARE_POINTS, *AGREE_POINTS, "READY", "BARRIER", "OPTIMIZER", "AFTER_WRITE"):
            for nth in (1, 5, 6):
                faults = (ProcessFault(action=action, point=point, nth=nth),)
                struck += run(Schedule(seed=nth, world_size=3, standbys=1, faults=faults, shapes=(name,))).faults.struck
    assert struck > 50


def test_a_second_fault_in_the_recovery_of_a_step_that_is_undone_or_finished() -> None:
    struck = 0
    for name in SEVERAL:
        for first in ("FIRST_WRITE", "SECOND", "LAST_WRITE", "READY", "BARRIER", "EXTRA", "EXTRA_WRITE"):
            for point in RECOVERY_POINTS:
                faults = (
                    ProcessFault(action=Action.KILL, point=first, nth=5),
                    ProcessFault(action=Action.KILL, point=point, nth=2),
                )
                schedule = Schedule(seed=1, world_size=3, standbys=2, faults=faults, shapes=(name,), relearns=True)
                struck += run(schedule).faults.struck
    assert struck > 200


# --- every order of events ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.all) for name in SEVERAL]
)
def test_one_death_anywhere(name: str) -> None:
    found = search_all(3, 1, name)
    assert "finished" in found.ends
    assert ("every replica lost" in found.ends) is SHAPES[name].needs_others_late


@pytest.mark.all
@pytest.mark.parametrize("shapes", [("late-private", "two-early"), ("two-end", "surprise")], ids="+".join)
def test_one_death_where_all_learn_again_after_it(shapes: tuple[str, str]) -> None:
    assert "finished" in search_all(3, 1, *shapes, relearns=True).ends


@pytest.mark.parametrize(
    ("steps", "shapes", "is_ever_lost"),
    [(5, ("one", "two-end"), True), (4, ("two-end", "one"), False), (4, ("two-end",), False)],
    ids=("a surprise once", "seen in time", "always alike"),
)
def test_one_death_where_ranks_learn(steps: int, shapes: tuple[str, ...], is_ever_lost: bool) -> None:
    """The number of writes changes from step to step: at most the first difference is a surprise."""
    found = search_learning(2, steps, 1, *shapes)
    assert "finished" in found.ends
    assert ("every replica lost" in found.ends) is is_ever_lost


@pytest.mark.all
@pytest.mark.timeout(3600)
def test_two_deaths_where_ranks_learn() -> None:
    search_learning(2, 5, 2, "one", "two-end")


@pytest.mark.all
@pytest.mark.timeout(3600)
def test_three_ranks_that_learn() -> None:
    search_learning(3, 5, 1, "one", "two-end")


@pytest.mark.all
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SEVERAL)
def test_one_death_with_all_that_can_be_told_apart(name: str) -> None:
    search_all(3, 1, name, fine=True)


@pytest.mark.all
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("ranks", "least"), [(3, 50_000), (4, 200_000)])
def test_two_deaths(ranks: int, least: int) -> None:
    assert search_all(ranks, 2, "late-private", "two-early").situations > least


@pytest.mark.parametrize(
    ("shapes", "relearns"), [(("late-private", "two-early"), False), (("two-early", "surprise"), True)]
)
def test_renaming_changes_nothing(shapes: tuple[str, ...], relearns: bool) -> None:
    check_renaming_changes_nothing(2, 1, ("kill",), pattern=pattern_of(shapes, relearns=relearns))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("first-write-absorbed", "two-early"),
        ("prepared-keep-their-writes", "two-end"),
        ("rolled-back-before-decision", "two-end"),
        ("finished-by-writing-again", "two-end"),
        ("offered-before-rolled-back", "two-end"),
        ("private-before-last-write", "late-private"),
        ("barrier-before-first-write", "two-early"),
        ("surprise-is-intact", "surprise"),
        ("private-of-a-surprise", "surprise"),
        ("surprise-not-doubted", "late-change"),
        ("doubted-at-commit-only", "surprise"),
        ("every-surprise-doubted", "late-change"),
        ("agreed-after-barrier", "new-buffer"),
        ("prepared-while-agreeing", "new-buffer"),
        ("prepared-while-agreeing", "new-buffers"),
    ],
)
def test_planted_bugs_are_found(name: str, shape: str) -> None:
    pattern = pattern_of((shape,))
    with find_mutation(name).planted() as parts:
        found = explore(situation(3, 2, 1, ("kill",), parts, pattern=pattern))
        assert found.violation, f"{name} breaks nothing in {found.situations} situations"
        script = Script(ranks=3, steps=2, faults=1, kinds=("kill",), choices=found.script, shapes=(shape,))
        with pytest.raises(Violation, match=found.violation.partition(":")[0]):
            script.follow(parts)


@pytest.mark.parametrize("name", ["believed-again", "difference-forgotten", "difference-not-told"])
def test_planted_bugs_of_learning_are_found(name: str) -> None:
    pattern = pattern_of(("one", "two-end"), learns=True)
    with find_mutation(name).planted() as parts:
        found = explore(situation(2, 6, 1, ("kill",), parts, pattern=pattern))
        assert found.violation, f"{name} breaks nothing in {found.situations} situations"
        script = Script(
            ranks=2, steps=6, faults=1, kinds=("kill",), choices=found.script, shapes=("one", "two-end"), learns=True
        )
        with pytest.raises(Violation, match=found.violation.partition(":")[0]):
            script.follow(parts)
