"""Comparisons and agreements of all ranks in a step, before any of them is prepared for its barrier."""

from contextlib import AbstractContextManager

from relight.core.protocol.position import Phase
from relight.core.worker import events as happened
from relight.errors import StepInterrupted
from relight.training.carried.carried import Carried
from relight.training.carried.rank_values import differing_slots, entries_of, row_of
from relight.training.process.private import PrivateState
from relight.training.process.runtime import Runtime
from relight.training.state.assignment import Assignment
from relight.training.state.corruption import DigestExchange, differ, differing_tensors
from relight.training.state.tracked import TrackedState
from relight.training.transaction.transaction import Transaction
from relight.training.worker.step.sums import Sums


class Agreement:
    """Compares the states of all ranks, and what each has for itself."""

    def __init__(
        self,
        runtime: Runtime,
        state: TrackedState,
        assignment: Assignment,
        private: PrivateState,
        transaction: Transaction,
        carried: Carried,
        sums: Sums,
    ) -> None:
        self._runtime = runtime
        self._state = state
        self._worker = runtime.worker
        self._assignment = assignment
        self._private = private
        self._transaction = transaction
        self._carried = carried
        self._sums = sums
        self._digest_exchange = DigestExchange(state.replica.digest)

    def compare(self, *, early: bool) -> None:
        """Compare replicas in some steps, until they are known to hold the same bits. Raises StepInterrupted.

        Not at the barrier itself: a rank is prepared there, and those that are may finish the step when it breaks, with
        a gradient to which a wrong state has contributed.
        """
        runtime, version = self._runtime, self._worker.version
        if not self._worker.compares(runtime.settings.verify_every, first=runtime.world_size > 1):
            return
        runtime.page.stamp(Phase.BARRIER)
        private, ranks = self._state.rank_private, runtime.world_size
        with self._comparable(early=early):
            ranks_here, versions, with_new = self._sums.of([1, version, self.has_new_buffers])
            self._sums.refuse_other_steps(ranks_here, versions)
            if with_new:
                private.buffers |= private.in_sums(self._sums.of(private.row_of_buffers()))
            digests = self._sums.of(self._digest_exchange.entries(runtime.rank, ranks, self._assignment.shard))
        if differ(digests, runtime.world_size):
            self._worker.handle(happened.StatesDiffer())
            runtime.reports.await_replacement(version, digests[: runtime.world_size], self._name_differing(early=early))
            raise StepInterrupted("a rank's state was corrupted: this step is repeated without it")
        self._worker.handle(happened.StatesAgree())

    def _name_differing(self, *, early: bool) -> tuple[str, ...]:
        """Name the tensors that differ, for the message."""
        rank, world_size = self._runtime.rank, self._runtime.world_size
        try:
            with self._comparable(early=early):
                own = self._state.replica.digests_by_tensor()
            return differing_tensors(own, self._assignment.shard, rank, world_size, self._sums.of)
        except (RuntimeError, StepInterrupted):
            return ()

    def compare_rank_values(self) -> None:
        """At the start of the job's first step: let every rank know what the others made from their ranks.

        What is carried for that becomes part of the private state with which the step began. No rank returns before all
        know it, so none is lost in code of the step while others do not know what it had made. Returns without that if
        a failure prevents it: the step is about to be interrupted.
        """
        runtime, values = self._runtime, self._carried.rank_values
        rank, world_size = runtime.rank, runtime.world_size
        if not self._worker.is_first or world_size == 1:
            return
        own = values.look()
        row = row_of(own)
        sums = self._sums.add_up(row)
        if sums is None:
            return
        slots = differing_slots(row, sums, world_size)
        table = self._sums.add_up(entries_of(own, slots, rank, world_size)) if slots else []
        if table is not None:
            if values.learn(own, world_size, slots, table) and self._private.may_keep_again():
                self._private.keep(self._worker.version, between=True)
            self._state.rank_values = values.describe()
            ends_late = self._sums.add_up([int(self._carried.keeper.ends.come_late)])
            self._state.ends_late = bool(ends_late and ends_late[0])

    # --- buffers that are a rank's own: the same on all ranks -------------------------------------------------------
    @property
    def has_new_buffers(self) -> bool:
        """True if this step has shown some. Stages of a pipeline have other modules each, and do not compare."""
        return not self._state.pipelines and self._state.rank_private.has_new_buffers

    def agree_on_buffers(self) -> None:
        """Take on those of all ranks. No rank is prepared meanwhile. Raises StepInterrupted if that broke."""
        private = self._state.rank_private
        private.agree(private.in_sums(self._sums.of(private.row_of_buffers())))
        private.include_averages()

    def compare_late_changes(self, *, early: bool) -> None:
        """Compare replicas: code between steps wrote other tensors on each rank. Raises UsageError if they differ."""
        rank, world_size = self._runtime.rank, self._runtime.world_size
        with self._comparable(early=early):
            entries = self._digest_exchange.entries(rank, world_size, self._assignment.shard)
        digests = self._sums.add_up(entries)  # None: a failure; the barrier is passed all the same
        if digests is not None and differ(digests, world_size):
            raise self._state.rank_private.refusal()

    def _comparable(self, *, early: bool) -> AbstractContextManager[None]:
        """Leave out of digests what this step makes a rank's own: it may be the first that changes a buffer."""
        is_first = self._worker.is_first
        found = self._transaction.private_buffers(early=early or is_first)
        return self._state.rank_private.including(found, numbers=is_first or self._transaction.has_new_writer)
