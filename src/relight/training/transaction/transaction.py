"""One step as a transaction: what must be copied before it changes, where the barrier stands, and how all is undone."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from relight.core.worker.pattern import Learner, Pattern, observed
from relight.training.state.modules.slots import Key
from relight.training.torch_private.script_modes import unseen
from relight.training.transaction.changes import ChangeWatch
from relight.training.transaction.image_plan import ImagePlan
from relight.training.transaction.needs import CarriedState, LaunchCount, Needs, NothingCarried, Streams, listed
from relight.training.transaction.step_images import StepImages

if TYPE_CHECKING:
    from relight.training.state.tracked import TrackedState

_STATE_CHANGED = (
    "{}: a step changed it in front of optimizer.step(), for the first time in many steps, and was interrupted, so "
    "that it has changed twice. Change it in every step, or after optimizer.step()"
)


class Transaction:
    """One step at a time, on the main thread.

    A step calls `begin`, `before_write` in front of each write, `prepare` in front of the barrier, and `commit`; or
    `roll_back` at any point before the barrier, and after it as long as nothing was written.
    """

    def __init__(
        self,
        state: "TrackedState",
        collectives: LaunchCount,
        carried: CarriedState | None = None,
        streams: Streams | None = None,
    ) -> None:
        self._state, self._attributes = state, state.attributes
        self.learner = Learner()
        self._changes = ChangeWatch(state.slots, state.attributes)
        self._images = StepImages(state, self._changes.access)
        self.enter_block = self._images.above.remember  # to be called as the block begins, if code stands above it
        self.watch_code = self._changes.start  # to be called where code between steps goes on after a recovery
        self._plan = ImagePlan(state, self._changes, self._images.tensors)
        self._needs = Needs(state, collectives, carried or NothingCarried(), streams)
        self._unused = set(self._state.optimizers)  # that have made no step since ranks last began to learn
        self.is_open = self.has_new_writer = False  # the step under way: can be undone; is some optimizer's first one
        self._is_early = self._is_to_end = False  # its barrier was passed in front of a write; it stands at the end
        self._writes: list[str] = []
        self.surprise = ""  # what came after an early barrier, against what was learnt

    def install(self) -> None:
        """Watch changes until `remove`: for the time of the loop."""
        self._attributes.install(self)
        self._changes.install(self._state.wrappers(), self._before_reach, self._before_method)

    def remove(self) -> None:
        """Watch no more."""
        self._changes.remove()
        self._attributes.remove()

    def reset(self) -> None:
        """Learn anew on all ranks, after a recovery: a replacement has seen no step."""
        self.learner = self.learner.anew()
        self._plan.reset()
        self._unused = set(self._state.optimizers)
        self._changes.forget()

    # --- queries ------------------------------------------------------------------------------------------------
    @property
    def wrote(self) -> bool:
        """True if the step under way has begun to write."""
        return bool(self._writes)

    @property
    def wrote_parameters(self) -> bool:
        """True if the step under way has changed parameters, with or without an optimizer."""
        changed = (*self._changes.newer(self._changes.scan()), *self._changes.written_by_data())
        return any(key in self._state.slots.parameters for key in changed)

    @property
    def pattern(self) -> Pattern:
        """The places where the barrier may stand, by this step."""
        learnt = self.learner.learnt
        if learnt is not None and (self._is_early or not self._writes):
            return learnt
        return observed(
            self._writes, self._needs.stirred, more_expected=bool(self._unused) or self._needs.more_expected
        )

    @property
    def number(self) -> int:
        """The number that this rank adds to the barrier's all-reduce."""
        return self.learner.number(self.pattern)

    def see_code_between(self) -> list[Key]:
        """Return tensors that have changed since the last step ended: the next one begins with them."""
        if changed := self._changes.see_code_between():
            self._plan.see_code_between(changed)
        return changed

    def unimaged_changes(self) -> list[Key]:
        """Return tensors that the step under way has changed, or may have, and of which there is no earlier copy."""
        if not self.is_open:
            return []
        self._see_assigned_buffers()
        return self._plan.uncopied()

    def changed_state(self) -> str:
        """Say that the step under way has changed the state of an optimizer, of which there is no copy; or ""."""
        found = self.is_open and self._images.optimizers.changed()
        return _STATE_CHANGED.format(listed(found)) if found else ""

    def private_buffers(self, *, early: bool) -> set[Key]:
        """Return buffers that the step under way makes the rank's own, before `prepare` notes them.

        `early`: the barrier is in front of a write; or it is as if it were, and all that have changed count.
        """
        self._see_assigned_buffers()
        changes, averages = self._changes, self._state.averages
        found = self._plan.private_among([*changes.written(changes.scan()), *changes.written_by_data()], early=early)
        return found | averages.like(found) if averages else found

    # --- a step -------------------------------------------------------------------------------------------------
    def begin(self, *, keeps_gradients: bool = False, to_end: bool = False) -> None:
        """Copy what changes before the barrier, `to_end`: up to the end, and all gradients if `keeps_gradients`."""
        changes, learnt = self._changes, None if to_end else self.learner.learnt
        self._state.gradients.see(keep=keeps_gradients)
        self._writes, self._is_early, self._is_to_end, self.has_new_writer = [], False, to_end, False
        changes.access.clear()
        self._images.begin(learning=self._plan.learning, writes_come_last=learnt is not None and not learnt.before)
        if changes.buffers_were_assigned:
            changes.look_again()
        self._plan.begin(has_pattern=learnt is not None)
        start = changes.start()
        self._needs.begin(start if learnt is None else None)
        self.is_open = True
        changes.access.watch_methods(True)

    def before_write(self, writer: str, optimizer: str | None) -> bool:
        """Prepare for a write. Returns True if the barrier stands in front of it.

        Args:
            writer: a name for what writes.
            optimizer: its name, if it is an optimizer.
        """
        self.has_new_writer |= optimizer in self._unused
        self._unused.discard(optimizer or "")
        if self.learner.stands_before(self._writes) and not self._is_to_end:
            return True
        self._needs.note(self._changes.scan(), len(self._writes))
        keys = self._state.members.written_by(optimizer) if optimizer is not None else []
        self._plan.before_write(keys)
        if optimizer is not None:
            self._images.optimizers.take(optimizer)
        self._writes.append(writer)
        return False

    @unseen
    def before_mode(self, module: nn.Module) -> None:
        """Copy a module's buffers before it goes to training or evaluation. Called by `AttributeLog`."""
        if self.is_open and not self._is_early:
            self._plan.before_mode(module)

    @unseen
    def before_unusual_writes(self, average: nn.Module | None = None) -> None:
        """Copy all tensors, or those of an average that is about to move, before the step changes any of them."""
        if self.is_open and not self._is_early:
            self._plan.before_unusual_writes(average)

    @unseen
    def _before_reach(self, tensor: torch.Tensor) -> None:
        """Copy a parameter before the step may change it through `.data`, as no step did before."""
        if self.is_open and not self._is_early:
            self._plan.before_reach(tensor)

    @unseen
    def _before_method(self, parameter: torch.Tensor) -> None:
        """Copy a parameter before the step writes into it, with or without an optimizer."""
        self._plan.before_method(parameter)

    def prepare(self, *, early: bool) -> None:
        """Find out, in front of the barrier, what is private and what has changed; `early`: in front of a write."""
        if not early:
            self._needs.note(self._changes.scan(), len(self._writes))
        self._see_assigned_buffers()
        self._attributes.notice()
        self._is_early = early
        self._changes.access.watch_methods(not early)
        now = self._changes.scan()
        if self._plan.learning:
            self._learn()
        else:
            if self.has_new_writer:
                self._state.rank_private.see_own_numbers()
            self._plan.see_changes(now, early=early)
        self._state.rank_private.include_averages()
        if early:
            self._needs.pass_barrier(now)

    def count(self, total: int, ranks: int) -> None:
        """The barrier is passed: learn from `total`, the sum of `number` over all `ranks`."""
        self.learner = self.learner.count(self.pattern, total, ranks)

    def commit(self) -> None:
        """The step counts. Afterwards `surprise` says what came after an early barrier although nothing used to."""
        self._attributes.notice()  # what came after an early barrier
        now = self._changes.scan()
        lost = self._state.averages.commit() if self._state.averages else []
        self.surprise = self._needs.surprise(now, lost) if self._is_early else ""
        if self.surprise:
            self.learner = self.learner.surprised(everywhere=self._needs.needed_all)
        self.is_open = False
        self._changes.access.watch_methods(False)
        self._images.commit()
        self._plan.see_still(now)
        if self._changes.buffers_were_assigned:
            self._changes.look_again()
            now = self._changes.scan()
        self._plan.commit()
        self._changes.end(now)
        self._changes.access.clear()

    def give_memory_back(self) -> None:
        """Give tensors the memory in which they lay when the step began, before anything is written into them.

        A script that exchanges weights with an average through `.data` may have been interrupted in between.
        """
        if self.is_open:
            self._changes.access.put_back()

    def roll_back(self) -> None:
        """Make everything but the gradients what it was when the step began."""
        if self.is_open:
            self._images.put_back()
            self.close()

    def begin_code_after_undo(self) -> None:
        """Copy what code after the block may change, now that its step is undone: it comes again with the step."""
        self._images.begin_code()

    def undo_code(self) -> None:
        """Undo what that code has changed, before the next step begins."""
        if self._images.undo_code():
            self._changes.look_again()
            self._changes.access.clear()

    def close(self) -> None:
        """No step is under way; give up all copies."""
        self.is_open = self._is_early = False
        self._changes.access.watch_methods(False)
        self._writes = []
        self._images.drop()
        self._state.averages.forget()
        self._changes.look_again()
        self._changes.access.clear()

    def interrupted_after_barrier(self) -> None:
        """Only a collective that was not expected there can be."""
        self.learner = self.learner.surprised(everywhere=False)

    def _learn(self) -> None:
        """Learn from a step in which everything was copied."""
        at_end = self._plan.see_end()
        self._state.rank_private.see_own_numbers()
        if self._state.averages.unrepeatable(sorted(at_end)):
            self._needs.stirred = len(self._writes)
        self._plan.learn(self._needs.stirred)

    def _see_assigned_buffers(self) -> None:
        """Buffers that the step has assigned are state of this rank alone."""
        if self._changes.buffers_were_assigned:
            self._plan.see_assigned(self._changes.see_assigned())
