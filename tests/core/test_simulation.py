"""Thousands of jobs in virtual time: the production controller, and everything around it that can go wrong.

A failing test prints its schedule; `tests/core/regressions/` keeps those that once failed. To look at one:

    PYTHONPATH=src:. python -m tests.core.test_simulation SEED        (or the schedule that a failing test printed)
"""

import sys
from collections import Counter

import pytest

from relight.core.commands import Begin, Release, Restore, Resume, Stop
from relight.core.events import ControllerRestarted
from relight.core.fault import Action
from tests.core.simulated_clock import Violation
from tests.core.simulated_job import SimulatedJob
from tests.core.simulated_schedule import (
    ACTIONS,
    OTHER_POINTS,
    RECOVERY_POINTS,
    STEP_POINTS,
    PlannedFault,
    Schedule,
    decode_schedule,
    random_schedule,
    recorded_regressions,
    with_controller_deaths,
)

BLOCK = 250
REGRESSIONS = recorded_regressions()


def run(schedule: Schedule, name: object) -> SimulatedJob:
    job = SimulatedJob(schedule)
    try:
        job.run()
    except Violation as violation:
        pytest.fail(f"{name}: {violation}", pytrace=False)
    return job


def run_block(first: int, count: int, **limits: object) -> None:
    for seed in range(first, first + count):
        run(random_schedule(seed, **limits), f"seed {seed}")  # type: ignore[arg-type]


@pytest.mark.parametrize("first", range(0, 12 * BLOCK, BLOCK))
def test_random_schedules(first: int) -> None:
    run_block(first, BLOCK)


@pytest.mark.parametrize("action", ACTIONS)
def test_one_kind_of_fault_again_and_again(action: Action) -> None:
    run_block(1_000_000, BLOCK, actions=(action,), faults=3)


def test_faults_during_recoveries() -> None:
    run_block(2_000_000, 2 * BLOCK, points=("BARRIER", *RECOVERY_POINTS), faults=4)


def run_with_controller_deaths(first: int, count: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        job = run(with_controller_deaths(random_schedule(seed), 1 + seed % 3), f"controller, seed {seed}")
        report = job.controller.report()
        seen["restarts"] += report.controller_restarts
        seen["finished"] += not report.error
        seen["recoveries"] += len(report.recoveries)
        stages = [entry.commands for entry in job.journal if isinstance(entry.event, ControllerRestarted)]
        seen["in a recovery"] += sum(any(isinstance(c, Stop) for c in commands) for commands in stages)
        seen["in training"] += sum(any(isinstance(c, Resume) for c in commands) for commands in stages)
        seen["at the start"] += sum(not any(isinstance(c, Begin) for c in commands) for commands in stages)
        seen["at the end"] += sum(any(isinstance(c, Release) for c in commands) for commands in stages)
    return seen


@pytest.mark.parametrize("first", range(5_000_000, 5_000_000 + 6 * BLOCK, BLOCK))
def test_the_controller_dies_too(first: int) -> None:
    seen = run_with_controller_deaths(first, BLOCK)
    floor = {
        "restarts": 200,
        "finished": 150,
        "recoveries": 150,
        "in a recovery": 30,
        "in training": 50,
        "at the start": 20,
        "at the end": 1,
    }
    assert not {what: (seen[what], least) for what, least in floor.items() if seen[what] < least}


@pytest.mark.all
@pytest.mark.parametrize("first", range(6_000_000, 6_000_000 + 100 * BLOCK, BLOCK))
def test_the_controller_dies_in_many_more_schedules(first: int) -> None:
    run_with_controller_deaths(first, BLOCK)


def test_a_controller_that_dies_while_nothing_happens_changes_nothing() -> None:
    for seed in range(100):
        plain = random_schedule(seed, faults=0)
        job = run(with_controller_deaths(plain, 3), f"seed {seed}")
        assert job.controller.generation == 1
        assert job.end is not None
        assert not job.end.error


@pytest.mark.all
@pytest.mark.parametrize("first", range(3_000_000, 3_000_000 + 200 * BLOCK, BLOCK))
def test_many_more_random_schedules(first: int) -> None:
    run_block(first, BLOCK)


@pytest.mark.parametrize("action", ACTIONS)
def test_every_fault_at_every_point(action: Action) -> None:
    struck = 0
    for point in (*STEP_POINTS, *OTHER_POINTS):
        for nth in (1, 5, 6):
            fault = PlannedFault(action=action, point=point, nth=nth, holds_lock=nth == 5)
            schedule = Schedule(seed=nth, world_size=3, standbys=1, faults=(fault,))
            struck += run(schedule, f"{action} in {point}").struck
    assert struck > 25


@pytest.mark.parametrize("second", [Action.KILL, Action.FREEZE, Action.LOOP])
def test_a_second_fault_at_every_point_of_a_recovery(second: Action) -> None:
    struck = 0
    for first in ("FORWARD", "GRADIENT", "READY", "BARRIER", "OPTIMIZER", "AFTER_STEP"):
        for point in (*RECOVERY_POINTS, "VERDICT"):
            for nth in (1, 2, 3):
                faults = (
                    PlannedFault(action=Action.KILL, point=first, nth=nth + 3),
                    PlannedFault(action=second, point=point, nth=nth, holds_lock=nth == 1),
                )
                schedule = Schedule(seed=nth, world_size=3, standbys=nth - 1, faults=faults, seen_dying=0.5)
                struck += run(schedule, f"kill in {first}, {second} in {point}").struck
    assert struck > 300


@pytest.mark.parametrize("name", REGRESSIONS)
def test_what_once_failed(name: str) -> None:
    run(REGRESSIONS[name].schedule, f"{name}: {REGRESSIONS[name].what}")


def test_a_run_without_faults_needs_one_generation() -> None:
    for seed in range(50):
        job = run(random_schedule(seed, faults=0), f"seed {seed}")
        assert job.controller.generation == 1
        assert job.end is not None
        assert not job.end.error


def test_the_same_schedule_gives_the_same_run() -> None:
    for seed in range(20):
        first, second = (run(random_schedule(seed), f"seed {seed}") for _ in range(2))
        assert first.journal == second.journal


def test_the_schedules_reach_what_matters() -> None:
    """A simulation that never gets into trouble proves nothing."""
    seen: Counter[str] = Counter()
    for seed in range(600):
        job = run(random_schedule(seed), f"seed {seed}")
        report = job.controller.report()
        seen["recovery"] += len(report.recoveries)
        seen["failure during a recovery"] += sum(r.restarts for r in report.recoveries)
        seen["fresh process"] += sum("fresh" in r.replacement_kind for r in report.recoveries)
        seen["no replacement"] += sum(r.replacement_kind == "none" for r in report.recoveries)
        seen["lost"] += "every replica" in report.error
        seen["finished"] += not report.error
        for entry in job.journal:
            seen["expired"] += entry.event is None
            for command in entry.commands:
                if isinstance(command, Restore):
                    seen[command.why.partition(" ")[0]] += 1
                    seen["split"] += "and the others" in command.why
                    seen["died unprepared"] += "died before it entered" in command.why
                    seen["several targets"] += len(command.targets) > 1
    floor = {
        "recovery": 400,
        "failure during a recovery": 60,
        "fresh process": 60,
        "no replacement": 20,
        "lost": 5,
        "finished": 400,
        "expired": 50,
        "forward": 30,
        "back": 300,
        "as": 30,
        "split": 5,
        "died unprepared": 3,
        "several targets": 20,
    }
    assert not {what: (seen[what], least) for what, least in floor.items() if seen[what] < least}


def main(argument: str) -> None:
    """Show one run."""
    schedule = random_schedule(int(argument)) if argument.isdigit() else decode_schedule(argument)
    job = SimulatedJob(schedule)
    try:
        job.run()
    except Violation as violation:
        print(violation)
    else:
        print(job.explain())


if __name__ == "__main__":
    main(sys.argv[1])
