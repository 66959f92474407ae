"""The objects that a script handed over, by name, and how to recognize one of them."""

import collections
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from relight.errors import UsageError
from relight.script_files import is_user_type
from relight.training.state.handed.named import attributes_of_state
from relight.training.state.handed.schedulers import shows_attributes
from relight.training.state.modules.slots import Slots
from relight.training.state.values.kinds import attributes_of, first_of, kind_of
from relight.training.torch_private.distributed.mesh import is_distributed
from relight.training.torch_private.distributed.zero import ZeroOptimizers, is_zero, state_of

_MAX_MEMBERS = 64  # looked at in a container, to see whether it holds state


@runtime_checkable
class Stateful(Protocol):
    """An object as torch.distributed.checkpoint.stateful.Stateful describes it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass
class Handed:
    """Modules, optimizers and other objects by name."""

    modules: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    objects: dict[str, Any]  # with `state_dict`, equal on all ranks
    per_rank: dict[str, Any]  # with `state_dict`, different on each rank
    parameters: list[nn.Parameter] = field(init=False)
    is_divided: bool = field(init=False)  # whether some parameters are DTensors

    def __post_init__(self) -> None:
        self.parameters = [p for module in self.modules.values() for p in module.parameters()]
        self.is_divided = any(map(is_distributed, self.parameters))


def sort_by_kind(
    modules: dict[str, nn.Module], optimizers: dict[str, Any], objects: dict[str, Any], per_rank: dict[str, Any]
) -> Handed:
    """Put each object with its kind, whichever keyword it came by. Raises UsageError for an optimizer without state.

    A module that was handed over as an object (an averaged model) is copied tensor by tensor, like the other modules,
    and an optimizer like the other optimizers. So is a module with buffers in an object whose state is that module and
    plain values, which are carried: what BatchNorm has counted differs between ranks.
    """
    known = {id(tensor) for module in modules.values() for tensor in (*module.parameters(), *module.buffers())}
    objects = {name: _averaged_by(thing, known) or thing for name, thing in objects.items()}
    for name, thing in modules.items():
        if not isinstance(thing, nn.Module):
            raise UsageError(f"relight.Training({name}=...) got a {type(thing).__qualname__}, which is no nn.Module")
    averaged = {name: thing for name, thing in objects.items() if isinstance(thing, nn.Module)}
    further = {name: thing for name, thing in objects.items() if isinstance(thing, Optimizer)}
    others = {name: thing for name, thing in objects.items() if name not in averaged and name not in further}
    found = _with_inner_optimizers({**optimizers, **further}, others)
    others.update(_inner_parts(others))
    together = {**modules, **averaged}
    return Handed({**together, **_bare_tensors(together, found)}, found, others, per_rank)


def _averaged_by(thing: Any, known: set[int]) -> nn.Module | None:
    """Return the module that an object of the script's has for its state, if it has buffers, beside plain values.

    `known`: by `id`, tensors of modules that are handed over themselves.
    """
    named = attributes_of_state(thing) or ()
    parts = [one for name, one in attributes_of(thing).items() if name in named] if named else []
    modules = [one for one in parts if isinstance(one, nn.Module)]
    is_all = len(modules) == 1 and all(kind_of(one) in ("plain", "number") for one in parts if one is not modules[0])
    if not is_all or known.intersection(map(id, (*modules[0].parameters(), *modules[0].buffers()))):
        return None
    return modules[0] if any(True for _ in modules[0].buffers()) else None


def _with_inner_optimizers(handed: dict[str, Any], objects: dict[str, Any]) -> dict[str, Optimizer]:
    """Return the optimizers in `handed`, and those inside them (SAM, Lookahead, a wrapper of any kind).

    A wrapper that is no torch.optim.Optimizer is added to `objects`, whose `state_dict` is saved, unless all that it
    keeps are optimizers and plain attributes. Raises UsageError if it has nothing that could be restored.
    """
    found = {name: thing for name, thing in handed.items() if isinstance(thing, Optimizer)}
    for name, thing in handed.items():
        inside = {f"{name}.{k}": v for k, v in getattr(thing, "__dict__", {}).items() if isinstance(v, Optimizer)}
        known = {id(optimizer) for optimizer in found.values()}
        if not is_zero(thing):
            found.update({key: optimizer for key, optimizer in inside.items() if id(optimizer) not in known})
        if not isinstance(thing, Optimizer):
            if isinstance(thing, Stateful):
                objects[name] = thing
            elif not inside:
                raise UsageError(
                    f"{name} is a {type(thing).__qualname__}, no torch.optim.Optimizer, and has no state_dict() and "
                    "load_state_dict(): add them (as in torch.distributed.checkpoint's Stateful), or a replacement "
                    "would train on without its state"
                )
    return found


def _inner_parts(objects: dict[str, Any]) -> dict[str, Any]:
    """Return grad scalers inside objects that hand on their state (NativeScaler), and schedulers inside one another."""
    known, found, queue = {id(thing) for thing in objects.values()}, {}, list(objects.items())
    for name, thing in queue:
        kinds = (GradScaler, LRScheduler) if shows_attributes(thing) else (GradScaler,)
        for key, part in dict(getattr(thing, "__dict__", {})).items():
            if isinstance(part, kinds) and id(part) not in known:
                known.add(id(part))
                found[f"{name}.{key}"] = part
                queue.append((f"{name}.{key}", part))
    return found


class BareTensors(nn.Module):
    """Tensors and parameters of no module that an optimizer trains (SAC's log_alpha, a prompt, master copies)."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        for number, tensor in enumerate(tensors):
            self._parameters[str(number)] = cast("nn.Parameter", tensor)


def _bare_tensors(modules: dict[str, nn.Module], optimizers: dict[str, Optimizer]) -> dict[str, nn.Module]:
    """Return modules of the optimizers' tensors and parameters that no module holds."""
    known = {id(p) for module in modules.values() for p in module.parameters()}
    found: dict[str, nn.Module] = {}
    others = {
        name: [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        for name, optimizer in optimizers.items()
    }
    held = _held_by_modules([p for tensors in others.values() for p in tensors], modules)
    for name, tensors in others.items():
        bare = [p for p in tensors if id(p) not in known | held]
        if bare:
            known.update(map(id, bare))
            found[f"{name}.tensors"] = BareTensors(bare)
    return found


def _held_by_modules(tensors: Sequence[torch.Tensor], handed: dict[str, nn.Module]) -> set[int]:
    """Return the `id` of each of these parameters that a module holds which was not handed over.

    All of them, if modules cannot be found: the script has hidden its objects from garbage collection (`gc.freeze`).
    """
    asked = {id(p) for p in tensors if isinstance(p, nn.Parameter)}
    if asked and _held(asked, handed):
        gc.collect()  # the script may have thrown such a module away
        return _held(asked, handed)
    return set()


def _held(asked: set[int], handed: dict[str, nn.Module]) -> set[int]:
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    if not {id(module) for module in handed.values()} <= set(map(id, modules)):
        return asked
    return asked & {id(p) for module in modules for p in vars(module).get("_parameters", {}).values()}


class Identities:
    """Recognizes objects that were handed over, and their parts."""

    def __init__(self, handed: Handed, slots: Slots, zero: ZeroOptimizers) -> None:
        self._slots = slots
        self._zero = zero
        groups = (handed.modules, handed.optimizers, handed.objects)
        self._names = {id(thing): name for group in groups for name, thing in group.items()}
        self._parts = _ids_of_parts(handed)

    def name_of(self, thing: Any) -> str | None:
        """Return the name under which this very object was handed over, or None."""
        return self._names.get(id(thing)) or self._zero.owner_of(thing)

    def keeps(self, thing: Any, depth: int = 3) -> bool:
        """True if an object is part of the state, or a container that holds some of it (`optimizer.param_groups`).

        One of a class of the script's own (a dict with attributes) is an object of the script that refers to it.
        """
        if id(thing) in self._parts or isinstance(thing, Optimizer):
            return True
        if isinstance(thing, torch.Tensor):
            return self._slots.holds(thing)
        is_container = isinstance(thing, (dict, list, tuple, set, collections.deque)) and not is_user_type(type(thing))
        if not (depth and is_container):
            return False
        return any(self.keeps(member, depth - 1) for member in first_of(thing, _MAX_MEMBERS))


def _ids_of_parts(handed: Handed) -> set[int]:
    """The ids of all objects that were handed over, and of the modules inside them."""
    things = [thing for kind in (handed.modules, handed.objects, handed.per_rank) for thing in kind.values()]
    inside = [part for thing in things for part in getattr(thing, "__dict__", {}).values()]
    modules = [thing for thing in (*things, *inside) if isinstance(thing, nn.Module)]
    states = [state_of(optimizer) for optimizer in handed.optimizers.values()]
    parts = (part for module in modules for part in module.modules())
    return {id(thing) for thing in (*things, *handed.optimizers.values(), *states, *parts)}
