"""A simulated job's schedule: its size, its pace and its faults, all drawn from one seed. A value; it runs nothing."""

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from relight.core.fault import Action

# Where a simulated worker can be struck: the labels of its waits, in the order in which it meets them.
STEP_POINTS = (
    "OUTSIDE",  # between two steps
    "FORWARD",
    "GRADIENT",  # in the gradient's all-reduce
    "PREPARE",  # writing the private state of the next version
    "READY",  # prepared, barrier not entered
    "BARRIER",
    "VERDICT",  # a collective broke, and nobody has said why yet
    "OPTIMIZER",
    "AFTER_WRITE",
    "AFTER_STEP",
    "DONE",  # last step committed, waiting for the others
)
RECOVERY_POINTS = (
    "STOP",  # about to report where it stands
    "PARKED",  # waiting for the decision
    "FINISH",  # about to finish a step by itself
    "COPY",  # waiting for the source's state, or receiving it
    "TAKE_OVER",  # copied, not yet claimed
    "ROLLBACK",
    "REFORM",
    "RESTORED",  # restored, waiting for Resume; a source may still be serving
    "RESUME",
    "PROMOTED",
)
OTHER_POINTS = (
    "START",  # running the script up to the first step
    "WARMUP",
    "IDLE",
    "RELEASED",  # running to the end of the script
)
ACTIONS = (Action.KILL, Action.FREEZE, Action.RAISE, Action.EXIT, Action.LOOP, Action.CUT)


class PlannedFault(msgspec.Struct, frozen=True, kw_only=True):
    """Strikes when the `nth` process comes to `point`, or, without a point, when `nth` things have happened."""

    action: Action
    nth: int
    point: str = ""
    pick: int = 0  # without a point: which of the live processes, counted round
    thaw_seconds: float = 0.0  # a frozen process wakes up again after so long; 0: never
    holds_lock: bool = False  # a looping process keeps the interpreter's lock, so that its other threads stop too


class ControllerDeath(msgspec.Struct, frozen=True, kw_only=True):
    """The controller dies once its journal has so many entries, with so many orders of the last one sent."""

    entries: int
    sent: int
    away_seconds: float
    repeated: int  # newest entries that agents report once more, since nobody confirmed them


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run depends on. `seed` decides delays and what a broken collective loses."""

    seed: int
    world_size: int
    standbys: int = 0
    until: int = 3
    faults: tuple[PlannedFault, ...] = ()
    slow_messages: float = 0.0  # part of the messages that take up to a second
    agent_restarts: tuple[int, ...] = ()  # after so many events every worker repeats its last report
    seen_dying: float = 0.0  # part of the deaths that are seen before the process's memory is freed
    controller_deaths: tuple[ControllerDeath, ...] = ()
    stalls: tuple[int, ...] = ()  # after so many events the detector holds the network to be stuck, for no reason

    def describe(self) -> str:
        """On one line, for a failing test; `decode_schedule` reads it back."""
        return msgspec.json.encode(self).decode()


class Regression(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule that once broke something, as kept in `regressions/`."""

    what: str
    planted: str  # the variant in test_planted_bugs.py that brings the bug back
    schedule: Schedule


def decode_schedule(text: str | bytes) -> Schedule:
    """The inverse of `Schedule.describe`."""
    return msgspec.json.decode(text, type=Schedule)


def recorded_regressions() -> dict[str, Regression]:
    """By name, in order."""
    paths = sorted((Path(__file__).parent / "regressions").glob("*.json"))
    return {path.stem: msgspec.json.decode(path.read_bytes(), type=Regression) for path in paths}


def random_schedule(
    seed: int, *, faults: int | None = None, actions: Sequence[Action] = (), points: Sequence[str] = ()
) -> Schedule:
    """Swarm style: which kinds of fault occur at all, how many, where and how close together differs by seed."""
    draw = random.Random(f"schedule {seed}")
    allowed = list(actions) or [action for action in ACTIONS if draw.random() < 0.5] or [Action.KILL]
    count = draw.choice((0, 1, 1, 2, 2, 2, 3, 3, 4, 4)) if faults is None else faults
    shape = Schedule(
        seed=seed,
        world_size=draw.choice((2, 2, 3, 3, 4, 5)),
        standbys=draw.randint(0, 3),
        until=draw.randint(2, 4),
        slow_messages=draw.choice((0.0, 0.0, 0.05, 0.2)),
        agent_restarts=tuple(draw.randint(20, 200) for _ in range(draw.choice((0, 0, 0, 1, 2)))),
        seen_dying=draw.choice((0.0, 0.5, 1.0)),
        stalls=tuple(draw.randint(20, 200) for _ in range(count and draw.choice((0, 0, 0, 0, 1)))),
    )
    planned: list[PlannedFault] = []
    for _ in range(count):
        if planned and draw.random() < 0.35:
            planned.append(_soon_after(draw, planned[-1], draw.choice(allowed)))
        else:
            places = points or ((*STEP_POINTS, *RECOVERY_POINTS) if planned else (*STEP_POINTS, *OTHER_POINTS))
            planned.append(_random_fault(draw, draw.choice(allowed), places, shape))
    return msgspec.structs.replace(shape, faults=tuple(planned))


def with_controller_deaths(schedule: Schedule, count: int) -> Schedule:
    """The same schedule, in which the controller dies too."""
    draw = random.Random(f"controller {schedule.seed}")
    deaths = tuple(
        ControllerDeath(
            entries=draw.randint(1, 10 + 8 * schedule.world_size),
            sent=draw.randint(0, 4),
            away_seconds=draw.choice((0.0, 0.2, 0.2, 5.0)),
            repeated=draw.randint(0, 3),
        )
        for _ in range(count)
    )
    return msgspec.structs.replace(schedule, controller_deaths=deaths)


def _random_fault(draw: random.Random, action: Action, places: Sequence[str], shape: Schedule) -> PlannedFault:
    thaw = draw.choice((0.0, 0.0, 0.5, 1.5)) if action is Action.FREEZE else 0.0
    if draw.random() < 0.7:
        point = draw.choice(places)
        steps = shape.until if point in STEP_POINTS and point != "DONE" else 1
        nth = draw.randint(1, shape.world_size * steps)
        return PlannedFault(action=action, point=point, nth=nth, thaw_seconds=thaw, holds_lock=draw.random() < 0.5)
    nth = draw.randint(1, 40 + 20 * shape.world_size * shape.until)
    return PlannedFault(
        action=action, nth=nth, pick=draw.randint(0, 9), thaw_seconds=thaw, holds_lock=draw.random() < 0.5
    )


def _soon_after(draw: random.Random, fault: PlannedFault, action: Action) -> PlannedFault:
    """Close to the one before, where recoveries are at their most fragile."""
    near = draw.randint(1, 2) if fault.point else draw.randint(0, 25)
    return msgspec.structs.replace(fault, action=action, nth=fault.nth + near, pick=draw.randint(0, 9))
