"""The barrier of a step, before a write or at the end of the block: passing it proves that every rank is prepared."""

from collections.abc import Callable, Mapping

from relight.core.protocol.fault import Point
from relight.core.protocol.position import Phase
from relight.core.worker import actions as act
from relight.core.worker import events as happened
from relight.core.worker.states import State
from relight.errors import StepInterrupted
from relight.training.carried.carried import Carried
from relight.training.process.private import PrivateState
from relight.training.process.runtime import Runtime
from relight.training.state.assignment import Assignment
from relight.training.state.tracked import TrackedState
from relight.training.torch_private.script_modes import unseen
from relight.training.transaction.transaction import Transaction
from relight.training.worker.recovery.recovery import Recovery
from relight.training.worker.recovery.taking import FallbackTiers
from relight.training.worker.step.agreement import Agreement
from relight.training.worker.step.sums import Sums

# Looked up once: each look-up in an enumeration takes 0.1 us.
_BARRIER, _OPTIMIZER = Phase.BARRIER, Phase.OPTIMIZER
_BEFORE_BARRIER, _AT_BARRIER, _AT_OPTIMIZER = Point.BEFORE_BARRIER, Point.BARRIER, Point.OPTIMIZER
# Made once: a step allocates none of them.
_READY = happened.GradientsReady()
_KEPT = happened.PrivateKept()
_PASSED = happened.BarrierPassed()
_PASSED_LAST = happened.BarrierPassed(winds_down=True)
_PUT_OFF = happened.BarrierPutOff()


class Barrier:
    """Called in front of every write and at the end of the block; one of these calls of a step waits."""

    def __init__(
        self,
        runtime: Runtime,
        state: TrackedState,
        assignment: Assignment,
        private: PrivateState,
        transaction: Transaction,
        recovery: Recovery,
        tiers: FallbackTiers,
        carried: Carried,
    ) -> None:
        self._runtime = runtime
        self._state = state
        self._worker = runtime.worker
        self._assignment = assignment
        self._private = private
        self._transaction = transaction
        self._recovery = recovery
        self._snapshots = tiers.snapshots
        self._publishing = tiers.publishing
        self._sums = Sums(runtime)
        self.agreement = Agreement(runtime, state, assignment, private, transaction, carried, self._sums)
        self._is_early = False  # it stands in front of a write
        self._outcome: happened.BarrierPassed | happened.BarrierPutOff | None = None  # None: it broke
        self._carry_outs: Mapping[type[act.Action], Callable[[], None]] = {
            act.KeepPrivate: self._keep_private,
            act.ShowPrepared: self._show_prepared,
            act.WithdrawPrepared: self._withdraw_prepared,
            act.EnterBarrier: self._enter,
            act.ReportStatus: runtime.report_status,
            act.FinishStep: self._finish_step,
            act.ConfirmVersion: self._confirm_version,
            act.BeginWrite: self._begin_write,
        }

    @unseen
    def before_write(self, writer: str, optimizer: str | None) -> None:
        """Returns when the write may begin. Raises StepInterrupted if this step is to be repeated.

        `writer` names what writes; `optimizer` is its name too, if it is one.
        """
        worker = self._worker
        if optimizer is not None:
            self._state.members.see(optimizer)
        if worker.passed:
            return
        if not self._runtime.is_rehearsing and self._transaction.before_write(writer, optimizer):
            self._pass(self._runtime, early=True)
        worker.wrote = True

    def at_end(self) -> None:
        """At the end of the block: the same, if the barrier was not passed before."""
        if not (self._worker.passed or self._runtime.is_rehearsing):
            self._pass(self._runtime, early=False)

    def _pass(self, runtime: Runtime, *, early: bool) -> None:
        worker = self._worker
        runtime.groups.await_launched()  # what the script waits for later belongs to this step, too
        runtime.synchronize()  # a rank that has only launched the collectives is not prepared (docs/PROTOCOL.md)
        if worker.closed:
            raise StepInterrupted("the generation was closed before this rank was prepared")
        self._is_early = early
        self.agreement.compare(early=early)
        self._recovery.before_barrier()
        self._transaction.prepare(early=early)
        if self.agreement.has_new_buffers:
            runtime.page.stamp(_BARRIER)
            if self._complete_all_reduce(runtime) is None:
                raise StepInterrupted("the generation was closed before the ranks agreed on their buffers")
            self.agreement.agree_on_buffers()
        self._prepare()
        while self._outcome is _PUT_OFF:
            self._carry_out(worker.handle(_PUT_OFF))
            self.agreement.agree_on_buffers()
            self._prepare()
        if self._outcome is not None:
            self._carry_out(worker.handle(self._outcome))
        else:
            self._await_decision()

    def _prepare(self) -> None:
        """All that the step needs of other ranks is here: be prepared, and come to the barrier."""
        self._carry_out(self._worker.handle(_READY))
        self._carry_out(self._worker.handle(_KEPT))

    def _carry_out(self, actions: act.Actions) -> None:
        for action in actions:
            self._carry_outs[type(action)]()

    def _await_decision(self) -> None:
        """The barrier broke. Other ranks may have passed it, so this rank alone cannot say whether to finish the step.

        Returns if it is to be finished. Raises StepInterrupted if not.
        """
        runtime, worker = self._runtime, self._worker
        self._carry_out(runtime.handle(happened.Interrupted()))
        while worker.state is State.PARKED:
            runtime.orders.await_ready()
            self._carry_out(runtime.handle(happened.Ordered()))
        if worker.state is not State.WRITING:
            raise StepInterrupted("it was decided to repeat this step")

    def _keep_private(self) -> None:
        """Keep the private state with which the next step starts."""
        self._private.keep(self._worker.version + 1, early=self._is_early)
        self._publishing.before_barrier()

    def _show_prepared(self) -> None:
        self._runtime.page.show_prepared(self._worker.version)

    def _withdraw_prepared(self) -> None:
        page = self._runtime.page
        page.show_prepared(-1)
        page.withdraw_private(self._worker.version + 1)

    def _enter(self) -> None:
        runtime = self._runtime
        runtime.faults.strike(_BEFORE_BARRIER)
        runtime.page.stamp(_BARRIER)
        self._outcome = self._complete_all_reduce(runtime)

    def _finish_step(self) -> None:
        self._recovery.begin_finish()
        self._runtime.faults.strike(Point.FINISH)

    def _confirm_version(self) -> None:
        """Every rank is prepared, or it was decided to finish this step: all of them hold its version."""
        self._publishing.confirm(self._worker.version)
        self._publishing.before_write()
        self._snapshots.before_write()

    def _begin_write(self) -> None:
        page = self._runtime.page
        page.put("torn", 1)
        page.stamp(_OPTIMIZER)
        self._runtime.faults.strike(_AT_OPTIMIZER)

    def count_leaving(self, *, leaves: bool, knows: bool) -> tuple[int, int] | None:
        """Count the ranks that have left the loop, and those that know whether it is left here, between two steps.

        None: a failure prevents the answer.
        """
        sums = self._sums.add_up([1, self._worker.version, int(leaves), int(knows)])
        if sums is None:
            return None
        ranks, versions, leaving, knowing = sums
        self._sums.refuse_other_steps(ranks, versions)
        return leaving, knowing

    def _complete_all_reduce(self, runtime: Runtime) -> happened.BarrierPassed | happened.BarrierPutOff | None:
        """One small all-reduce: it completes only once every rank has entered it. None: it broke.

        It is passed if all were prepared. Ranks whose steps have just changed a buffer for the first time are not.
        """
        version, vote = self._worker.version, self._snapshots.vote()
        private, attributes = self._state.rank_private, self._state.rank_attributes.number()
        late, new = 0 if self._state.pipelines else private.number(), self.agreement.has_new_buffers
        row = [1, version, self._worker.winding_down, self._transaction.number, attributes, late, new, *vote]
        sums = self._sums.add_up(row, strike=True)
        if sums is None:
            return None
        ranks, versions, winding_down, patterns, all_attributes, all_late, with_new, *votes = sums
        self._sums.refuse_other_steps(ranks, versions)
        if with_new:
            return _PUT_OFF
        if all_late != ranks * late:
            self.agreement.compare_late_changes(early=self._is_early)
        self._transaction.count(patterns, ranks)
        if (guessed := self._state.rank_attributes.compare(attributes, all_attributes, ranks)) is not None:
            runtime.notices.doubt(guessed)
        if votes:
            self._snapshots.count(votes[0])
        return _PASSED_LAST if winding_down else _PASSED
