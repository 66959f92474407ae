"""Tensors that are copied before a step, and when: learnt from what earlier steps changed.

In a job's first steps all tensors are copied, and compared bit by bit. From then on only those are copied that have
changed without an optimizer's doing. A tensor that changes for the first time later cannot be put back in that step,
unless it is small enough that a copy was kept; it is copied from the next step on.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from relight.training.state.modules.slots import Key
from relight.training.state.values.bits import same_bits
from relight.training.transaction.changes import ChangeWatch
from relight.training.transaction.images import TensorImages
from relight.transfer.io.codec import local_part

if TYPE_CHECKING:
    from relight.training.state.tracked import TrackedState

LEARNING_STEPS = 3  # steps in which all tensors are copied and compared
_STILL_BYTES = 64 * 2**20  # for copies of tensors that no step has changed so far


class ImagePlan:
    """Takes copies of tensors into `TensorImages`."""

    def __init__(self, state: "TrackedState", changes: ChangeWatch, images: TensorImages) -> None:
        self._state = state
        self._slots = state.slots
        self._private = state.rank_private
        self._changes = changes
        self._images = images
        self._steps_to_learn = LEARNING_STEPS
        self._index = self._slots.index  # as of the last look for buffers that are gone
        # Tensors that steps change without an optimizer's doing: in front of the barrier's place, and after it.
        self._early: dict[Key, None] = {}
        self._late: dict[Key, None] = {}
        self._suspects: set[Key] = set()  # reached for through `.data`; it is not known yet whether they change
        self._to_check: set[Key] = set()  # suspects of the step before, of which this step has copies
        self._only_read: set[Key] = set()
        self._still: dict[Key, torch.Tensor] = {}  # copies of small tensors that no step has changed so far
        # In the step under way:
        self._written_at: list[set[Key]] = []  # parameters that each write may change
        self._changed_at: list[set[Key]] = []  # tensors that had changed before each write, while learning
        self._uncopied: dict[Key, None] = {}  # tensors that changed, or may have, before there was a copy

    @property
    def learning(self) -> bool:
        """True if everything is copied in this step."""
        return self._steps_to_learn > 0

    def reset(self) -> None:
        """Learn anew."""
        self._steps_to_learn = LEARNING_STEPS
        self._still = {}

    # --- a step -------------------------------------------------------------------------------------------------
    def begin(self, *, has_pattern: bool) -> None:
        """Copy tensors that are known to change before the barrier; `has_pattern`: its place is known."""
        self._forget_removed()
        self._written_at, self._changed_at, self._uncopied = [], [], {}
        self._to_check, self._suspects = self._suspects, set()
        if self._steps_to_learn:
            self._images.take(self._slots.keys)
            return
        self._images.take(self._private.buffers)
        self._images.take(self._early)
        if not has_pattern:
            self._images.take(self._late)

    def before_write(self, keys: list[Key]) -> None:
        """A write before the barrier is about to change the parameters `keys`: copy them, and see what changed."""
        if self._steps_to_learn:
            changed = self._changed()
            self._changed_at.append(changed)
            self._only_read.update(key for key in self._changes.reached_by_data() if key not in changed)
        else:
            self._note_newcomers(self._changes.written(self._changes.scan()))
        self._images.take(keys)
        self._written_at.append(set(keys))

    def see_assigned(self, assigned: list[Key]) -> None:
        """These buffers the step has assigned: they are state of this rank alone."""
        self._private.buffers.update(assigned)
        self._private.see_written(assigned)
        self._forget_removed()

    def _forget_removed(self) -> None:
        """Steps may have removed buffers (masks of pruned layers), where they were looked up since."""
        if self._slots.index is self._index:
            return
        self._index = index = self._slots.index
        self._private.buffers &= index.keys()
        self._early, self._late = ({key: None for key in found if key in index} for found in (self._early, self._late))
        self._suspects &= index.keys()
        self._still = {key: copied for key, copied in self._still.items() if key in index}

    def before_mode(self, module: torch.nn.Module) -> None:
        """A module goes to training or evaluation: its buffers may change from here on."""
        self._take_unwritten(self._slots.of_module(module))

    def before_unusual_writes(self, average: torch.nn.Module | None) -> None:
        """Any tensor, or any of an average, may change from here on, in this step and in few others."""
        slots = self._slots
        parts = {id(part) for part in (*average.parameters(), *average.buffers())} if average is not None else ()
        keyed = zip(slots.keys, slots.tensors, strict=True)
        self._take_unwritten(key for key, tensor in keyed if average is None or id(tensor) in parts)

    def _take_unwritten(self, keys: Iterable[Key]) -> None:
        """Copy these tensors, but for those that the step has changed already: a copy of these would be wrong."""
        if self._steps_to_learn:
            return  # all were copied as the step began
        reached = {*self._changes.written_by_data(), *filter(self._still.__contains__, self._changes.reached_by_data())}
        missing = (key for key in keys if key not in self._images and key not in reached)
        self._images.take(key for key in missing if not self._changes.is_written(key) or self._is_uncounted(key))

    def _is_uncounted(self, key: Key) -> bool:
        return self._slots.get(key).is_inference()

    def before_reach(self, tensor: torch.Tensor) -> None:
        """Copy a tensor whose `.data` is about to be read or set: what that changes shows only afterwards."""
        key = self._slots.by_id.get(id(tensor))
        if self._steps_to_learn or key is None or key in self._only_read or key in self._still:
            return
        if key not in self._images and not self._changes.is_written(key):
            self._images.take([key])
            self._early[key] = None
            self._suspects.add(key)

    def before_method(self, parameter: torch.Tensor) -> None:
        """Copy a parameter that is about to be written, unless it has been: by an optimizer, or without a method."""
        key = self._slots.by_id.get(id(parameter))
        if key is not None and key not in self._images and not self._changes.is_written(key):
            self._images.take([key])

    def see_end(self) -> set[Key]:
        """Return the tensors that have changed up to the barrier, while learning."""
        at_end = self._changed()
        self._changed_at.append(at_end)
        return at_end

    def learn(self, stirred: int) -> None:
        """Sort the tensors that this step changed. The barrier might have stood after `stirred` of its writes."""
        at_end = self._changed_at[-1]
        before = self._changed_at[stirred]
        self._private.buffers |= self._buffers_among(before)
        self.private_among(self._changes.written(self._changes.scan()), early=True)
        written: set[Key] = set()
        for index, changed in enumerate(self._changed_at):
            found = self._early if index <= stirred else self._late
            found.update(dict.fromkeys(sorted(changed - written)))
            written |= self._written_at[index] if index < len(self._written_at) else set()
        self._only_read.update(key for key in self._changes.reached_by_data() if key not in at_end)

    def see_changes(self, now: list[int], *, early: bool) -> None:
        """Note at the barrier, after learning, tensors that changed for the first time; `early`: in front of a write.

        Buffers that have changed by then are rank-private. At the end of the block an average has been moved already,
        alike on all ranks.
        """
        written = self._changes.written(now)
        self._note_newcomers(written)
        written += self._changes.written_by_data()
        if written:
            self._private.buffers |= self.private_among(written, early=early)

    def private_among(self, written: list[Key], *, early: bool) -> set[Key]:
        """Return the buffers among tensors that were changed by the barrier and are the rank's own for that."""
        found = {key for key in self._buffers_among(written) if early or self._state.members.trains(key)}
        self._private.see_written(found.difference(self._changes.written_by_data()))
        return found

    def _buffers_among(self, keys: Iterable[Key]) -> set[Key]:
        """Return the buffers among these tensors, without what counts the moves of averages."""
        return {k for k in keys if k not in self._slots.parameters and k not in self._state.averages.counters}

    def uncopied(self) -> list[Key]:
        """Return tensors that the step under way has changed, or may have, and of which there is no earlier copy."""
        if self._steps_to_learn or not self._changes.has_start:
            return []
        return list(self._uncopied | self._without_copy(self._changes.written(self._changes.scan())))

    def see_still(self, now: list[int]) -> None:
        """See, as the step is committed, which tensors that no step had changed are other ones since."""
        if not self._still:
            return
        changes, copied = self._changes, filter(self._images.__contains__, self._still)
        reached = (key for key in changes.reached_by_data() if key not in self._only_read)
        touched = dict.fromkeys((*changes.written(now), *changes.written_by_data(), *reached, *copied))
        for key in [key for key in touched if key in self._still]:
            live = local_part(self._slots.get(key))
            if live.shape != self._still[key].shape or not same_bits(self._still[key], live):
                del self._still[key]
                self._early[key] = None

    def commit(self) -> None:
        """The step counts: keep the memory of its copies for the next one."""
        self._forget_removed()
        self._images.drop(keep=not self._steps_to_learn)
        if self._steps_to_learn == 1:
            self._copy_what_is_still()
        self._steps_to_learn = max(0, self._steps_to_learn - 1)

    def see_code_between(self, changed: list[Key]) -> None:
        """Code between two steps has changed these: what was kept of them is of no use any more."""
        for key in changed:
            if key in self._still:
                self._still[key] = local_part(self._slots.get(key)).detach().clone()

    # --- details ------------------------------------------------------------------------------------------------
    def _changed(self) -> set[Key]:
        """Return what differs from its copy, or was written with the same value: another step may write another."""
        changes = self._changes
        return {*self._images.changed(self._slots.keys), *changes.newer(changes.scan()), *changes.written_by_data()}

    def _note_newcomers(self, written: list[Key]) -> None:
        """Note tensors that changed and were not copied: this step cannot be repeated, later ones can."""
        by_data = self._changes.written_by_data()
        if self._to_check:
            only_read = self._to_check - set(self._images.changed(sorted(self._to_check)))
            only_read -= set(by_data)
            self._only_read |= only_read
            for key in only_read:
                self._early.pop(key, None)
            self._to_check = set()
        newcomers = self._without_copy(written)
        self._early.update(newcomers)
        self._uncopied.update(newcomers)
        if newcomers:
            self._suspects |= newcomers.keys() - {*written, *by_data}

    def _without_copy(self, counted: list[Key]) -> dict[Key, None]:
        """Return tensors without a copy that this step has changed (`counted` by versions) or may have changed."""
        written = [*counted, *self._changes.written_by_data()]
        reached = [key for key in self._changes.reached_by_data() if key not in self._only_read]
        found = dict.fromkeys(key for key in (*written, *reached) if key not in self._images)
        for key in [key for key in found if key in self._still]:
            if key in written:
                self._images.adopt(key, self._still.pop(key))
            else:
                self._images.adopt(key, self._still[key].clone())
                self._suspects.add(key)
            self._early[key] = None
            del found[key]
        return found

    def _copy_what_is_still(self) -> None:
        """Copy small tensors that no step changed, such as a target network's, so that a first change can be undone."""
        state, left = self._state, _STILL_BYTES
        changing = {*self._early, *self._late, *self._private.buffers}
        for name in state.optimizers:
            changing.update(state.members.written_by(name))
        self._still = {}
        for key, tensor in zip(self._slots.keys, self._slots.tensors, strict=True):
            part = local_part(tensor)
            if key not in changing and part.layout is torch.strided and part.nbytes <= left:
                left -= part.nbytes
                self._still[key] = part.detach().clone()
