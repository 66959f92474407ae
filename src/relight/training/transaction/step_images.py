"""Copies of everything that a step may change, taken as it begins or before the first change."""

from typing import TYPE_CHECKING

import torch

from relight.training.state.modules.parameter_attributes import ParameterAttributes
from relight.training.transaction.above import Above
from relight.training.transaction.data_access import DataAccess
from relight.training.transaction.images import FlagImages, ObjectImages, OptimizerImages, TensorImages

if TYPE_CHECKING:
    from relight.training.state.tracked import TrackedState

# Objects that change after a write only, and whose `state_dict` waits for a GPU; they count as writers of a step.
_CHANGE_AFTER_WRITES = (torch.amp.GradScaler,)


class StepImages:
    """Tensors, optimizers, objects, attributes, flags and settings of the step under way."""

    def __init__(self, state: "TrackedState", access: DataAccess) -> None:
        self._state = state
        self._slots = state.slots
        self._access = access
        self._attributes = state.attributes
        self._settings = state.settings
        self._parameter_attributes = ParameterAttributes(state.parameters)
        self._flags = FlagImages(state.parameters, access)
        self.tensors = TensorImages(state.slots)
        self.optimizers = OptimizerImages(state.optimizers)
        self._everything = {**state.objects, **state.per_rank}
        self._objects = ObjectImages(self._everything)
        self.above = Above(state.attributes, state.optimizers, self._everything)
        self._is_undone = False  # the newest step, while code after its block may run

    def begin(self, *, learning: bool, writes_come_last: bool) -> None:
        """Copy everything but tensors. `writes_come_last`: nothing is written in front of the barrier."""
        self._state.rank_private.begin()
        self.begin_modules(learning=learning)
        self.optimizers.begin()
        if learning:
            self.optimizers.take_all()
        late = _CHANGE_AFTER_WRITES if writes_come_last else ()
        self._objects.take([name for name, thing in self._everything.items() if not isinstance(thing, late)])

    def begin_modules(self, *, learning: bool = False) -> None:
        """Copy modes, attributes and hooks of modules, flags and attributes of parameters, and torch's settings."""
        self._flags.begin()
        self._attributes.begin(learning=learning)
        self._settings.begin()
        self._parameter_attributes.begin()

    def begin_code(self) -> None:
        """Copy everything: code after an undone block may change it. The next step needs these copies."""
        self._is_undone = True
        self._access.clear()
        self.begin_modules()
        self.tensors.take(self._slots.keys)
        self.optimizers.begin()
        self.optimizers.take_all()
        self._objects.take(self._everything)
        self.above.repeat()

    def undo_code(self) -> bool:
        """Undo what that code has changed. Return whether there was any."""
        is_undone, self._is_undone = self._is_undone, False
        if is_undone:
            self.put_back_code()
        return is_undone

    def put_back_code(self) -> None:
        """Make everything but gradients and names what it was when it was copied."""
        self._access.put_back()  # before contents: a parameter may lie in the memory of another tensor
        self.put_back_modules()
        self.tensors.put_back()
        self.optimizers.put_back()
        self._objects.put_back()

    def put_back_modules(self) -> None:
        """Make these what they were."""
        self._attributes.roll_back()
        self._settings.roll_back()
        self._parameter_attributes.roll_back()
        self._slots.refresh()
        self._flags.put_back()

    def commit(self) -> None:
        """The step counts. Copies of tensors are left to `ImagePlan`."""
        self._attributes.commit()
        self._settings.commit()
        self.optimizers.drop()
        self._objects.drop()

    def put_back(self) -> None:
        """Make everything but the gradients what it was when the step began."""
        self.put_back_code()
        self._state.rank_private.roll_back()

    def drop(self) -> None:
        """Give up all copies."""
        self._attributes.commit()
        self.tensors.drop(keep=False)
        self.optimizers.drop()
        self._objects.drop()
