"""The judge of journals: satisfied with simulated ones, and not with those of planted bugs or tampered lines."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest

from relight.core.protocol import events as ev
from relight.core.protocol.commands import Assign, Command, EndJob, Restore, Resume, Stop
from relight.core.protocol.fault import Action
from relight.sim.judge.journal import check_journal
from relight.sim.model.contents import Violation
from relight.sim.model.schedule import ProcessFault, Schedule, random_schedule
from relight.sim.planted.mutations import find_mutation
from relight.sim.timed.job import SimulatedJob


@dataclass(frozen=True)
class Line:
    now: float
    event: ev.Event | None = None
    command: Command | None = None


def lines_of(job: SimulatedJob) -> Iterator[Line]:
    for entry in job.journal:
        yield Line(entry.now, entry.event)
        for command in entry.commands:
            yield Line(entry.now, command=command)


KILL = Schedule(
    seed=1,
    world_size=3,
    standbys=1,
    faults=(ProcessFault(action=Action.KILL, nth=4, point="BARRIER"),),
)


LATE = Line(99.0, command=Assign(process="w9", rank=0, generation=2, why=""))


@pytest.fixture(scope="module")
def one_kill() -> list[Line]:
    job = SimulatedJob(KILL)
    job.run()
    lines = list(lines_of(job))
    assert check_journal(lines, 3) == ()
    assert any(isinstance(line.command, Resume) for line in lines)
    return lines


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.all)])
def test_simulated_journals_are_in_order(every: int) -> None:
    for seed in range(0, 900, every):
        schedule = random_schedule(seed, flips=seed >= 600)
        job = SimulatedJob(schedule)
        job.run()
        # A bit that flips in what only one rank holds shows nowhere but in what that rank says of it later.
        shows = seed >= 600 and schedule.world_size < 2 * schedule.parts
        wrong = [
            said for said in check_journal(lines_of(job), job.world_size) if not (shows and "has the content" in said)
        ]
        assert wrong == [], f"seed {seed}"


@pytest.mark.parametrize(
    ("name", "invariant"),
    [
        ("generation-twice", "I10"),
        ("before-all-are-paused", "I9"),
        ("copies-over-intact", "I8"),
        ("forward-if-any", "I5"),
        ("always-back", "I7"),
        ("resumes-without-last", "I5"),
        ("old-stopped", "I9"),
    ],
)
def test_planted_bugs_show_in_journals(name: str, invariant: str) -> None:
    mutation = find_mutation(name)
    for seed in range(mutation.within):
        with mutation.planted() as parts:
            job = SimulatedJob(random_schedule(seed), parts)
            try:
                job.run()
            except Violation:
                wrong = check_journal(lines_of(job), job.world_size, ended=False)
                if any(sentence.startswith(f"{invariant}:") for sentence in wrong):
                    return
    pytest.fail(f"{name}: no journal of {mutation.within} shows {invariant}")


def without(lines: list[Line], kind: type) -> list[Line]:
    index = next(i for i, line in enumerate(lines) if isinstance(line.event, kind) or isinstance(line.command, kind))
    return lines[:index] + lines[index + 1 :]


def changed(lines: list[Line], kind: type, **changes: object) -> list[Line]:
    index = next(i for i, line in enumerate(lines) if isinstance(line.command, kind) or isinstance(line.event, kind))
    line = lines[index]
    if line.command is not None:
        line = Line(line.now, command=msgspec.structs.replace(line.command, **changes))
    else:
        line = Line(line.now, event=msgspec.structs.replace(line.event, **changes))  # type: ignore[type-var]
    return [*lines[:index], line, *lines[index + 1 :]]


@pytest.mark.parametrize(
    ("tamper", "expected"),
    [
        (lambda lines: without(lines, ev.Stopped), "I9: it was decided in generation 2 without reports of ranks"),
        (lambda lines: without(lines, ev.Restored), "I5: generation 2 is resumed before every rank is restored"),
        (lambda lines: without(lines, ev.TrainingDone), "I12: the job was ended well before every rank was done"),
        (lambda lines: without(lines, EndJob), "L1: the journal ends in generation 2"),
        (lambda lines: without(lines, Restore), "I9: generation 2 is resumed, and nothing was decided in it"),
        (lambda lines: without(lines, ev.ProcessExited), "I10: rank"),
        (lambda lines: changed(lines, Stop, generation=1), "I10: generation 1 is opened after 1"),
        (lambda lines: changed(lines, Restore, target=0), "I7: back to version 0"),
        (lambda lines: changed(lines, Restore, targets=(0, 1, 2)), "I8: rank"),
        (lambda lines: changed(lines, ev.Restored, state_digest="other"), "I1: version"),
        (lambda lines: changed(lines, Resume, generation=1), "I9: Resume of generation 1 in 2"),
        (lambda lines: [*lines, LATE], "I9: Assign after the end of the job"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(one_kill: list[Line], tamper: object, expected: str) -> None:
    wrong = check_journal(tamper(one_kill), 3)  # type: ignore[operator]
    assert any(sentence.startswith(expected) for sentence in wrong), wrong


def test_a_controller_that_died_before_it_could_write_down_whom_it_gave_a_rank(one_kill: list[Line]) -> None:
    """Its successor gives the rank again, which is the first that the journal has of it."""
    index = max(i for i, line in enumerate(one_kill) if isinstance(line.command, Assign))
    given = one_kill[index].command
    assert isinstance(given, Assign)
    assert given.generation == 2
    again = Line(one_kill[index].now, command=msgspec.structs.replace(given, why="again: the controller was restarted"))
    assert check_journal([*one_kill[:index], again, *one_kill[index + 1 :]], 3) == ()
