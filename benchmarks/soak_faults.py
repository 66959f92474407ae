"""Faults of the soak, drawn from a seed: what, to whom and in which window of steps. No processes here."""

from __future__ import annotations

import random
from dataclasses import dataclass

from relight.core.protocol.fault import RECOVERY_POINTS, STEP_POINTS, Action, Fault, Point

WINDOW_STEPS = 16  # the job takes so many steps from one fault to the next
PLACE_IN_WINDOW = 6  # where in its window a planned fault strikes
# A recovery and those right after it may together have one fault of their own: some replica is always left.
RECOVERIES_APART = 5

_STEP_ACTIONS = (Action.KILL, Action.SEGFAULT, Action.FREEZE, Action.RAISE, Action.EXIT)
_HANGS = (Action.LOOP, Action.BLOCK)
_HANG_POINTS = (Point.FORWARD, Point.BACKWARD, Point.BEFORE_BARRIER, Point.BARRIER, Point.OPTIMIZER)
_CUT_POINTS = (Point.BACKWARD, Point.BARRIER)
_RECOVERY_ACTIONS = (Action.KILL, Action.KILL, Action.SEGFAULT, Action.FREEZE, Action.EXIT)


@dataclass(frozen=True)
class Item:
    """The fault of one window. `what` names the nemesis's act; a planned fault is carried out by the worker."""

    what: str
    ranks: tuple[int, ...] = ()
    planned: Fault | None = None
    delay_s: float = 0.0  # from the opening of the window, or from the order to stop if it is for a recovery
    wait_for_standby: bool = True


# Share of each act among all windows, in percent. Planned faults are spread over all actions and points above. The
# agent is not killed while a dead rank waits to be replaced: the job's ranks have statistics of BatchNorm of their own,
# and of a rank that died those are in its agent's hands alone (decisions/0004).
SHARES = {
    "planned": 24,
    "planned hang": 3,
    "planned cut": 16,
    "SIGKILL of a worker": 12,
    "SIGSTOP of a worker": 4,
    "SIGABRT of a worker": 2,
    "SIGKILL of two workers": 3,
    "SIGKILL of a standby": 2,
    "SIGSTOP of a standby": 1,
    "SIGKILL of the agent": 5,
    "SIGSTOP of the agent": 2,
    "SIGKILL of the controller": 15,
    "SIGSTOP of the controller": 2,
    "SIGKILL of the controller in a recovery": 7,
    "SIGKILL of controller and agent": 2,
}


def draw_items(seed: int, count: int, ranks: int) -> list[Item]:
    """The windows of a soak, in order; the same for the same seed."""
    draw = random.Random(f"soak {seed}")
    acts = [act for act, share in SHARES.items() for _ in range(max(1, round(share * count / 100)))]
    acts = (acts + ["planned"] * count)[:count]
    draw.shuffle(acts)
    grid = _step_grid(draw)
    return [_item(act, number, ranks, draw, grid) for number, act in enumerate(acts)]


def _step_grid(draw: random.Random) -> list[tuple[Action, Point]]:
    """Every way to fail at every place in a step, in a random order: taken in turn, each comes equally often."""
    grid = [(action, point) for action in _STEP_ACTIONS for point in sorted(STEP_POINTS)]
    draw.shuffle(grid)
    return grid


def _item(act: str, number: int, ranks: int, draw: random.Random, grid: list[tuple[Action, Point]]) -> Item:
    warm = draw.random() < 0.9
    if act.startswith("planned"):
        if act == "planned hang":
            action, point = draw.choice(_HANGS), draw.choice(_HANG_POINTS)
        elif act == "planned cut":
            action, point = Action.CUT, draw.choice(_CUT_POINTS)
        else:
            action, point = grid[number % len(grid)]
        step = number * WINDOW_STEPS + PLACE_IN_WINDOW
        fault = Fault(action=action, point=point, rank=draw.randrange(ranks), step=step)
        return Item("planned", planned=fault, wait_for_standby=warm)
    chosen = tuple(draw.sample(range(ranks), 2 if "two" in act else 1))
    return Item(act, ranks=chosen, delay_s=draw.uniform(0.0, 0.08), wait_for_standby=warm or "two" in act)


def draw_recovery_faults(seed: int, recoveries: int, ranks: int) -> list[Fault]:
    """Faults that strike in recoveries of these numbers, whatever led to them, if the recovery gets to their point."""
    draw = random.Random(f"soak recoveries {seed}")
    points = sorted(RECOVERY_POINTS)
    found = []
    for number in range(2, recoveries, RECOVERIES_APART):
        point = draw.choice(points)
        action = draw.choice(_RECOVERY_ACTIONS)
        anyone = point in (Point.RESTORE_SEND, Point.RESTORE_RECEIVE, Point.PROMOTED)
        found.append(Fault(action=action, point=point, rank=None if anyone else draw.randrange(ranks), recovery=number))
    return found


def name_of(fault: Fault) -> str:
    """The kind that a planned fault is counted as: "kill in BACKWARD", "in a recovery: freeze in REFORM"."""
    where = "in a recovery: " if fault.recovery is not None else ""
    return f"{where}{fault.action.value} in {fault.point.value}"
