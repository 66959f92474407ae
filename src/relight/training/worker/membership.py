"""A process among the others of its job: it enters training, waits in reserve for a rank, and leaves with the rest."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from relight.core.protocol.events import TrainingDone, TrainingEntered
from relight.core.protocol.fault import Point
from relight.core.protocol.position import Phase
from relight.core.worker import actions as act
from relight.core.worker import events as happened
from relight.core.worker.states import State
from relight.errors import UsageError
from relight.training.carried.code.leaving import is_left_by_break
from relight.training.step import Step
from relight.training.torch_private.script_modes import unseen
from relight.training.worker.broken_steps import BrokenSteps
from relight.training.worker.inventory import Inventory
from relight.training.worker.position import show_position
from relight.training.worker.script_checks import ScriptChecks

LOGGERS_SECONDS = 60.0  # to take what is left before the job ends
_UNKNOWN = "unknown"
_GUARD = "write `if step.committed` around what decides on it"


class Membership:
    """From the first step on offer to the end of the script; that is asked through `Runtime.lifecycle`."""

    def __init__(
        self,
        parts: Inventory,
        checks: ScriptChecks,
        broken_steps: BrokenSteps,
        end_with: Callable[[BaseException], NoReturn],
    ) -> None:
        """`end_with` ends the process with an error of the script."""
        self._parts = parts
        self._runtime = parts.runtime
        self._worker = parts.runtime.worker
        self._checks = checks
        self._recover = broken_steps.recover
        self._end_with = end_with
        self.offered: Step | None = None  # the newest one
        self._went_on_after = -1  # the version with which this script last asked for a step, having committed it itself
        self._asked_in = 0  # the generation in which all ranks said whether they go on
        self._is_released = False
        self._left_with: str | None = None  # digest of the state with which the script left the loop, if it is not done
        parts.runtime.lifecycle = self

    # --- entering ---------------------------------------------------------------------------------------------
    @unseen
    def enter(self) -> None:
        """As one of the initial ranks: start from a checkpoint or anew, and wait until all may begin."""
        runtime, worker, parts = self._runtime, self._worker, self._parts
        if parts.checkpointing.resume():
            parts.state.zero.gather()
        else:
            parts.batches.start(0, parts.assignment.batch_index)
        parts.private.keep(worker.version)
        runtime.protection.started = True
        runtime.handle(happened.ScriptEntered())
        runtime.link.send(
            TrainingEntered(
                process=runtime.process,
                rank=runtime.rank,
                version=worker.version,
                layout_digest=parts.state.replica.layout(),
                state_digest=parts.state.replica.digest(),
                until=worker.until,
                shard=parts.assignment.shard,
                state_bytes=parts.state.replica.module_bytes(),
                buddy_every=parts.snapshots.every if parts.snapshots.active else 0,
                checkpoint_every=parts.checkpointing.every,
            ),
            report=True,
        )
        runtime.orders.await_ready()
        for action in runtime.handle(happened.Ordered()):
            assert isinstance(action, act.AssignBuddies)
            parts.recovery.assign_buddies(action)
        show_position(self._runtime)

    @unseen
    def stand_by(self) -> None:
        """A standby that has rehearsed: wait for a rank (unless it has one, and builds late), and be restored."""
        runtime, parts = self._runtime, self._parts
        if not runtime.builds_late:
            runtime.stand_by(parts.state.replica.layout())
            parts.state.division.rebind()
            parts.assignment.follow(parts.state, runtime.rank, runtime.world_size)
            if runtime.rank != runtime.built_as:
                parts.carried.doubts.note_rank()
            for tell in runtime.at_rank_change:
                tell(runtime.rank)
        runtime.faults.strike(Point.PROMOTED)
        runtime.protection.started = True
        self._recover(runtime.handle(happened.StepWanted()))

    def run_code(self, step: Step) -> Step:
        """As a replacement, go on after this step, the last one of an epoch: all others wait in the code after it."""
        runtime, parts, carried = self._runtime, self._parts, self._parts.carried
        doubts = carried.turn(sys._getframe()), carried.doubts.later(), carried.keeper.ends.doubt()
        for doubt in filter(None, (*doubts, parts.private.streams.put_back())):
            runtime.notices.doubt(doubt)
        parts.transaction.watch_code()
        runtime.protection.after_recovery = False
        runtime.page.stamp(Phase.OUTSIDE)
        self.offered = step  # as if this process had committed it
        return step

    # --- leaving ----------------------------------------------------------------------------------------------
    def ask_whether_to_go_on(self, *, leaves: bool = False) -> None:
        """Learn, before the first step after a recovery, whether other ranks have left the loop after the newest one.

        Their scripts decided so in code that a replacement has not run: it leaves too. Every rank that could take a
        step asks once in a generation, so that the answer is the same everywhere; a failure meanwhile prevents it.

        Raises:
            UsageError: this script has run that code and goes on, or may have changed the state after the loop, which
                a replacement has a copy of.
        """
        runtime, worker, step = self._runtime, self._worker, self.offered
        if step is not None and step.committed and not leaves:
            self._went_on_after = step.number + 1
        if worker.closed or not worker.may_be_left or self._asked_in == runtime.generation or runtime.world_size == 1:
            return
        leaves = leaves or worker.left is not None
        knows = leaves or self._went_on_after == worker.version
        answer = self._parts.barrier.count_leaving(leaves=leaves, knows=knows)
        if answer is None:
            return
        self._asked_in = runtime.generation
        leaving, knowing = answer
        if leaves and leaving < runtime.world_size:
            self._refuse_changed_state()
        was_begun = worker.version == 0 or worker.attempt > 0 or worker.version < worker.begun_before
        if not knowing and not was_begun and self._parts.carried.may_leave:
            runtime.notices.doubt(
                f"every rank that has run the code after step {worker.version - 1} is lost. If the script would have "
                "left its loop there, training went on nevertheless. Decide inside `with step`"
            )
        if not leaving or leaves:
            return
        if self._went_on_after == worker.version:
            raise UsageError(
                f"rank {runtime.rank} goes on after step {worker.version - 1}, after which other ranks have left the "
                "loop: every rank must `break` after the same step"
            )
        worker.left = worker.version

    def leave(self, frame: FrameType | None) -> None:
        """The script leaves the loop early. After `break`, finish with the other ranks before its next line runs.

        What that line changes would be copied by a replacement, and what it asks of other ranks would not be answered.
        If it is not known that it is a `break`, an exception may be on its way out: which one shows when the script
        ends; then training is finished, or the exception is reported.

        Args:
            frame: that closes the loop's iterator.
        """
        self._worker.left = self._worker.version
        if not is_left_by_break(frame):
            self._left_with = self._digest()
            return
        try:
            self._refuse_premature_break()
            self._finish_early()
        except BaseException as error:  # Python drops what is raised while a generator is closed
            self._end_with(error)
        computed = self._worker.commits > 0
        if doubt := self._parts.carried.end(computed=computed):
            self._runtime.notices.doubt(doubt)

    def _digest(self) -> str:
        try:
            return self._parts.state.replica.digest()
        except Exception:  # the script may have failed for the same reason
            return _UNKNOWN

    def _refuse_premature_break(self) -> None:
        """Raises UsageError for a `break` that follows a step which is not committed: it is to be computed again."""
        step = self.offered
        if self._runtime.is_rehearsing:
            raise UsageError(
                "the script left the loop in a standby's rehearsal, in which a process is alone and nothing is kept: "
                + _GUARD
            )
        if step is not None and step.entered and not step.committed:
            raise UsageError(
                f"the script left the loop after step {step.number}, which is not committed (a failure interrupted it, "
                f"or it is computed twice): {_GUARD}"
            )

    def _finish_early(self) -> None:
        """Finish with the other ranks, at the version with which the script left the loop."""
        worker = self._worker
        worker.left = version = worker.version
        while True:
            self.ask_whether_to_go_on(leaves=True)
            if self.finish():
                return
            if worker.version != version:
                raise UsageError(
                    f"the script left the loop after {version} steps, and then a failure took all ranks back to "
                    f"version {worker.version}: the steps from there on cannot be computed in this process. Start the "
                    "job again; it goes on from its newest checkpoint"
                )

    @unseen
    def finish(self) -> bool:
        """All steps are committed here: True once that holds everywhere, False if a recovery sent this rank back."""
        runtime, worker, parts = self._runtime, self._worker, self._parts
        if worker.state is not State.DONE:
            actions = runtime.handle(happened.StepWanted())
            if act.ReportDone() not in actions:
                return self._go_back(actions)
        runtime.page.stamp(Phase.DONE)
        self._checks.warn_of_nothing_trained()
        runtime.link.send(
            TrainingDone(
                process=runtime.process,
                rank=runtime.rank,
                generation=runtime.generation,
                version=worker.version,
                lineage=worker.lineage,
                state_digest=parts.state.replica.digest(),
                cut_collectives=runtime.protection.cut_collectives,
                doubts=len(runtime.notices.doubts),
            ),
            report=True,
        )
        runtime.orders.await_ready()
        actions = runtime.handle(happened.Ordered())
        if act.Release() in actions:
            parts.publishing.finish()
            parts.scalars.finish(LOGGERS_SECONDS)
            if parts.checkpointing.every and parts.private.is_due(worker.version):
                parts.private.keep(worker.version, between=True)  # as the code after the last block has left it
            parts.checkpointing.finish()
            runtime.protection.started = False
            self._is_released = True
            return True
        return self._go_back(actions)

    def _go_back(self, actions: act.Actions) -> bool:
        """Recover, and return False. Raises UsageError if code after the loop has changed the state."""
        self._refuse_changed_state()
        self._recover(actions)
        return False

    def _refuse_changed_state(self) -> None:
        if self._left_with not in (None, self._digest()):
            raise UsageError(
                "a rank was lost before all had finished training, and the code after the loop has run here and may "
                "have changed the state; a replacement does not run that code. Leave the loop by `break`, in `for step "
                "in training.steps(...)` itself: then relight finishes before the code after the loop runs"
            )

    # --- the script's end (Lifecycle) -------------------------------------------------------------------------
    def at_end_of_script(self) -> None:
        """Finish the job at the script's end. If it left the loop early, every rank must have, after the same step."""
        if self._is_released or self.offered is None:
            return
        if self._left_with is None:  # something keeps the loop's iterator, so nothing was heard of it
            self._left_with = _UNKNOWN
        self._finish_early()

    @property
    def saves(self) -> bool:
        """True if this job writes checkpoints, so that a last one may be made of what this process has."""
        return bool(self._parts.checkpointing.every)

    def hold_for_save(self) -> None:
        """The script has failed: answer orders until this process is killed."""
        self._parts.recovery.hold_for_save()
