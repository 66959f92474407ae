"""A step that a failure elsewhere has broken, not the script: recognized, given up, and recovered from."""

import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from relight.core.protocol.position import Phase
from relight.core.worker import actions as act
from relight.core.worker.events import Interrupted, StepLeft, WaitsBetweenSteps
from relight.errors import StepInterrupted, UsageError
from relight.script_files import is_script_file
from relight.training.torch_private.script_modes import hidden_from_modes
from relight.training.transaction.needs import listed
from relight.training.worker.inventory import Inventory
from relight.training.worker.position import show_position
from relight.training.worker.script_checks import ScriptChecks
from relight.words import described, first_line


class BrokenSteps:
    """Undoes attempts at steps, on the main thread, outside of the block."""

    def __init__(self, parts: Inventory, checks: ScriptChecks) -> None:
        self._parts = parts
        self._runtime = parts.runtime
        self._checks = checks
        parts.code_between.recover = self.meet

    def is_interruption(self, error: Exception) -> bool:
        """Return whether this exception comes from a failure elsewhere rather than from the script.

        A script may turn what a broken collective raised into an exception of any other kind: by a `finally` that
        reads a name which was not set, for example. An error of its own comes again when the step is repeated.
        """
        if isinstance(error, UsageError):
            return False
        if isinstance(error, StepInterrupted):
            return True
        summary = first_line(error)[:200]
        if isinstance(error, dist.DistBackendError):
            return self._runtime.reports.await_stop(summary)
        return self._runtime.protection.await_verdict(summary)

    def undo(self, error: BaseException) -> None:
        """Give up the attempt that this exception has ended, and recover."""
        line = _line_of(error)
        drop_frames(error)
        self._runtime.synchronize()  # the attempt may have used any stream
        self._parts.transaction.give_memory_back()
        changed = self._parts.transaction.unimaged_changes()
        torn_by = self._tell_of_torn(listed(changed) if changed else "", line)
        if self._runtime.worker.passed:
            self._parts.transaction.interrupted_after_barrier()
        of_state = "" if self._runtime.worker.passed else self._parts.transaction.changed_state()
        for reason in (of_state, self._parts.carried.roll_back()):
            if reason:
                self._runtime.notices.doubt(reason)
        self.recover(self._runtime.handle(StepLeft(can_be_undone=not changed, torn_by=torn_by)))
        self._parts.transaction.begin_code_after_undo()

    def _tell_of_torn(self, changed: str, line: str) -> str:
        """Say why this step can be neither finished nor undone, if so; `changed` has no earlier copy.

        Returns the reason in short, or an empty string.
        """
        worker, runtime = self._runtime.worker, self._runtime
        reason = cause = ""
        at = f" at {line}" if line else ""
        if worker.passed:
            cause = f"in step {worker.version} a collective came after the write{at}, where none had come before"
            reason = f"was interrupted after its write{at}, by a collective that it waited for there"
        elif changed:
            cause = (
                f"in step {worker.version} {changed} had changed before the write for the first time in many steps, "
                f"when it was interrupted{at}"
            )
            reason = (
                f"was interrupted{at}, and {changed} had changed before its write for the first time in many steps, so "
                "nothing was kept to undo that"
            )
        if reason:
            runtime.notices.say(
                "torn",
                f"rank {runtime.rank}: step {worker.version} {reason}. It is restored from an intact rank; if there is "
                "none, the job goes back to buddy memory or a checkpoint, or ends",
            )
        return cause

    def recover(self, actions: act.Actions) -> None:
        """Carry out what the worker decided, until it trains again."""
        parts, runtime = self._parts, self._runtime
        runtime.protection.after_recovery = False
        parts.recovery.run(actions)
        while not self._gather():
            parts.recovery.run(runtime.handle(Interrupted()))
        self._train_again()
        if not runtime.worker.runs_code:
            show_position(runtime)
            runtime.protection.after_recovery = True

    def meet(self, collective: int) -> bool:
        """Recover inside the collective of this number between two epochs. False: this rank goes on alone."""
        parts, runtime = self._parts, self._runtime
        parts.private.see_code(runtime.worker.version, parts.transaction.see_code_between())
        with hidden_from_modes(), torch.inference_mode(mode=False), torch.enable_grad():
            parts.recovery.run(runtime.handle(WaitsBetweenSteps(collective)))
            if not runtime.worker.closed:
                self._train_again()
                parts.transaction.watch_code()
        runtime.page.stamp(Phase.OUTSIDE)
        return not runtime.worker.closed

    def _train_again(self) -> None:
        """Begin to train in a new generation."""
        parts, runtime = self._parts, self._runtime
        parts.transaction.reset()
        parts.phases.open_gates()
        parts.publishing.confirm(runtime.worker.version)
        parts.scalars.catch_up()

    def give_up_rehearsal(self, error: Exception) -> bool:
        """Undo a standby's rehearsal that raised: it was alone, without values of others. Return whether it goes on."""
        if isinstance(error, UsageError):
            return False
        self._runtime.notices.say(
            "rehearsal",
            f"a standby's rehearsal of a step ended early ({described(error)}). It was alone, "
            "without values of other ranks. It takes a rank all the same, and its first step there takes longer",
        )
        drop_frames(error)
        self._parts.carried.roll_back()
        return True

    def leave_code_between_steps(self) -> None:
        """All ranks come here: from here on, collectives are of all of them again."""
        protection = self._runtime.protection
        if protection.after_recovery:
            protection.after_recovery = False
            self._parts.state.sharded.reset()  # an evaluation may have gathered what was cut short

    def _gather(self) -> bool:
        """Get the parameters that other ranks update (ZeRO): not all may have come before the failure.

        Only what a rank updates itself belongs to its state, so a failure in here is one like any other. False: it
        struck.
        """
        zero = self._parts.state.zero
        zero.gather()
        return not zero or not self._runtime.closed


def _line_of(error: BaseException) -> str:
    """Return the line of the script at which an exception came up, or an empty string."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if is_script_file(frame.filename)]
    return lines[-1] if lines else ""


def drop_frames(error: BaseException) -> None:
    """Drop the frames of an exception, and of all that it was raised from, which may be itself (`raise e from e`).

    They hold the broken group and the activations of the aborted step.
    """
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        left += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]
