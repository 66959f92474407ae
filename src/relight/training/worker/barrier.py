"""The barrier of a step, before a write or at the end of the block: passing it proves that every rank is prepared."""

import time

from relight.core.fault import Point
from relight.core.position import Phase
from relight.errors import StepInterrupted, UsageError
from relight.training.checkpoint.snapshots import Snapshots
from relight.training.process.private import PrivateState
from relight.training.process.progress import Progress
from relight.training.process.runtime import Runtime
from relight.training.publish.publishing import Publishing
from relight.training.state.assignment import Assignment
from relight.training.state.corruption import DigestExchange, differ, differing_tensors
from relight.training.state.tracked import TrackedState
from relight.training.transaction.transaction import Transaction
from relight.training.worker.recovery import Recovery


class Barrier:
    """Called in front of every write and at the end of the block; one of these calls of a step waits."""

    def __init__(
        self,
        runtime: Runtime,
        state: TrackedState,
        progress: Progress,
        assignment: Assignment,
        private: PrivateState,
        transaction: Transaction,
        recovery: Recovery,
        snapshots: Snapshots,
        publishing: Publishing,
    ) -> None:
        self._runtime = runtime
        self._state = state
        self._progress = progress
        self._assignment = assignment
        self._private = private
        self._transaction = transaction
        self._recovery = recovery
        self._snapshots = snapshots
        self._publishing = publishing
        self._digest_exchange = DigestExchange(runtime.settings.verify_every, state.digest)

    def before_write(self, writer: str, optimizer: str | None) -> None:
        """Returns when the write may begin. Raises StepInterrupted if this step is to be repeated.

        `writer` names what writes; `optimizer` is its name too, if it is one.
        """
        progress = self._progress
        if optimizer is not None:
            self._state.see_groups(optimizer)
        if progress.passed:
            return
        if not progress.warming and self._transaction.before_write(writer, optimizer):
            self._pass(self._runtime, early=True)
        progress.wrote = True

    def at_end(self) -> None:
        """At the end of the block: the same, if the barrier was not passed before."""
        if not (self._progress.passed or self._progress.warming):
            self._pass(self._runtime, early=False)

    def _pass(self, runtime: Runtime, *, early: bool) -> None:
        page = runtime.page
        runtime.await_launched()  # what the script waits for later belongs to this step, too
        runtime.synchronize()  # who has only launched the collectives is not prepared (docs/PROTOCOL.md, C1 to C3)
        if runtime.closed:
            raise StepInterrupted("the generation was closed before this rank was prepared")
        self._compare(runtime)
        self._prepare(early)
        page.put("prepared", self._progress.version)
        runtime.faults.strike(Point.BEFORE_BARRIER)
        page.stamp(Phase.BARRIER)
        if not self._complete_all_reduce(runtime):
            self._await_decision(runtime)
        self._progress.passed = True
        self._let_write()
        page.put("torn", 1)
        page.stamp(Phase.OPTIMIZER)
        runtime.faults.strike(Point.OPTIMIZER)

    def _prepare(self, early: bool) -> None:
        """Whatever the step needs of other ranks is here: keep the private state with which the next step starts."""
        self._recovery.before_barrier()
        self._transaction.prepare(early=early)
        self._private.keep(self._progress.version + 1, early=early)
        self._publishing.before_barrier()

    def _let_write(self) -> None:
        """Every rank is prepared, or it was decided to finish this step: all of them hold its version."""
        self._publishing.confirm(self._progress.version)
        self._publishing.before_write()
        self._snapshots.before_write()

    def _compare(self, runtime: Runtime) -> None:
        """In some steps: returns once replicas are known to hold the same bits. Raises StepInterrupted otherwise.

        Not at the barrier itself: a rank is prepared there, and those that are may finish the step when it breaks, with
        a gradient to which a wrong state has contributed.
        """
        version = self._progress.version
        entries = self._digest_exchange.entries(
            version, runtime.rank, runtime.world_size, self._assignment.shard, first=self._is_after_first_step
        )
        if not entries:
            return
        runtime.page.stamp(Phase.BARRIER)
        sums = self._add_up(runtime, [1, version, *entries])
        if sums is None:
            raise StepInterrupted("the generation was closed before the ranks' states were compared")
        self._refuse_other_steps(runtime, *sums[:2])
        digests = sums[2:]
        if differ(digests, runtime.world_size):
            runtime.await_replacement(version, digests[: runtime.world_size], self._name_differing(runtime))
            raise StepInterrupted("a rank's state was corrupted: this step is repeated without it")
        self._progress.agreed = version

    def _complete_all_reduce(self, runtime: Runtime) -> bool:
        """One small all-reduce: it completes only once every rank has entered it, prepared. False if it broke."""
        version = self._progress.version
        vote = self._snapshots.vote()
        pattern = self._transaction.pattern
        attributes = self._state.attributes.number()
        row = [1, version, runtime.winding_down, pattern.number(), attributes, *vote]
        sums = self._add_up(runtime, row, strike=True)
        if sums is None:
            return False
        ranks, versions, winding_down, patterns, all_attributes, *votes = sums
        self._refuse_other_steps(runtime, ranks, versions)
        self._transaction.learner.count(pattern, patterns, ranks)
        self._state.attributes.compare(attributes, all_attributes, ranks)
        if winding_down:
            self._progress.last = version + 1
        if votes:
            self._snapshots.count(votes[0])
        return True

    def _add_up(self, runtime: Runtime, row: list[int], *, strike: bool = False) -> list[int] | None:
        """Everybody's rows, summed up; None if a failure elsewhere broke it. `strike` once this rank's is said."""
        formed = runtime.groups[0].formed
        if runtime.closed or formed is None:
            return None
        over = runtime.waits.begin()
        try:
            runtime.count_collective()
            wait = formed.sum_over_ranks(row)
            if strike:
                runtime.faults.strike(Point.BARRIER)
            return wait()
        except (RuntimeError, StepInterrupted) as error:
            if not runtime.await_verdict(str(error)[:200]):
                raise
            return None
        finally:
            over()

    def _refuse_other_steps(self, runtime: Runtime, ranks: int, versions: int) -> None:
        """Raises UsageError unless all ranks are at this one's step."""
        version = self._progress.version
        if (ranks, versions) != (runtime.world_size, runtime.world_size * version):
            raise UsageError(
                f"rank {runtime.rank} is at step {version}, but the step numbers of all ranks add up to {versions} "
                f"instead of {runtime.world_size * version}: some rank runs another number of steps or collectives"
            )

    @property
    def _is_after_first_step(self) -> bool:
        """Whether what the job's first step made is to be compared: a script whose ranks differ does so at once.

        All ranks must say the same. Behind a recovery they know the version from which it went on, but only of 0 that
        it was the job's first.
        """
        progress, runtime = self._progress, self._runtime
        is_first = progress.began == 0 or runtime.generation == 1
        return runtime.world_size > 1 and is_first and progress.version == progress.began + 1

    def _name_differing(self, runtime: Runtime) -> tuple[str, ...]:
        """Which tensors, for the message."""
        state = self._state

        def add_up(row: list[int]) -> list[int]:
            sums = self._add_up(runtime, row)
            if sums is None:
                raise StepInterrupted("the generation was closed before it was told which tensors differ")
            return sums

        try:
            own, shard = state.digests_by_tensor(), self._assignment.shard
            return differing_tensors(own, shard, runtime.rank, runtime.world_size, add_up)
        except (RuntimeError, StepInterrupted):
            return ()

    def _await_decision(self, runtime: Runtime) -> None:
        """The barrier broke. Others may have passed it, so whether the step is finished is not for this rank to say."""
        progress = self._progress
        progress.restore = runtime.report_status(progress.status(prepared=True))
        if progress.restore.target != progress.version + 1:
            raise StepInterrupted("it was decided to repeat this step")
        progress.finish_started_ns = time.monotonic_ns()
        runtime.faults.strike(Point.FINISH)
