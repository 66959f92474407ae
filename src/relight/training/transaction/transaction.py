"""One step as a transaction: what must be copied before it changes, where the barrier stands, and how all is undone."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch.optim.lr_scheduler import LRScheduler

from relight.training.state.parameter_attributes import ParameterAttributes
from relight.training.state.slots import Key
from relight.training.state.torch_settings import TorchSettings
from relight.training.torch_private.ddp import around_buffer_sync
from relight.training.transaction.data_access import DataAccess
from relight.training.transaction.images import ObjectImages, OptimizerImages, TensorImages
from relight.training.transaction.pattern import Learner, Pattern, observed
from relight.transfer.io.codec import encode_tree, local_part

if TYPE_CHECKING:
    from relight.training.state.tracked import TrackedState

# In so many steps everything is copied, and compared bit by bit, to learn what changes when.
LEARNING_STEPS = 3
_STILL_BYTES = 64 * 2**20  # of tensors that no step has changed so far
_NAMED = 3  # tensors in a message

_version = attrgetter("_version")
_requires_grad = attrgetter("requires_grad")


class Transaction:
    """Of one step at a time. For the main thread.

    A step calls `begin`, `before_write` in front of each write, `prepare` in front of the barrier, and `commit`; or
    `roll_back` at any point before the barrier, and after it as long as nothing was written.
    """

    def __init__(
        self, state: "TrackedState", launches: Callable[[], int], carried: Callable[[], int] = lambda: 0
    ) -> None:
        """`launches`: how many collectives this process has launched so far.

        `carried`: a number that is another one once state that the script carries by itself has changed.
        """
        self._state = state
        self._slots = state.slots
        self._launches = launches
        self._carried = carried
        self._attributes = state.attributes
        self._attributes.before_mode = self._before_mode
        self.learner = Learner()
        self._access = DataAccess()
        self._tensors = TensorImages(state.slots)
        self._optimizers = OptimizerImages(state.optimizers)
        self._settings = TorchSettings()
        self._parameter_attributes = ParameterAttributes(state.parameters)
        self._objects = ObjectImages({**state.objects, **state.per_rank})
        self._learning = LEARNING_STEPS  # steps left in which everything is copied
        self._unused = set(state.optimizers)  # that have made no step since ranks last began to learn
        # Tensors that steps change without an optimizer's doing: in front of the barrier's place, and after it.
        self._early: dict[Key, None] = {}
        self._late: dict[Key, None] = {}
        self._suspects: set[Key] = set()  # reached for through `.data`; it is not known yet whether they change
        self._to_check: set[Key] = set()  # those of the step before, of which this step has copies
        self._only_read: set[Key] = set()
        self._still: dict[Key, torch.Tensor] = {}  # copies of small tensors that no step has changed so far
        self._versions: list[int] | None = None  # of all tensors, as the last step left them
        self._undo: list[Callable[[], Any]] = []
        self._seen_assignments = 0  # of buffers, when last looked where they are
        self._private: set[Key] = set()  # buffers known to be rank-private when the step began
        self._trains: list[bool] = []  # `requires_grad` of the parameters when the step began
        self._seen_flags = -1  # how often flags were set before that
        # The step under way.
        self.is_open = False  # it can be undone
        self._is_early = False  # its barrier was passed in front of a write
        self._writes: list[str] = []
        self._written_at: list[set[Key]] = []  # by each of these
        self._changed_at: list[set[Key]] = []  # before each of these, while learning
        self._uncopied: dict[Key, None] = {}  # they changed, or may have, before there was a copy
        self._stirred = 0  # of these writes, those before the last need of other ranks
        self._seen: tuple[Any, ...] = ()  # launches and private state, when last looked
        self.surprise = ""  # what came after an early barrier, against what was learnt

    def install(self) -> None:
        """For the time of the loop."""
        self._attributes.install()
        self._access.install()
        for module in self._state.wrappers():
            self._undo.append(around_buffer_sync(module, self._scan, self._discount))
        self._look_again()

    def remove(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._access.remove()
        self._attributes.remove()

    def _discount(self, before: list[int]) -> None:
        """DDP has written all buffers, mostly with what was in them: that counts for nothing."""
        if self._versions is None or len(before) != len(self._versions):
            return
        now = self._scan()
        if now != before:
            for place, (old, new) in enumerate(zip(before, now, strict=True)):
                self._versions[place] += new - old

    def reset(self) -> None:
        """After a recovery: a replacement has seen no step, so all ranks learn anew."""
        self.learner.reset()
        self._learning = LEARNING_STEPS
        self._unused = set(self._state.optimizers)
        self._versions = None
        self._still = {}

    # --- before a step ------------------------------------------------------------------------------------------
    def changed_between_steps(self) -> list[Key]:
        """Tensors that have changed since the last step ended."""
        if self._attributes.assigned_buffers != self._seen_assignments:
            self._look_again()
        return self._newer(self._scan(), self._versions) if self._versions is not None else []

    def _look_again(self) -> None:
        """Buffers may be other tensors than before."""
        self._slots.refresh()
        self._seen_assignments = self._attributes.assigned_buffers
        self._access.watch(self._slots.tensors)
        self._versions = None

    def _scan(self) -> list[int]:
        """How often each tensor was written."""
        try:
            return list(map(_version, self._slots.tensors))
        except RuntimeError:  # a tensor made in inference mode has no count
            return [id(tensor) if tensor.is_inference() else _version(tensor) for tensor in self._slots.tensors]

    def _newer(self, now: list[int], versions: list[int]) -> list[Key]:
        """Which tensors were written between two scans."""
        if now == versions:
            return []
        return [key for key, a, b in zip(self._slots.keys, now, versions, strict=True) if a != b]

    # --- a step -------------------------------------------------------------------------------------------------
    @property
    def wrote(self) -> bool:
        """Whether the step under way has begun to write."""
        return bool(self._writes)

    @property
    def pattern(self) -> Pattern:
        """What this step says of where the barrier may stand."""
        learnt = self.learner.learnt
        if learnt is not None and (self._is_early or not self._writes):
            return learnt if not self.surprise else Pattern()
        return observed(self._writes, self._stirred, more_expected=bool(self._unused))

    @property
    def image_bytes(self) -> int:
        """Memory of copies of tensors."""
        return self._tensors.nbytes

    def begin(self) -> None:
        """Copy what is known to change before the barrier."""
        self._writes, self._written_at, self._changed_at, self._stirred = [], [], [], 0
        self._is_early = False
        self._access.clear()
        self._uncopied = {}
        self._to_check, self._suspects = self._suspects, set()
        if self._attributes.assigned_buffers != self._seen_assignments:
            self._look_again()
        learning, learnt = self._learning > 0, self.learner.learnt
        self._private = set(self._state.private_buffers)
        if self._access.flags_set != self._seen_flags:
            self._trains = list(map(_requires_grad, self._state.parameters))
            self._seen_flags = self._access.flags_set
        self._attributes.begin(learning=learning)
        self._settings.begin()
        self._parameter_attributes.begin()
        self._optimizers.begin()
        if learning:
            self._tensors.take(self._slots.keys)
            self._optimizers.take_all()
        else:
            self._tensors.take(self._state.private_buffers)
            self._tensors.take(self._early)
            if learnt is None:
                self._tensors.take(self._late)
        self._objects.take(self._objects_to_copy(learnt))
        if self._versions is None:
            self._versions = self._scan()
        if learnt is None:
            self._seen = self._look(self._versions)
        self.is_open = True

    def _objects_to_copy(self, learnt: Pattern | None) -> list[str]:
        """Schedulers and scalers change after a write only, which they are known to count as themselves."""
        only_after = learnt is not None and not learnt.before
        late = (LRScheduler, torch.amp.GradScaler)
        everything = {**self._state.objects, **self._state.per_rank}
        return [name for name, thing in everything.items() if not (only_after and isinstance(thing, late))]

    def before_write(self, writer: str, optimizer: str | None) -> bool:
        """A write is about to happen. True if the barrier stands in front of it.

        Args:
            writer: a name for what writes.
            optimizer: its name, if it is an optimizer.
        """
        self._unused.discard(optimizer or "")
        if self.learner.stands_before(self._writes):
            return True
        self._note_needs()
        if self._learning:
            changed = self._changed()
            self._changed_at.append(changed)
            self._only_read |= {key for key in self._reached() if key not in changed}
        else:
            self._note_newcomers(self._written_since(self._scan()))
        keys = self._state.written_by(optimizer) if optimizer is not None else []
        if optimizer is not None:
            self._tensors.take(keys)
            self._optimizers.take(optimizer)
        self._written_at.append(set(keys))
        self._writes.append(writer)
        return False

    def _before_mode(self, module: torch.nn.Module) -> None:
        """A module goes to training or evaluation: its buffers may change from here on, and did not before."""
        if self.is_open and not self._is_early:
            self._tensors.take(self._slots.of_module(module))

    def _note_needs(self) -> None:
        """Whether the step needed other ranks, or changed private state, since this was last asked."""
        seen = self._look(self._scan())
        if seen != self._seen:
            self._stirred, self._seen = len(self._writes), seen

    def prepare(self, *, early: bool) -> None:
        """The barrier is next, `early` in front of a write. Finds out what is private, and what has changed."""
        if not early:
            self._note_needs()
        if self._attributes.assigned_buffers != self._seen_assignments:
            self._see_assigned_buffers()
        self._attributes.notice()
        self._is_early = early
        now = self._scan()
        if self._learning:
            self._learn()
        else:
            written = self._written_since(now)
            self._note_newcomers(written)
            self._note_private_buffers(written)
        state = self._state
        if state.averages:
            state.private_buffers |= state.averages.like(state.private_buffers)
            state.averages.prepare(state.private_buffers)
        if early:
            self._seen = self._look(now)

    def _changed(self) -> set[Key]:
        """What differs from its copy, or was written with what was in it: another step may write something else."""
        counted = self._newer(self._scan(), self._versions or self._scan())
        return {*self._tensors.changed(self._slots.keys), *counted, *self._keys_of(self._access.written)}

    def _learn(self) -> None:
        """From a step of which everything was copied."""
        at_end = self._changed()
        self._state.see_own_numbers()
        self._changed_at.append(at_end)
        if self._state.averages.unrepeatable(sorted(at_end)):
            self._stirred = len(self._writes)
        before = self._changed_at[self._stirred]  # at the place where the barrier might have stood
        self._state.private_buffers |= {key for key in before if key not in self._slots.parameters}
        written: set[Key] = set()
        for index, changed in enumerate(self._changed_at):
            found = self._early if index <= self._stirred else self._late
            found.update(dict.fromkeys(sorted(changed - written)))
            written |= self._written_at[index] if index < len(self._written_at) else set()
        self._only_read |= {key for key in self._reached() if key not in at_end}

    def _note_newcomers(self, written: list[Key]) -> None:
        """Tensors that changed and were not copied: this step cannot be repeated, later ones can."""
        if self._to_check:
            only_read = self._to_check - set(self._tensors.changed(sorted(self._to_check)))
            only_read -= set(self._keys_of(self._access.written))
            self._only_read |= only_read
            for key in only_read:
                self._early.pop(key, None)
            self._to_check = set()
        newcomers = self._without_copy(written)
        self._early.update(newcomers)
        self._uncopied.update(newcomers)
        if newcomers:
            self._suspects |= newcomers.keys() - {*written, *self._keys_of(self._access.written)}

    def _note_private_buffers(self, written: list[Key]) -> None:
        """The buffers among what this step has written."""
        buffers = [key for key in written if key not in self._slots.parameters]
        # At the end of the block an average has been moved already, alike on all ranks.
        self._state.private_buffers |= {key for key in buffers if self._is_early or self._state.trains(key)}

    def _without_copy(self, counted: list[Key]) -> dict[Key, None]:
        """Tensors that this step has changed (`counted` by versions) or may have changed, and that have no copy."""
        written = [*counted, *self._keys_of(self._access.written)]
        reached = [key for key in self._reached() if key not in self._only_read]
        found = dict.fromkeys(key for key in (*written, *reached) if key not in self._tensors)
        for key in [key for key in found if key in self._still]:
            if key in written:
                self._tensors.adopt(key, self._still.pop(key))
            else:
                self._tensors.adopt(key, self._still[key].clone())
                self._suspects.add(key)
            self._early[key] = None
            del found[key]
        return found

    def _copy_what_is_still(self) -> None:
        """Of a target network, say, which is set to the trained one now and then: its first change can be undone."""
        state, left = self._state, _STILL_BYTES
        changing = {*self._early, *self._late, *state.private_buffers}
        for name in state.optimizers:
            changing.update(state.written_by(name))
        self._still = {}
        for key, tensor in zip(self._slots.keys, self._slots.tensors, strict=True):
            part = local_part(tensor)
            if key not in changing and part.layout is torch.strided and part.nbytes <= left:
                left -= part.nbytes
                self._still[key] = part.detach().clone()

    def _reached(self) -> list[Key]:
        return self._keys_of(self._access.reached)

    def _keys_of(self, numbers: set[int]) -> list[Key]:
        return [key for number in numbers if (key := self._slots.by_id.get(number)) is not None]

    def unimaged_changes(self) -> list[Key]:
        """Tensors that the step under way has changed, or may have, and of which there is no copy from before."""
        if self._learning or self._versions is None or not self.is_open:
            return []
        if self._attributes.assigned_buffers != self._seen_assignments:
            self._see_assigned_buffers()
        return list(self._uncopied | self._without_copy(self._written_since(self._scan())))

    @property
    def wrote_parameters(self) -> bool:
        """Whether the step under way has changed parameters, be it by hand."""
        counted = self._newer(self._scan(), self._versions) if self._versions is not None else []
        changed = (*counted, *self._keys_of(self._access.written))
        return any(key in self._slots.parameters for key in changed)

    def _written_since(self, now: list[int]) -> list[Key]:
        """Tensors that the step under way has written, and the other buffers of their modules."""
        changed = self._newer(now, self._versions or now)
        return list(dict.fromkeys(key for first in changed for key in self._slots.siblings(first)))

    def _see_assigned_buffers(self) -> None:
        """A buffer was assigned in this step: at its place is another tensor now."""
        slots, versions = self._slots, self._versions or []
        before = {
            key: (tensor, version) for key, tensor, version in zip(slots.keys, slots.tensors, versions, strict=False)
        }
        slots.refresh()
        self._seen_assignments = self._attributes.assigned_buffers
        self._access.watch(slots.tensors)
        self._versions = []
        for key, tensor in zip(slots.keys, slots.tensors, strict=True):
            old = before.get(key)
            if old is None or old[0] is not tensor:
                self._state.private_buffers.add(key)
            self._versions.append(old[1] if old is not None and old[0] is tensor else _version(tensor))

    def commit(self) -> None:
        """The step counts. Afterwards `surprise` says what came after an early barrier although nothing used to."""
        now = self._scan()
        lost = self._state.averages.commit() if self._state.averages else []
        self.surprise = self._find_surprise(now, lost) if self._is_early else ""
        self.is_open = False
        self._attributes.commit()
        self._tensors.drop(keep=not self._learning)
        self._optimizers.drop()
        self._objects.drop()
        if self._learning == 1:
            self._copy_what_is_still()
        self._learning = max(0, self._learning - 1)
        if self._attributes.assigned_buffers != self._seen_assignments:
            self._look_again()
            now = self._scan()
        self._versions = now

    def _find_surprise(self, now: list[int], lost: list[Key]) -> str:
        seen = self._look(now)
        if seen[0] != self._seen[0]:
            return "a collective"
        if seen != self._seen:
            return "a change of state that only this rank has"
        return f"an average of {listed(lost)} that the script made by itself" if lost else ""

    def roll_back(self) -> None:
        """Everything but the gradients is what it was when the step began."""
        if not self.is_open:
            return
        self._attributes.roll_back()
        self._settings.roll_back()
        self._parameter_attributes.roll_back()
        self._slots.refresh()
        for parameter, trains in zip(self._state.parameters, self._trains, strict=True):
            if parameter.requires_grad != trains:
                parameter.requires_grad_(trains)
        self._tensors.put_back()
        self._state.private_buffers = self._private  # of the version gone back to, no rank has kept others
        self._optimizers.put_back()
        self._objects.put_back()
        self.forget()

    def forget(self) -> None:
        """No step is under way; copies are of no more use."""
        self.is_open = self._is_early = False
        self._writes = []
        self._attributes.commit()
        self._tensors.drop(keep=False)
        self._optimizers.drop()
        self._objects.drop()
        self._state.averages.forget()
        self._look_again()

    def _look(self, now: list[int]) -> tuple[Any, ...]:
        """The number of launches, and what differs after state of this rank alone has changed. `now`: a scan."""
        state, slots = self._state, self._slots
        own = [now[place] for key, place in slots.buffer_places if state.trains(key)]
        seen = self._launches(), own, self._attributes.assigned_buffers, self._carried()
        if not (state.per_rank or state.with_own_numbers or self._attributes.has_state):
            return seen
        kept = {name: thing.state_dict() for name, thing in state.per_rank.items()}
        tree = {"per_rank": kept, "attributes": self._attributes.private(), "numbers": state.own_numbers()}
        return *seen, xxhash.xxh3_64_intdigest(encode_tree(tree, "rank-private state"))


def listed(keys: Sequence[Key]) -> str:
    """The first of these names, for a message."""
    names = ", ".join(f"{name} of {owner}" for owner, name in keys[:_NAMED])
    return names if len(keys) <= _NAMED else f"{names} and {len(keys) - _NAMED} more"
