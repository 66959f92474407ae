"""Mistakes of a script, noticed in its code or in the state after its steps: refused, warned of or made a doubt."""

import ast
import math
from collections.abc import Sequence
from types import FrameType

import torch

from relight.errors import UsageError
from relight.training.carried.code.misuse import accumulates_by_hand, returns_from, takes_steps_in, yields_inside
from relight.training.torch_private.script_modes import Modes, modes_now, names_of_modes, return_to
from relight.training.worker.inventory import Inventory

_MODES = (
    "a step has entered or left a mode of torch ({names}), and later steps run with that. A replacement would not: "
    "enter it before the loop, or for the time of a block by `with`"
)


class ScriptChecks:
    """Checks the loop of one process."""

    def __init__(self, parts: Inventory) -> None:
        self._parts = parts
        self._runtime = parts.runtime
        self._looked_at_block = False
        self._saw_update = False  # some step of this process trained something
        self._modes_of_loop: Modes | None = None  # that the script is in when it asks for a step
        self._modes_of_block: Modes = ((), ())  # and where the block of the step under way began

    def look_at_loop(self, frame: FrameType, called_at: Sequence[tuple[str, int]]) -> None:
        """Refuse, before the first step, a loop that a repeated step would take further; see `takes_steps_in`."""
        if place := takes_steps_in(frame, called_at):
            raise UsageError(
                f"{place}: the script takes steps one by one, inside a loop of its own. That loop goes on when a "
                "step is computed again, so it would end too early, and data would be passed over. Let the loop be "
                "`for step in training.steps(until=...)`, with relight.Training(data=...), or step.number to choose "
                "the batch"
            )

    def look_at_block(self, frame: FrameType) -> None:
        """Refuse what the code of the block shows to be wrong, before anything is computed.

        Args:
            frame: that holds the block.
        """
        if self._looked_at_block:
            return
        self._looked_at_block = True
        if place := yields_inside(frame):
            raise UsageError(
                f"{place}: `with step` in a generator, around a `yield`. A failure that strikes while the code that "
                "iterates over the generator runs does not reach the block: put `with step` into that code"
            )
        if place := returns_from(frame):
            raise UsageError(
                f"{place}: `return` of a value inside `with step`. A block that a failure interrupts does not come to "
                "it: the function would return None, and the code that called it fail. Put the `return` after the block"
            )
        state = self._parts.state

        def is_optimizer(expression: ast.expr) -> bool:
            name = expression.id if isinstance(expression, ast.Name) else ""
            value = frame.f_locals.get(name, frame.f_globals.get(name))
            return state.identities.name_of(value) in state.optimizers

        if place := accumulates_by_hand(frame, is_optimizer):
            raise UsageError(
                f"{place} calls optimizer.step() in some steps only, while every step adds to the gradients: gradients "
                "that are carried from step to step are lost with a failure. Put the whole accumulation into one step: "
                "relight.Training(..., accumulate=K), and one optimizer.step() for each"
            )

    # --- modes ------------------------------------------------------------------------------------------------
    def refuse_other_modes(self) -> None:
        """Raises UsageError if steps have entered or left a mode for good, which a replacement would not do."""
        modes = modes_now()
        if self._modes_of_loop is None:
            self._modes_of_loop = modes
        elif modes != self._modes_of_loop:
            raise UsageError(_MODES.format(names=names_of_modes(modes, self._modes_of_loop)))

    def enter_block(self) -> None:
        """The block begins."""
        self._modes_of_block = modes_now()

    def leave_block(self, error: BaseException | None) -> None:
        """The block has ended: a step that is undone leaves the modes that it has entered.

        Raises:
            UsageError: one that is complete has entered or left a mode.
        """
        if modes_now() == self._modes_of_block:
            return
        if error is None:
            raise UsageError(_MODES.format(names=names_of_modes(modes_now(), self._modes_of_block)))
        return_to(self._modes_of_block)

    # --- what steps leave -------------------------------------------------------------------------------------
    def see_update(self, *, trained: bool) -> None:
        """The block of a step has ended. Warn of gradients that are pending if it trained nothing."""
        self._saw_update |= trained
        gradients = self._parts.state.gradients
        if trained or gradients.are_kept or not gradients.have_come():
            return
        self._runtime.notices.say(
            "accumulate",
            "a step ended with gradients but without optimizer.step(): gradients carried from step to step are "
            "lost with a failure. Put the whole accumulation into one step: relight.Training(..., accumulate=K)",
        )
        self._runtime.notices.doubt_if_lost_after(
            self._runtime.worker.version,
            "a step ended with gradients but without optimizer.step(), and a recovery threw them away. Put the "
            "whole accumulation into one step: relight.Training(..., accumulate=K)",
        )

    def warn_of_stray_data(self) -> None:
        """Warn after a step that read a DataLoader which was not handed over."""
        if stray := self._parts.batches.stray:
            rank = self._runtime.rank
            self._runtime.notices.say(
                "stray", f"rank {rank}: {stray}. Hand the DataLoader over: relight.Training(data=...)"
            )

    def warn_of_nothing_trained(self) -> None:
        """Warn after the last step if no step trained anything."""
        worker = self._runtime.worker
        if worker.commits and not self._saw_update and self._parts.state.gradients.are_waiting():
            self._runtime.notices.say(
                "nothing trained",
                f"{worker.commits} steps had gradients, and none of them called optimizer.step(): the model is what "
                "it was at the start",
            )

    def describe_surprise(self, number: int) -> str:
        """Say what came after an early barrier and used not to come there; return it as a reason to doubt the bits."""
        surprise, rank = self._parts.transaction.surprise, self._runtime.rank
        self._runtime.notices.say(
            "surprise",
            f"rank {rank}: in step {number}, {surprise} came after the last write, where none had come before. "
            f"From step {number + 2} on at the latest, each step is protected to its end, at the price of a copy of "
            "what it writes",
        )
        return f"a failure struck in step {number}, in which {surprise} came unexpectedly after the last write"

    def show_loss(self, loss: torch.Tensor | float) -> None:
        """Show the loss in the progress line; one on a device would cost a wait, and is not shown."""
        if isinstance(loss, torch.Tensor):
            if loss.device.type != "cpu":
                return
            loss = float(loss.detach())
        self._runtime.page.report_loss(loss)
        if math.isnan(loss):
            self._runtime.notices.say(
                "nan",
                f"rank {self._runtime.rank}: the loss of step {self._runtime.worker.version} is NaN. Training goes on: "
                "the same bits would give NaN again, so no recovery helps; look at the learning rate, or clip "
                "gradients",
            )
