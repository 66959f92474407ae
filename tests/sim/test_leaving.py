"""Scripts leave their loops with steps to go, while ranks are lost: a replacement has not run what decided on it."""

from dataclasses import replace
from typing import ClassVar

import pytest

from relight.core.worker.events import StepWanted
from relight.sim.model.contents import Violation
from relight.sim.model.schedule import leaving_schedule
from relight.sim.model.worker.worker import SimulatedWorker
from relight.sim.timed.job import PRODUCTION, run_schedule

SCHEDULES = 400


class GoesOn(SimulatedWorker):
    """A replacement goes on alone where the others have left: it does not ask."""

    points: ClassVar = {**SimulatedWorker.points, "ASK": lambda worker: worker.feed(StepWanted())}


def run(worker: type[SimulatedWorker] = SimulatedWorker) -> None:
    """Run all schedules. Raises Violation at the first one that breaks an invariant."""
    for seed in range(SCHEDULES):
        run_schedule(leaving_schedule(seed), replace(PRODUCTION, worker=worker))


def test_jobs_end_where_their_scripts_do() -> None:
    run()


def test_a_replacement_that_goes_on_alone_is_found() -> None:
    with pytest.raises(Violation):
        run(GoesOn)
