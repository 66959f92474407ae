"""Bugs of recoveries that cut a collective between two steps: other ways to go on from ranks that went on alone."""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from relight.core.protocol import events as ev
from relight.core.protocol.commands import Stop
from relight.core.recovery.alone import Meeting
from relight.core.recovery.decision import Decision, Halt
from relight.core.stages.deciding import Deciding
from relight.core.worker import actions as act
from relight.core.worker import events as happened
from relight.core.worker import orders, recovery
from relight.core.worker.states import State
from relight.core.worker.table import Table
from relight.core.worker.worker import Worker
from relight.sim.planted.workers import with_handler


class FollowsTheLowest(Deciding):
    """All copy the lowest of the ranks that went apart, though another one had completed the collective."""

    def _follow(self, decision: Decision | Halt, reports: Sequence[ev.Stopped]) -> Decision | Halt:
        if isinstance(decision, Decision) and any(report.alone for report in reports):
            reports = [msgspec.structs.replace(report, alone=True) for report in reports]
        return super()._follow(decision, reports)


class FollowsAnyone(Deciding):
    """A replacement copies from any survivor, also from several that went on alone with different bits."""

    def _follow(self, decision: Decision | Halt, reports: Sequence[ev.Stopped]) -> Decision | Halt:  # noqa: ARG002
        return decision


class MeetsWithoutAll(Deciding):
    """Ranks that wait in a collective go on waiting, though another one has completed it and does not come again."""

    def _where_all_meet(self, decision: Decision, reports: Sequence[ev.Stopped]) -> Meeting | None:
        number = max(report.at_collective for report in reports)
        return Meeting(number, (), decision.sources) if number else None


class AnySourceGives(Deciding):
    """Results of collectives come from any rank, also from one that has completed fewer of them."""

    def _where_all_meet(self, decision: Decision, reports: Sequence[ev.Stopped]) -> Meeting | None:
        meeting = super()._where_all_meet(decision, reports)
        return None if meeting is None else meeting._replace(sources=decision.sources)


class RunsCodeTwice(Deciding):
    """A replacement runs the code between two steps that its rank had completed before it was lost."""

    def _has_gone_on(self, target: int) -> bool:  # noqa: ARG002
        return False


class SaysTheFirst(Worker):
    """A rank says that it waits in the first collective between two steps, whichever it is."""

    @staticmethod
    def _waiting(worker: Worker, event: happened.WaitsBetweenSteps) -> act.Actions:  # noqa: ARG004
        return recovery.on_waiting(worker, happened.WaitsBetweenSteps(1))

    table: ClassVar[Table] = with_handler(happened.WaitsBetweenSteps, (State.OUTSIDE,), _waiting)


class SkipsTheCode(Worker):
    """A replacement takes the next step at once, though the others wait for it in the code before that."""

    @staticmethod
    def _resumed(worker: Worker, event: happened.Ordered) -> act.Actions:
        actions = recovery.on_resume(worker, event)
        worker.runs_code = False
        return actions

    table: ClassVar[Table] = with_handler(happened.Ordered, (State.RESTORED,), _resumed)


class WaitsInAnyCase(Worker):
    """A rank waits in a collective between two steps, though it was told to go on alone."""

    @staticmethod
    def _stop(worker: Worker, stop: Stop) -> act.Actions:
        actions = orders.on_stop(worker, stop)
        worker.go_alone = False
        return actions

    table: ClassVar[Table] = with_handler(Stop, tuple(State), _stop)


class ForgetsThatItWentOnAlone(Worker):
    """A rank does not report that it went on alone, so states that differ are taken for corrupted memory."""

    table: ClassVar[Table] = with_handler(happened.WentOnAlone, tuple(State), lambda worker, event: ())  # noqa: ARG005


class TakesAHalfCopyForWhole(Worker):
    """A rank that copies over a state of its own is held to be intact, also while only a part has arrived."""

    @staticmethod
    def _left(worker: Worker, event: happened.StepLeft) -> act.Actions:
        actions = recovery.on_step_left(worker, event)
        if worker.torn_by == recovery.FOLLOWED:
            worker.torn, worker.torn_by = False, ""
        return actions

    table: ClassVar[Table] = with_handler(happened.StepLeft, tuple(State), _left)
