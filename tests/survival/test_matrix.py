"""Six ways to fail, seven places in a step, three ranks: each alone, compared bit for bit with an undisturbed job.

A subset in which every way, place and rank occurs runs always, several faults to a job; the full product is marked
`all`.
"""

import itertools

import pytest

from relight.chaos.plan import describe_fault
from relight.core.protocol.fault import Action, Fault, Point
from tests.survival.harness import Bench, Training
from tests.survival.judge import check_faults, check_survived

ACTIONS = (Action.KILL, Action.SEGFAULT, Action.FREEZE, Action.RAISE, Action.EXIT, Action.LOOP)
POINTS = (
    Point.FORWARD,
    Point.BACKWARD,
    Point.BEFORE_BARRIER,
    Point.BARRIER,
    Point.OPTIMIZER,
    Point.AFTER_STEP,
    Point.BETWEEN_STEPS,
)
RANKS = (0, 1, 2)
STEP = 3

# One job for each line. Rows of the full matrix are chosen so that every pair of way and place that is special
# in the code occurs: see `test_the_short_matrix_covers_every_row_and_column`.
SHORT: tuple[tuple[tuple[Action, Point, int], ...], ...] = (
    (
        (Action.KILL, Point.FORWARD, 0),
        (Action.SEGFAULT, Point.BACKWARD, 1),
        (Action.EXIT, Point.BEFORE_BARRIER, 2),
        (Action.RAISE, Point.BARRIER, 1),
    ),
    (
        (Action.FREEZE, Point.OPTIMIZER, 0),
        (Action.KILL, Point.AFTER_STEP, 2),
        (Action.EXIT, Point.BETWEEN_STEPS, 1),
        (Action.SEGFAULT, Point.OPTIMIZER, 2),
    ),
    (
        (Action.LOOP, Point.FORWARD, 2),
        (Action.KILL, Point.BARRIER, 0),
        (Action.RAISE, Point.AFTER_STEP, 0),
        (Action.FREEZE, Point.BEFORE_BARRIER, 1),
    ),
    (
        (Action.RAISE, Point.BACKWARD, 2),
        (Action.LOOP, Point.OPTIMIZER, 1),
        (Action.FREEZE, Point.BETWEEN_STEPS, 0),
        (Action.KILL, Point.OPTIMIZER, 1),
    ),
)


@pytest.mark.parametrize(
    "cases",
    [*SHORT[:-1], pytest.param(SHORT[-1], marks=pytest.mark.all)],
    ids=lambda cases: "-".join(f"{action}_{point}" for action, point, _ in cases),
)
def test_faults_in_a_row(bench: Bench, cases: tuple[tuple[Action, Point, int], ...]) -> None:
    training = Training(steps=3 + 2 * len(cases))
    faults = [
        describe_fault(Fault(action=action, point=point, rank=rank, step=STEP + 2 * index))
        for index, (action, point, rank) in enumerate(cases)
    ]
    outcome = bench.run(training, faults=faults, standbys=2)
    check_survived(outcome, bench.reference(training))
    check_faults(outcome, faults)


@pytest.mark.all
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("action", ACTIONS)
def test_one_fault(bench: Bench, action: Action, point: Point, rank: int) -> None:
    training = Training(steps=7)
    fault = describe_fault(Fault(action=action, point=point, rank=rank, step=STEP))
    outcome = bench.run(training, faults=[fault])
    check_survived(outcome, bench.reference(training))
    check_faults(outcome, [fault])


def test_the_short_matrix_covers_every_row_and_column() -> None:
    cases = list(itertools.chain.from_iterable(SHORT))
    assert len(cases) == len(set(cases))
    actions, points, ranks = zip(*cases, strict=True)
    assert (set(actions), set(points), set(ranks)) == (set(ACTIONS), set(POINTS), set(RANKS))
    # The two places where everything depends on how the fault is noticed and what is left of the write.
    assert {action for action, point, _ in cases if point is Point.OPTIMIZER} >= {
        Action.KILL,
        Action.FREEZE,
        Action.LOOP,
    }
    assert {action for action, point, _ in cases if point is Point.BARRIER} >= {Action.KILL, Action.RAISE}
