"""A process among the others of its job: it enters training, waits in reserve for a rank, and leaves with the rest."""

from relight.core.protocol.events import TrainingDone, TrainingEntered
from relight.core.protocol.fault import Point
from relight.core.protocol.position import Phase
from relight.core.worker import actions as act
from relight.core.worker import events as happened
from relight.core.worker.states import State
from relight.training.worker.broken_steps import BrokenSteps
from relight.training.worker.inventory import Inventory
from relight.training.worker.position import show_position
from relight.training.worker.script_checks import ScriptChecks

LOGGERS_SECONDS = 60.0  # to take what is left before the job ends


class Membership:
    """From the first step on offer to the end of the script; that is asked through `Runtime.lifecycle`."""

    def __init__(self, parts: Inventory, checks: ScriptChecks, broken_steps: BrokenSteps) -> None:
        self._parts = parts
        self._runtime = parts.runtime
        self._worker = parts.runtime.worker
        self._checks = checks
        self._recover = broken_steps.recover
        self.left_early = False  # the script left the loop with steps to go
        parts.runtime.lifecycle = self

    # --- entering ---------------------------------------------------------------------------------------------
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
                layout_digest=parts.state.layout(),
                state_digest=parts.state.digest(),
                until=worker.until,
                shard=parts.assignment.shard,
                state_bytes=parts.state.parameter_bytes(),
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

    def stand_by(self) -> None:
        """A standby that has rehearsed: wait for a rank (unless it has one, and builds late), and be restored."""
        runtime, parts = self._runtime, self._parts
        if not runtime.builds_late:
            runtime.stand_by(parts.state.layout())
            parts.state.rebind()
            parts.assignment.follow(parts.state, runtime.rank, runtime.world_size)
            for tell in runtime.at_rank_change:
                tell(runtime.rank)
        runtime.faults.strike(Point.PROMOTED)
        runtime.protection.started = True
        self._recover(runtime.handle(happened.StepWanted()))

    # --- leaving ----------------------------------------------------------------------------------------------
    def finish(self) -> bool:
        """All steps are committed here: True once that holds everywhere, False if a recovery sent this rank back."""
        runtime, worker, parts = self._runtime, self._worker, self._parts
        if worker.state is not State.DONE:
            actions = runtime.handle(happened.StepWanted())
            if act.ReportDone() not in actions:
                self._recover(actions)
                return False
        runtime.page.stamp(Phase.DONE)
        self._checks.warn_of_nothing_trained()
        runtime.link.send(
            TrainingDone(
                process=runtime.process,
                rank=runtime.rank,
                generation=runtime.generation,
                version=worker.version,
                lineage=worker.lineage,
                state_digest=parts.state.digest(),
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
            parts.checkpointing.finish()
            runtime.protection.started = False
            return True
        self._recover(actions)
        return False

    # --- the script's end (Lifecycle) -------------------------------------------------------------------------
    def at_end_of_script(self) -> None:
        """It has run to its end. If it left the loop early, every rank must have done so, after the same step."""
        if self.left_early:
            released = False
            while not released:
                self._worker.until = self._worker.version  # it will take no further step
                released = self.finish()

    @property
    def saves(self) -> bool:
        """Whether this job writes checkpoints, so that a last one may be made of what this process has."""
        return bool(self._parts.checkpointing.every)

    def hold_for_save(self) -> None:
        """The script has failed: answer orders until this process is killed."""
        self._parts.recovery.hold_for_save()
