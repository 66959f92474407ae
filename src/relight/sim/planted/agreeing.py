"""Bugs of ranks that agree on buffers which one of them has changed for the first time in the job."""

from collections.abc import Mapping
from typing import ClassVar

from relight.core.worker import actions as act
from relight.core.worker import events as happened
from relight.core.worker.states import State
from relight.core.worker.table import Table
from relight.core.worker.worker import Worker
from relight.sim.model.worker import barrier
from relight.sim.model.worker.worker import CarryOut, Continue, SimulatedWorker
from relight.sim.model.worker.writes import roll_back
from relight.sim.planted.workers import with_handler

_POINTS = SimulatedWorker.points


class AgreesAfterTheBarrier(SimulatedWorker):
    """A defect of an earlier version: all ranks were prepared before they agreed on buffers that are a rank's own. They
    did so once the barrier was passed, and a failure in between left them with different ones.
    """

    @staticmethod
    def _begin(worker: SimulatedWorker) -> None:
        _POINTS["OUTSIDE"](worker)
        worker.has_new = False

    @staticmethod
    def _pass(worker: SimulatedWorker) -> None:
        finds = bool(worker.shape.script.finders) and barrier.outcome(worker) is not None
        if not finds or not barrier.enter(worker, "AGREE", 1):
            _POINTS["BARRIER"](worker)

    @staticmethod
    def _agree(worker: SimulatedWorker) -> None:
        if barrier.outcome(worker) is not None:
            barrier.take_on_buffer(worker)
            worker.page.keep_private(worker.state.version + 1, worker.next_private)
        worker.feed(happened.BarrierPassed())

    points: ClassVar[Mapping[str, Continue]] = {**_POINTS, "OUTSIDE": _begin, "BARRIER": _pass, "AGREE": _agree}


class StaysPreparedWhileRanksAgree(Worker):
    """A rank stays prepared while ranks agree on buffers: private state beside its page lacks those of others."""

    @staticmethod
    def _put_off(worker: Worker, event: happened.BarrierPutOff) -> act.Actions:  # noqa: ARG004
        worker.state = State.IN_STEP
        return ()

    table: ClassVar[Table] = with_handler(happened.BarrierPutOff, (State.AT_BARRIER,), _put_off)


class KeepsWhatAnUndoneAttemptKept(SimulatedWorker):
    """Private state that an undone attempt has kept for the next version stays beside the page of a rank that goes
    back. It may be taken for that of the attempt after it, in which ranks agree on other buffers.
    """

    @staticmethod
    def _roll_back(worker: SimulatedWorker, action: act.Action) -> None:  # noqa: ARG004
        roll_back(worker)

    carry_outs: ClassVar[Mapping[type[act.Action], CarryOut]] = {
        **SimulatedWorker.carry_outs,
        act.RollBack: _roll_back,
    }
