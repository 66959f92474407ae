"""Failures that strike in each round of a proof, as a pure function of the seed."""

import random
from collections.abc import Iterator
from itertools import cycle

from relight.core.protocol.fault import Action, Fault, Point

# Every kind of place in a step; what a recovery has to do differs from one to the next.
POINTS = (
    Point.BACKWARD,
    Point.OPTIMIZER,
    Point.FORWARD,
    Point.BARRIER,
    Point.AFTER_WRITE,
    Point.BETWEEN_STEPS,
    Point.BEFORE_BARRIER,
    Point.AFTER_STEP,
)
ACTIONS = (Action.KILL, Action.KILL, Action.FREEZE, Action.KILL)
CUTTABLE = (Point.BARRIER, Point.BACKWARD)  # where a collective can be cut short, and its rank lives
FIRST_STEP = 1
GAPS = (2, 3)  # steps from one failure to the next


def plan_rounds(seed: int, rounds: int, steps: int, world_size: int) -> list[tuple[Fault, ...]]:
    """Return the failures of each round, in the order of their steps; all points occur as early as the steps allow."""
    chance = random.Random(f"relight prove {seed}")
    deck = _dealt(chance)
    return [tuple(_round(chance, deck, steps, world_size)) for _ in range(rounds)]


def _dealt(chance: random.Random) -> Iterator[tuple[Point, Action]]:
    actions = cycle(ACTIONS)
    for number in range(10**6):
        points = list(POINTS)
        chance.shuffle(points)
        for point in points:
            cut = number % 2 == 1 and point in CUTTABLE
            yield point, Action.CUT if cut else next(actions)


def _round(chance: random.Random, deck: Iterator[tuple[Point, Action]], steps: int, world_size: int) -> Iterator[Fault]:
    step = FIRST_STEP
    while step < steps - 1:  # a step remains to be compared after the last recovery
        point, action = next(deck)
        yield Fault(action=action, point=point, rank=chance.randrange(world_size), step=step)
        step += chance.choice(GAPS)
