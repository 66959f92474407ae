"""A worker's part in a recovery, on its main thread: pause, reach the decided version, resume.

The order is that of docs/PROTOCOL.md: Stop (done by the runtime), then Clean, Reset, Restore, Rollback, Resume.
"""

import time
from collections.abc import Callable, Mapping

from relight.core.protocol.commands import Restore, Resume, Save
from relight.core.protocol.events import Restored, RestoreProgress, Saved
from relight.core.protocol.fault import Point
from relight.core.protocol.position import Phase
from relight.core.worker import actions as act
from relight.core.worker import events as happened
from relight.core.worker.states import State
from relight.errors import CheckpointError, RestoreError, StepInterrupted
from relight.training.collectives.generation_group import Forming, GenerationGroups
from relight.training.process.controller.orders import Superseded
from relight.training.process.runtime import Runtime
from relight.training.state.tracked import TrackedState
from relight.training.worker.recovery.taking import FallbackTiers, RestoreWork, StateTaking


class Recovery:
    """Everything that changes the state of this rank other than the script itself."""

    def __init__(self, runtime: Runtime, state: TrackedState, tiers: FallbackTiers, taking: StateTaking) -> None:
        self._runtime = runtime
        self._state = state
        self._worker = runtime.worker
        self._tiers = tiers
        self._snapshots = tiers.snapshots
        self._taking = taking
        self._finish_started_ns = 0
        self.resumed_ns = 0  # when this rank last began to train again
        self._forming: Forming | None = None
        self._groups: GenerationGroups = {}
        self.carry_outs: Mapping[type[act.Action], Callable[..., happened.Event | None]] = {
            act.ReportStatus: self._report_status,
            act.LeaveGroups: self._leave_groups,
            act.Doubt: self._doubt,
            act.GoOnAlone: lambda _: None,  # `BrokenSteps.meet` does
            act.BeginForming: self._begin_forming,
            act.AwaitCopies: self._await_copies,
            act.AwaitGroups: self._await_groups,
            act.ReportRestored: self._report_restored,
            act.ReportRestoreFailure: self._report_failure,
            act.OpenGeneration: self._open_generation,
            act.DiscardDistrusted: self._discard_distrusted,
            act.AssignBuddies: self.assign_buddies,
            act.SavePart: self._save_part,
            act.ReportSaved: self._report_saved,
            **self._taking.carry_outs,
        }
        self._layouts = state.track_layouts(self._worker)

    def begin_finish(self) -> None:
        """This rank finishes the step by itself, from now on."""
        self._finish_started_ns = time.monotonic_ns()

    def begin_step(self) -> None:
        """Every attempt of a step begins with the same state of the communication, whatever came before."""
        self._layouts.begin_step()

    def before_barrier(self) -> None:
        """Values on which prepared ranks must have agreed."""
        protection = self._runtime.protection
        launches = protection.launches, protection.launches_of_all
        self._layouts.settle()
        protection.launches, protection.launches_of_all = launches  # the script has launched nothing

    # --- carrying out -----------------------------------------------------------------------------------------------
    def run(self, actions: act.Actions) -> None:
        """Carry out what was decided, and what follows from it. Returns once this rank trains on."""
        runtime, worker = self._runtime, self._worker
        runtime.protection.in_step = False
        if actions:
            runtime.page.stamp(Phase.PARKED)
        while True:
            event = self._carry_out(actions)
            if worker.state is State.OUTSIDE:
                break
            if event is None:
                event = self._await_event()
            with runtime.orders.lock:
                actions = worker.handle(event)
                if act.OpenGeneration() in actions:
                    runtime.open_generation(self._groups)
        self.resumed_ns = time.monotonic_ns()
        runtime.page.show_prepared(-1)

    def hold_for_save(self) -> None:
        """The script has failed in this process, and it will be killed; but its state may be the last there is."""
        self.run(())

    def _carry_out(self, actions: act.Actions) -> happened.Event | None:
        """One action after another; the last one may end with an event."""
        event = None
        try:
            for action in actions:
                event = self.carry_outs[type(action)](action)
        except Superseded:
            return happened.Ordered()
        except RestoreError as error:
            if self._worker.state not in (State.COPYING, State.FORMING):
                raise
            return happened.RestoreFailed(str(error))
        return event

    def _await_event(self) -> happened.Event:
        """Wait for the order that decides what comes next."""
        runtime, worker = self._runtime, self._worker
        if worker.state is State.ORDERED:
            return happened.StepLeft()
        runtime.orders.await_ready()
        if worker.state is State.RESTORED and not worker.is_superseded:
            runtime.page.put("fault_ns", 0)  # one that this process survived is not what it may die of later
            runtime.faults.strike(Point.RESUME)
        return happened.Ordered()

    def _doubt(self, action: act.Doubt) -> None:
        self._runtime.notices.doubt(action.reason)

    def _report_status(self, action: act.ReportStatus) -> None:  # noqa: ARG002
        self._runtime.report_status()

    def _leave_groups(self, action: act.LeaveGroups) -> None:  # noqa: ARG002
        self._runtime.groups.detach()
        self._state.sharded.reset()
        self._state.pipelines.reset()

    def _begin_forming(self, action: act.BeginForming) -> None:  # noqa: ARG002
        runtime, order = self._runtime, self._order
        runtime.notices.note_recovery(order.target, runtime.holdings.standing_risk(recovers=True))
        self._taking.work = RestoreWork(
            finish_seconds=_seconds_since(self._finish_started_ns), began_ns=time.monotonic_ns()
        )
        self._finish_started_ns = 0
        self._forming = runtime.begin_forming(order.generation, runtime.groups.table.to_form(runtime.rank))

    def _await_copies(self, action: act.AwaitCopies) -> None:  # noqa: ARG002
        self._snapshots.before_write()
        self._taking.work.began_ns = time.monotonic_ns()

    @property
    def _order(self) -> Restore:
        order = self._worker.order
        assert isinstance(order, Restore)
        return order

    # --- the last checkpoint ----------------------------------------------------------------------------------------
    def _save_part(self, action: act.SavePart) -> happened.Event:  # noqa: ARG002
        """The job is to end: this rank's part of a last checkpoint. What goes wrong ends the job without one."""
        order = self._worker.order
        assert isinstance(order, Save)
        try:
            return happened.PartSaved(path=self._tiers.checkpointing.save(order))
        except StepInterrupted:
            return happened.Ordered()  # there is a newer order
        except (CheckpointError, OSError, RuntimeError, MemoryError) as problem:
            return happened.PartSaved(error=f"rank {self._runtime.rank}: {problem}")

    def _report_saved(self, action: act.ReportSaved) -> None:
        runtime, order = self._runtime, self._worker.order
        assert order is not None
        saved = Saved(
            process=runtime.process,
            generation=order.generation,
            version=order.target,
            path=action.path,
            error=action.error,
        )
        runtime.link.send(saved, report=True)

    # --- the end of a restore ---------------------------------------------------------------------------------------
    def _await_groups(self, action: act.AwaitGroups) -> happened.GroupsFormed:  # noqa: ARG002
        runtime, work = self._runtime, self._taking.work
        if runtime.rank in self._order.targets:
            work.copy_seconds = _seconds_since(work.began_ns)
        runtime.faults.strike(Point.ROLLBACK)
        started_ns = time.monotonic_ns()
        self._layouts.reset()
        work.rollback_seconds = _seconds_since(started_ns)
        started_ns = time.monotonic_ns()
        work.digest = self._state.replica.digest(work.known, self._taking.began_with)
        work.digest_seconds = _seconds_since(started_ns)
        started_ns = time.monotonic_ns()
        assert self._forming is not None
        self._groups = runtime.orders.await_formed(self._forming, self._order.generation)
        work.reform_seconds = _seconds_since(started_ns)
        return happened.GroupsFormed()

    def _report_restored(self, action: act.ReportRestored) -> None:  # noqa: ARG002
        runtime, worker, work = self._runtime, self._worker, self._taking.work
        runtime.link.send(
            Restored(
                process=runtime.process,
                rank=runtime.rank,
                generation=self._order.generation,
                version=worker.version,
                lineage=worker.lineage,
                state_digest=work.digest,
                layout_digest=self._state.replica.layout(),
                progress=RestoreProgress(
                    finish_seconds=work.finish_seconds,
                    reform_seconds=work.reform_seconds,
                    copy_seconds=work.copy_seconds,
                    copied_bytes=work.copied_bytes,
                    digest_seconds=work.digest_seconds,
                    rollback_seconds=work.rollback_seconds,
                ),
                alone=worker.alone,
            ),
            report=True,
        )

    def _report_failure(self, action: act.ReportRestoreFailure) -> None:
        order = self._worker.order
        assert order is not None
        self._runtime.reports.restore_failed(order.generation, action.evidence)

    def _open_generation(self, action: act.OpenGeneration) -> None:  # noqa: ARG002
        """The groups are attached already, while no order could arrive."""
        resume: Resume = self._worker.orders[Resume]
        self._runtime.notices.doubts_of_job = resume.doubts

    def _discard_distrusted(self, action: act.DiscardDistrusted) -> None:
        self._tiers.checkpointing.discard(action.version)  # also what other ranks still wrote of them

    def assign_buddies(self, action: act.AssignBuddies) -> None:
        """Set which rank keeps whose snapshots from here on, and which ranks write checkpoints."""
        self._snapshots.assign(action.buddies, action.keep)
        self._tiers.checkpointing.assign(action.writers)


def _seconds_since(start_ns: int) -> float:
    return (time.monotonic_ns() - start_ns) / 1e9 if start_ns else 0.0
