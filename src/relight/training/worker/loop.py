"""The loop of one process: steps are offered, and each is committed, or undone and offered again."""

import functools
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch

from relight.core.protocol.events import StepResumed
from relight.core.protocol.fault import Point
from relight.core.protocol.position import Phase
from relight.core.worker import actions as act
from relight.core.worker import events as happened
from relight.core.worker.states import State
from relight.errors import UsageError
from relight.training.carried.code.source import frame_of_block
from relight.training.step import Step
from relight.training.torch_private.script_modes import hidden_from_modes, unseen
from relight.training.worker.broken_steps import BrokenSteps
from relight.training.worker.epochs import asking
from relight.training.worker.examine import examine
from relight.training.worker.inventory import Inventory
from relight.training.worker.lineage import next_lineage
from relight.training.worker.membership import Membership
from relight.training.worker.position import show_position
from relight.training.worker.script_checks import ScriptChecks
from relight.training.worker.stand_ins import StandIns

_NOT_ENTERED = "the loop took a step but did not enter it: write `with step as batch:` in its body"
# Looked up once: each look-up in an enumeration takes 0.1 us.
_DONE, _OUTSIDE = State.DONE, State.OUTSIDE
_FORWARD, _PHASE_OUTSIDE = Phase.FORWARD, Phase.OUTSIDE
_BETWEEN_STEPS, _AFTER_WRITE, _AFTER_STEP = Point.BETWEEN_STEPS, Point.AFTER_WRITE, Point.AFTER_STEP
# Made once: a step allocates none of them.
_WANTED = happened.StepWanted()
_ENTERED = happened.StepEntered()
_RESUMED = act.ReportResumed()


class StepLoop:
    """Made once for a process; see `Training.steps`."""

    def __init__(self, parts: Inventory, end_with: Callable[[BaseException], NoReturn]) -> None:
        self._parts = parts
        self._runtime = parts.runtime
        self._worker = parts.runtime.worker
        self._state = parts.state
        self._carried, self.epoch_of = parts.carried, parts.batches.epoch
        self._forward_ns = 0  # when the step under way began
        self._transaction = parts.transaction
        self._checks = ScriptChecks(parts)
        self._broken_steps = BrokenSteps(parts, self._checks)
        self._stand_ins = StandIns()
        self._membership = Membership(parts, self._checks, self._broken_steps, end_with)
        self._state.references.expect_steps(Step, functools.partial(Step.committed_before, self))

    def run(self, until: int, called_at: Sequence[tuple[str, int]]) -> Generator[Step]:
        """Steps until so many are committed on every rank. `called_at`: the lines of the script that asked for them."""
        self._checks.look_at_loop(asking(sys._getframe(1)), called_at)
        self._worker.until = until
        with hidden_from_modes():
            self._parts.install()
        try:
            if self._runtime.is_standby:
                # If it builds late, a Stop may come at any time, and would cut the rehearsal short.
                self._runtime.protection.started = not self._runtime.builds_late
                if not self._state.pipelines:  # a stage alone has no input
                    yield from self._rehearse()
                self._membership.stand_by()
            else:
                self._membership.enter()
            while True:
                yield from self._offer()
                if self._membership.finish():
                    if self._worker.left is None and self._worker.version < self._worker.until:
                        raise SystemExit(0)  # what the script does after training is not due yet
                    doubts = self._carried.turn(sys._getframe()), self._carried.doubts.later()
                    for doubt in filter(None, (*doubts, self._carried.end(computed=self._worker.commits > 0))):
                        self._runtime.notices.doubt(doubt)
                    return
        except GeneratorExit:
            self._membership.leave(asking(sys._getframe(1)))
            raise
        finally:
            with hidden_from_modes():
                self._parts.remove()

    # --- offering ---------------------------------------------------------------------------------------------
    def _rehearse(self) -> Iterator[Step]:
        """A step of which nothing is kept: the script compiles, allocates, and shows DDP its order."""
        self._runtime.faults.strike(Point.WARMUP)
        self._runtime.is_rehearsing = True
        with hidden_from_modes():
            self._begin_turn()
        step = self._membership.offered = Step(self, 0, 0, warmup=True)
        yield step
        if not step.entered:
            raise UsageError(_NOT_ENTERED)
        self._runtime.is_rehearsing = False
        with hidden_from_modes():
            self._carried.roll_back()
            self._state.attributes.roll_back()

    def _offer(self) -> Iterator[Step]:
        while True:
            self._checks.refuse_other_modes()
            with hidden_from_modes():
                step = self._make_step()
            if step is None:
                return
            yield step
            if not step.entered:
                raise UsageError(_NOT_ENTERED)

    def _make_step(self) -> Step | None:
        """The next step; None once all are committed here."""
        runtime, worker, parts = self._runtime, self._worker, self._parts
        self._stand_ins.drop()
        while True:
            self._transaction.undo_code()
            if worker.runs_code:
                worker.runs_code = False
                return self._membership.run_code(Step.committed_before(self, worker.version - 1, 0))
            changed = self._transaction.see_code_between() if self._carried.computes_outside else ()
            parts.private.see_code(worker.version, changed)
            self._broken_steps.leave_code_between_steps()
            self._membership.ask_whether_to_go_on()
            actions = worker.handle(_WANTED)
            if worker.state is _DONE:
                return None
            if worker.state is not _OUTSIDE:
                self._broken_steps.recover(actions)
                continue
            self._begin_turn()
            show_position(self._runtime)
            parts.publishing.between_steps()
            parts.checkpointing.between_steps()
            parts.snapshots.between_steps()
            runtime.faults.strike(_BETWEEN_STEPS)
            if runtime.page.asked_to_leave:
                runtime.leave()
            step = self._membership.offered = Step(self, worker.version, worker.attempt)
            return step

    def _begin_turn(self) -> None:
        """The loop asks for a step: a failed attempt goes back to here. Code above the block runs again with it."""
        runtime, worker = self._runtime, self._worker
        doubts = self._carried.turn(sys._getframe()), self._carried.doubts.later()
        for doubt in filter(None, doubts if not runtime.is_rehearsing else ()):
            runtime.notices.doubt(doubt)
        self._carried.compare(worker.version)
        if not runtime.is_rehearsing and self._parts.private.is_due(worker.version):
            show_position(runtime)  # first: code between two steps that is kept with it must not be run again
            self._parts.private.keep(worker.version, between=True)
        self._carried.remember(compared=not runtime.is_rehearsing)
        if self._carried.computes_above:
            self._parts.batches.begin_turn(worker.version, self._parts.assignment.batch_index)
        if runtime.is_rehearsing:
            self._state.attributes.begin(learning=True)  # also what is changed in place is undone
        else:
            is_end = self._state.ends_late and self._carried.ends_epoch(worker.version + 1)
            self._transaction.begin(keeps_gradients=self._parts.repeat_check.is_due, to_end=is_end)
            worker.comes = self._parts.code_between.follows(worker.version + 1)

    def enter_step(self, step: Step) -> Any:
        """`with step`: FORWARD begins with drawing the batch."""
        runtime, parts = self._runtime, self._parts
        self._checks.enter_block()
        with hidden_from_modes():
            self._begin_block(frame_of_block(sys._getframe(2)))
        if runtime.is_rehearsing:
            batch = parts.batches.rehearse(parts.assignment.batch_index)
        else:
            batch = parts.batches.get(step.number, parts.assignment.batch_index)
            if parts.evidence is not None:
                parts.evidence.begin(step.number)
        runtime.synchronize_stream()  # of copies: the block may use any stream
        return batch

    def _begin_block(self, frame: FrameType) -> None:
        """The step counts as entered, from this frame of the script."""
        runtime, worker, parts = self._runtime, self._worker, self._parts
        if runtime.is_rehearsing:
            worker.passed = worker.wrote = False
        else:
            worker.handle(_ENTERED)
        runtime.page.show_prepared(-1)
        runtime.protection.in_step = True
        parts.writes.begin_step()
        runtime.page.stamp(_FORWARD)
        self._forward_ns = time.monotonic_ns()
        parts.scalars.begin_step()
        parts.recovery.begin_step()
        if (doubt := self._carried.enter(frame, self._worker.version)) is not None and not runtime.is_rehearsing:
            runtime.notices.doubt(doubt)
        if self._carried.computes_above and not runtime.is_rehearsing:
            self._transaction.enter_block()
        self._checks.look_at_block(frame)
        if not runtime.is_rehearsing:
            parts.barrier.agreement.compare_rank_values()
            if runtime.settings.examined:
                examine(parts)

    def exit_step(self, step: Step, error: BaseException | None) -> bool:
        """The end of the block: commit, or absorb what a failure elsewhere caused, or let the script's error pass."""
        if self._parts.evidence is not None:
            self._parts.evidence.end()
        self._checks.leave_block(error)
        with hidden_from_modes():
            is_absorbed = self._end_block(step, error)
            if is_absorbed:
                block = frame_of_block(sys._getframe(2))
                self._stand_ins.set(block, all_names=self._parts.batches.has_other_sizes)
            return is_absorbed

    def _end_block(self, step: Step, error: BaseException | None) -> bool:
        try:
            if error is None:
                self._complete(step)
                return False
        except Exception as broken:
            if step.committed or not self._broken_steps.is_interruption(broken):
                raise
            error = broken
        else:
            if self._runtime.is_rehearsing:
                return isinstance(error, Exception) and self._broken_steps.give_up_rehearsal(error)
            if not isinstance(error, Exception) or not self._broken_steps.is_interruption(error):
                return False
        finally:
            self._runtime.protection.in_step = False
        self._broken_steps.undo(error)
        return True

    @unseen
    def report(self, loss: torch.Tensor | float | None, values: dict[str, torch.Tensor | float]) -> None:
        if self._runtime.is_rehearsing:
            return
        self._parts.scalars.report(values if loss is None else {"loss": loss, **values})
        if loss is not None:
            self._checks.show_loss(loss)

    # --- committing -------------------------------------------------------------------------------------------
    def _complete(self, step: Step) -> None:
        runtime, worker, parts = self._runtime, self._worker, self._parts
        if runtime.is_rehearsing:
            return  # code after the block sees what it has left: `losses[-1]`
        self._checks.see_update(trained=worker.wrote or self._transaction.wrote_parameters)
        if not worker.passed and self._is_to_be_repeated():
            return
        if worker.passed:
            parts.recovery.before_barrier()  # of the next step: a wrapper may have been used for the first time since
        parts.barrier.at_end()
        runtime.synchronize()
        runtime.faults.strike(_AFTER_WRITE)
        self._transaction.commit()
        surprise = self._checks.describe_surprise(step.number) if self._transaction.surprise else ""
        lineage = next_lineage(worker.lineage, worker.version, runtime.world_size)
        actions = worker.handle(happened.StepFinished(lineage, surprise))
        if surprise:
            _keep_what_a_surprise_left(parts, actions)
        self._carried.commit()
        parts.writes.end_step()
        runtime.page.commit(worker.version, worker.commits)
        step.committed = True
        runtime.protection.in_step = False
        parts.batches.done()
        self._checks.warn_of_stray_data()
        runtime.page.stamp(_PHASE_OUTSIDE)
        parts.scalars.commit(step.number)
        if parts.evidence is not None:
            parts.evidence.commit(step.number, runtime.rank, runtime.generation, step.attempt)
        if _RESUMED in actions:
            _report_first_commit(parts, step, self._forward_ns)
        runtime.faults.strike(_AFTER_STEP)  # a recovery that waits for this step comes after code between steps

    def _is_to_be_repeated(self) -> bool:
        """Once, early in a job: undo the step and have it computed again, to see whether the bits are the same."""
        self._runtime.groups.await_launched()
        self._runtime.synchronize()  # the attempt may have used any stream
        if not self._parts.repeat_check.wants_another():
            return False
        self._transaction.roll_back()
        self._state.gradients.put_back()
        self._parts.repeat_check.see_undone(self._carried.roll_back(), self._carried.doubts.of_undone())
        self._runtime.page.stamp(Phase.OUTSIDE)
        self._runtime.handle(happened.StepUndone())
        self._transaction.begin_code_after_undo()
        return True


def _keep_what_a_surprise_left(parts: Inventory, actions: act.Actions) -> None:
    """All is well after a surprise, unless a failure struck inside: then the bits are doubted."""
    for action in actions:
        if isinstance(action, act.KeepPrivateAnew):
            parts.private.keep(parts.runtime.worker.version)
        elif isinstance(action, act.Doubt):
            parts.runtime.notices.doubt(action.reason)


def _report_first_commit(parts: Inventory, step: Step, forward_ns: int) -> None:
    """Report the first step that is committed after a recovery; its forward pass began at `forward_ns`."""
    runtime = parts.runtime
    runtime.link.send(
        StepResumed(
            process=runtime.process,
            rank=runtime.rank,
            generation=runtime.generation,
            step=step.number,
            resumed_ns=parts.recovery.resumed_ns,
            forward_ns=forward_ns,
            commit_ns=time.monotonic_ns(),
        )
    )
