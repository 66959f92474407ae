"""The barrier of a step, before a write or at the end of the block: passing it proves that every rank is prepared."""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from relight.core.protocol.fault import Point
from relight.core.protocol.position import Phase
from relight.core.worker import actions as act
from relight.core.worker import events as happened
from relight.core.worker.states import State
from relight.errors import StepInterrupted, UsageError
from relight.training.carried.rank_values import RankValues, differing_slots, entries_of, row_of
from relight.training.process.private import PrivateState
from relight.training.process.runtime import Runtime
from relight.training.state.assignment import Assignment
from relight.training.state.corruption import DigestExchange, differ, differing_tensors
from relight.training.state.tracked import TrackedState
from relight.training.torch_private.script_modes import unseen
from relight.training.transaction.transaction import Transaction
from relight.training.worker.recovery.recovery import Recovery
from relight.training.worker.recovery.taking import FallbackTiers

# Looked up once: each look-up in an enumeration takes 0.1 us.
_BARRIER, _OPTIMIZER = Phase.BARRIER, Phase.OPTIMIZER
_BEFORE_BARRIER, _AT_BARRIER, _AT_OPTIMIZER = Point.BEFORE_BARRIER, Point.BARRIER, Point.OPTIMIZER
# Made once: a step allocates none of them.
_READY = happened.GradientsReady()
_KEPT = happened.PrivateKept()
_PASSED = happened.BarrierPassed()
_PASSED_LAST = happened.BarrierPassed(winds_down=True)


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
        rank_values: RankValues,
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
        self._rank_values = rank_values
        self._digest_exchange = DigestExchange(state.replica.digest)
        self._is_early = False  # it stands in front of a write
        self._passed: happened.BarrierPassed | None = None
        self._carry_outs: Mapping[type[act.Action], Callable[[], None]] = {
            act.KeepPrivate: self._keep_private,
            act.ShowPrepared: self._show_prepared,
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
        self._compare(runtime)
        self._carry_out(worker.handle(_READY))
        self._carry_out(worker.handle(_KEPT))
        if self._passed is not None:
            self._carry_out(worker.handle(self._passed))
        else:
            self._await_decision()

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
        """All that the step needs of other ranks is here: keep the private state with which the next step starts."""
        self._recovery.before_barrier()
        self._transaction.prepare(early=self._is_early)
        self._private.keep(self._worker.version + 1, early=self._is_early)
        self._publishing.before_barrier()

    def _show_prepared(self) -> None:
        self._runtime.page.show_prepared(self._worker.version)

    def _enter(self) -> None:
        runtime = self._runtime
        runtime.faults.strike(_BEFORE_BARRIER)
        runtime.page.stamp(_BARRIER)
        self._passed = self._complete_all_reduce(runtime)

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

    def _compare(self, runtime: Runtime) -> None:
        """Compare replicas in some steps, until they are known to hold the same bits. Raises StepInterrupted.

        Not at the barrier itself: a rank is prepared there, and those that are may finish the step when it breaks, with
        a gradient to which a wrong state has contributed.
        """
        version = self._worker.version
        if not self._worker.compares(runtime.settings.verify_every, first=runtime.world_size > 1):
            return
        runtime.page.stamp(Phase.BARRIER)
        private, ranks = self._state.rank_private, runtime.world_size
        with self._comparable():
            number = 0 if self._state.pipelines else private.number_of_buffers()
            ranks_here, versions, numbers = self._sums(runtime, [1, version, number])
            _refuse_other_steps(runtime, ranks_here, versions)
            if numbers != ranks * number:
                private.agree(self._sums(runtime, private.row_of_buffers()))
            digests = self._sums(runtime, self._digest_exchange.entries(runtime.rank, ranks, self._assignment.shard))
        if differ(digests, runtime.world_size):
            self._worker.handle(happened.StatesDiffer())
            runtime.reports.await_replacement(version, digests[: runtime.world_size], self._name_differing(runtime))
            raise StepInterrupted("a rank's state was corrupted: this step is repeated without it")
        self._worker.handle(happened.StatesAgree())

    def _sums(self, runtime: Runtime, row: list[int]) -> list[int]:
        """Everybody's rows, summed up. Raises StepInterrupted if a failure elsewhere broke it."""
        if (sums := self._add_up(runtime, row)) is None:
            raise StepInterrupted("the generation was closed before the ranks' states were compared")
        return sums

    def _compare_late_changes(self, runtime: Runtime) -> None:
        """Compare replicas: code between steps wrote other tensors on each rank. Raises UsageError if they differ."""
        with self._comparable():
            entries = self._digest_exchange.entries(runtime.rank, runtime.world_size, self._assignment.shard)
        digests = self._add_up(runtime, entries)  # None: a failure; the barrier is passed all the same
        if digests is not None and differ(digests, runtime.world_size):
            raise self._state.rank_private.refusal()

    def _comparable(self) -> AbstractContextManager[None]:
        """Leave out of digests what this step makes a rank's own: it may be the first that changes a buffer."""
        is_first = self._worker.is_first
        found = self._transaction.private_buffers(early=self._is_early or is_first)
        return self._state.rank_private.including(found, numbers=is_first or self._transaction.has_new_writer)

    def compare_rank_values(self) -> None:
        """At the start of the job's first step: let every rank know what the others made from their ranks.

        What is carried for that becomes part of the private state with which the step began. Returns without that if a
        failure prevents it: the step is about to be interrupted.
        """
        runtime, values = self._runtime, self._rank_values
        rank, world_size = runtime.rank, runtime.world_size
        if not self._worker.is_first or world_size == 1:
            return
        own = values.look()
        row = row_of(own)
        sums = self._add_up(runtime, row)
        if sums is None:
            return
        slots = differing_slots(row, sums, world_size)
        table = self._add_up(runtime, entries_of(own, slots, rank, world_size)) if slots else []
        if table is not None:
            if values.learn(own, world_size, slots, table) and self._private.may_keep_again():
                self._private.keep(self._worker.version, between=True)
            self._state.rank_values = values.describe()

    def count_leaving(self, *, leaves: bool, knows: bool) -> tuple[int, int] | None:
        """Count the ranks that have left the loop, and those that know whether it is left here, between two steps.

        None: a failure prevents the answer.
        """
        sums = self._add_up(self._runtime, [1, self._worker.version, int(leaves), int(knows)])
        if sums is None:
            return None
        ranks, versions, leaving, knowing = sums
        _refuse_other_steps(self._runtime, ranks, versions)
        return leaving, knowing

    def _complete_all_reduce(self, runtime: Runtime) -> happened.BarrierPassed | None:
        """One small all-reduce: it completes only once every rank has entered it, prepared. None: it broke."""
        version, vote = self._worker.version, self._snapshots.vote()
        private, attributes = self._state.rank_private, self._state.rank_attributes.number()
        late, buffers = (0, 0) if self._state.pipelines else (private.number(), private.number_of_buffers())
        row = [1, version, self._worker.winding_down, self._transaction.number, attributes, late, buffers, *vote]
        sums = self._add_up(runtime, row, strike=True)
        if sums is None:
            return None
        ranks, versions, winding_down, patterns, all_attributes, all_late, all_buffers, *votes = sums
        _refuse_other_steps(runtime, ranks, versions)
        if all_late != ranks * late:
            self._compare_late_changes(runtime)
        if all_buffers != ranks * buffers and (found := self._add_up(runtime, private.row_of_buffers())) is not None:
            private.agree(found)
            self._private.keep(version + 1, early=self._is_early)
        self._transaction.count(patterns, ranks)
        if (guessed := self._state.rank_attributes.compare(attributes, all_attributes, ranks)) is not None:
            runtime.notices.doubt(guessed)
        if votes:
            self._snapshots.count(votes[0])
        return _PASSED_LAST if winding_down else _PASSED

    def _add_up(self, runtime: Runtime, row: list[int], *, strike: bool = False) -> list[int] | None:
        """Everybody's rows, summed up; None if a failure elsewhere broke it. `strike` once this rank's is said."""
        formed = runtime.groups.all[0].formed
        if runtime.closed or formed is None:
            return None
        over = runtime.groups.waits.begin()
        try:
            runtime.protection.count_collective()
            wait = formed.sum_over_ranks(row)
            if strike:
                runtime.faults.strike(_AT_BARRIER)
            return wait()
        except (RuntimeError, StepInterrupted) as error:
            if not runtime.protection.await_verdict(str(error)[:200]):
                raise
            return None
        finally:
            over()

    def _name_differing(self, runtime: Runtime) -> tuple[str, ...]:
        """Name the tensors that differ, for the message."""
        add_up = functools.partial(self._sums, runtime)
        try:
            with self._comparable():
                own = self._state.replica.digests_by_tensor()
            return differing_tensors(own, self._assignment.shard, runtime.rank, runtime.world_size, add_up)
        except (RuntimeError, StepInterrupted):
            return ()


def _refuse_other_steps(runtime: Runtime, ranks: int, versions: int) -> None:
    """Raises UsageError unless all ranks are at this one's step."""
    version = runtime.worker.version
    if (ranks, versions) != (runtime.world_size, runtime.world_size * version):
        raise UsageError(
            f"rank {runtime.rank} is at step {version}, but the step numbers of all ranks add up to {versions} "
            f"instead of {runtime.world_size * version}: some rank runs another number of steps or collectives"
        )
