"""Tensors that a step has changed: by their version counters, and by what was reached for through `.data`."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from relight.training.state.modules.attributes import AttributeLog
from relight.training.state.modules.slots import Key, Slots
from relight.training.torch_private.distributed.ddp import around_buffer_sync
from relight.training.torch_private.script_modes import unseen
from relight.training.torch_private.tensors import version_of
from relight.training.transaction.data_access import DataAccess


class ChangeWatch:
    """Compares version counters with those at the end of the last step."""

    def __init__(self, slots: Slots, attributes: AttributeLog) -> None:
        self.access = DataAccess()
        self._slots = slots
        self._attributes = attributes
        self._versions: list[int] | None = None  # of all tensors, as the last step left them
        self._seen_assignments = 0  # of buffers, at the last look at where they are
        self._undo: list[Callable[[], Any]] = []

    def install(
        self,
        wrappers: Iterable[Any],
        before_reach: Callable[[torch.Tensor], None],
        before_method: Callable[[torch.Tensor], None],
    ) -> None:
        """Watch until `remove`.

        `wrappers`: the DDP wrappers, whose broadcasts of buffers are not counted. `before_reach` is called for a tensor
        before its `.data` is reached for the first time in a step, `before_method` for a parameter before each method
        that writes into it.
        """
        self.access.install(before_reach, before_method)
        for module in wrappers:
            self._undo.append(around_buffer_sync(module, unseen(self.scan), unseen(self._discount)))
        self.look_again()

    def remove(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        self.access.remove()

    def _discount(self, before: list[int]) -> None:
        """Leave out DDP's broadcast: it wrote all buffers, mostly with what was in them."""
        if self._versions is None or len(before) != len(self._versions):
            return
        now = self.scan()
        if now != before:
            for place, (old, new) in enumerate(zip(before, now, strict=True)):
                self._versions[place] += new - old

    # --- where buffers are --------------------------------------------------------------------------------------
    @property
    def buffers_were_assigned(self) -> bool:
        """True if a buffer was assigned since the last look: another tensor stands in its place."""
        return self._attributes.assigned_buffers != self._seen_assignments

    def look_again(self) -> None:
        """Look up all tensors, and forget how often they were written."""
        self._slots.refresh()
        self._seen_assignments = self._attributes.assigned_buffers
        self.access.watch(self._slots.tensors)
        self._versions = None

    def see_assigned(self) -> list[Key]:
        """Look up buffers that the step under way has assigned; return their names."""
        slots, versions = self._slots, self._versions or []
        before = {
            key: (tensor, version) for key, tensor, version in zip(slots.keys, slots.tensors, versions, strict=False)
        }
        slots.refresh()
        self._seen_assignments = self._attributes.assigned_buffers
        self.access.watch(slots.tensors)
        self._versions, assigned = [], []
        for key, tensor in zip(slots.keys, slots.tensors, strict=True):
            old = before.get(key)
            if old is None or old[0] is not tensor:
                assigned.append(key)
            self._versions.append(old[1] if old is not None and old[0] is tensor else version_of(tensor))
        return assigned

    # --- versions -------------------------------------------------------------------------------------------------
    def scan(self) -> list[int]:
        """Return how often each tensor was written."""
        try:
            return list(map(version_of, self._slots.tensors))
        except RuntimeError:  # a tensor made in inference mode has no count
            return [id(tensor) if tensor.is_inference() else version_of(tensor) for tensor in self._slots.tensors]

    @property
    def has_start(self) -> bool:
        """True if it is known how often each tensor had been written as the step began."""
        return self._versions is not None

    def start(self) -> list[int]:
        """Return how often each tensor had been written as the step began: now, if that is not known."""
        if self._versions is None:
            self._versions = self.scan()
        return self._versions

    def end(self, now: list[int]) -> None:
        """The next step begins where `now` was scanned."""
        self._versions = now

    def forget(self) -> None:
        """Begin to count anew with the next step, or with the code before it."""
        self._versions = None
        self.access.clear()

    def see_code_between(self) -> list[Key]:
        """Return the tensors that code between two steps has written, and count anew if there are any."""
        if self.buffers_were_assigned:
            self.look_again()
        changed = list(dict.fromkeys([*self.written(self.scan()), *self.written_by_data()]))
        if changed:
            self.forget()
        return changed

    def newer(self, now: list[int]) -> list[Key]:
        """Return the tensors that were written since the step began."""
        versions = self._versions
        if versions is None or now == versions:
            return []
        return [key for key, a, b in zip(self._slots.keys, now, versions, strict=True) if a != b]

    def written(self, now: list[int]) -> list[Key]:
        """Return the tensors that the step under way has written, and the other buffers of their modules."""
        return self._slots.with_siblings(self.newer(now))

    def is_written(self, key: Key) -> bool:
        """Return whether a tensor was written since the step began, or it is not known."""
        versions, place = self._versions, self._slots.index.get(key)
        if versions is None or place is None or place >= len(versions):
            return True
        tensor = self._slots.tensors[place]
        return tensor.is_inference() or version_of(tensor) != versions[place]

    # --- access through `.data` -----------------------------------------------------------------------------------
    def reached_by_data(self) -> list[Key]:
        """Return the tensors whose `.data` was read."""
        return self._keys_of(self.access.reached)

    def written_by_data(self) -> list[Key]:
        """Return the tensors that were written through `.data`, as far as torch counts such writes."""
        return self._keys_of(self.access.written)

    def _keys_of(self, numbers: set[int]) -> list[Key]:
        return [key for number in numbers if (key := self._slots.by_id.get(number)) is not None]
