"""The referent of a name in a script's code: its place, and the object that is there now.

Attributes are looked up without running any code of the script: a property has no known value.
"""

import contextvars
import functools
import inspect
import io
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from relight.script_files import file_of_type, is_script_file, is_user_type
from relight.training.state.modules.plain_values import plain_bytes
from relight.training.state.values.cells import is_type_of_cells
from relight.training.torch_private.autograd import SET_BY_STEPS
from relight.training.torch_private.modules import modules_in, tables_in

Place = tuple[tuple[str, str, str], ...]  # the way to a value: its root, then attributes, items, variables of closures
# Places that begin with what was handed over, and kinds of its parts
OWNERS = {"inner": "module", "slot": "slot", "optimizer": "optimizer"}
_MEMBERS = "_member_map_"  # of an enumeration
Key = tuple[Any, ...]  # equal for two names of one place


def describe(place: Place) -> str:
    """As a message names it."""
    text = ""
    for (kind, first, second), (_, holder, _) in zip(place, (("", "", ""), *place), strict=False):
        if kind == "attribute" and first == _MEMBERS:
            continue
        if kind == "item" and holder == _MEMBERS:
            text += f".{second}"
        elif kind in ("frame", "module", "held", "data", "shown", "setting"):
            text = second
        elif kind in OWNERS:
            text = f"{first}.{second}".rstrip(".")
        elif kind == "attribute":
            text += f".{first}"
        elif kind == "item":
            text += f"[{second!r}]" if first == "str" else f"[{second}]"
        elif kind == "member":
            text += f"[{first}]"
        elif kind == "contents":
            text = f"the contents of {text}"
        elif kind == "default":
            text += f"({first}=...)"
        else:
            text = f"{first} of {text}()"
    return text


class _Unknown:
    """Marks a value that code alone does not tell."""


UNKNOWN: Any = _Unknown()


@dataclass(frozen=True)
class Ref:
    """The referent of an expression."""

    key: Key | None = None  # None: nothing that a script could carry
    value: Any = UNKNOWN
    place: Place | None = None
    alias: "Ref | None" = None  # what a name was last set to
    is_part: bool = False  # some item of what is in this place
    makes: type | None = None  # of a call: the class of the module, optimizer or scheduler that is made there


def _as_set(base: Ref) -> Ref:
    """A name that was set in this iteration stands for what it was set to: that has a place in every process."""
    alias = base.alias
    return alias if alias is not None and (base.value is UNKNOWN or alias.value is base.value) else base


def attribute_of(base: Ref, name: str, is_foreign: Callable[[Any], bool]) -> Ref:
    """The referent of `base.name`."""
    base = _as_set(base)
    owner = base.value
    if owner is UNKNOWN:
        if base.key is None or base.is_part:
            return Ref(base.key, is_part=base.is_part, place=base.place)
        return Ref(("of", base.key, name), UNKNOWN, (*base.place, ("attribute", name, "")) if base.place else None)
    if isinstance(owner, types.ModuleType):
        value = vars(owner).get(name, UNKNOWN)
        is_own = is_script_file(getattr(owner, "__file__", None) or "")
        there: Place = (("module", owner.__name__, name),)
        if not is_own and value is not UNKNOWN and plain_bytes(value) is None:  # a library's: os.environ, sys.modules
            return Ref(None, value, there if isinstance(value, (type, types.FunctionType)) else None)
        return Ref(("global", owner.__name__, name), value, there)
    if name == "__dict__":
        return Ref(base.key, UNKNOWN, base.place, is_part=True)
    if name == "__class__":
        return class_of(base)
    if is_type_of_cells(type(owner)):
        return part_of(base)
    value = static_attribute(owner, name)
    if isinstance(owner, torch.Tensor):
        return part_of(base) if name in ("data", "T", "mT", "real", "imag") else Ref(None, value)
    value = _setting_of(owner, name, value)
    if isinstance(value, property) or (is_foreign(owner) and not is_added(owner, name)):
        return Ref(None, UNKNOWN if isinstance(value, property) else value)
    place = (*base.place, ("attribute", name, "")) if base.place else None
    return Ref(("attribute", id(owner), name), value, place)


def _setting_of(owner: Any, name: str, value: Any) -> Any:
    """A value that a module of Lightning keeps as a hyperparameter: there a property, and a dict, stand before it."""
    if name == "hparams" and isinstance(owner, nn.Module) and isinstance(value, property):
        return vars(owner).get(f"_{name}", value)
    if value is UNKNOWN and type(owner).__name__ == "AttributeDict" and isinstance(owner, dict):
        return dict.get(owner, name, UNKNOWN)
    return value


def is_own_optimizer(value: Any) -> bool:
    """True if it is an optimizer of a class that keeps more than its parameters' state: of torch's, one averages."""
    home = type(value).__module__
    return isinstance(value, torch.optim.Optimizer) and (not home.startswith("torch.") or home.endswith(_AVERAGES))


_AVERAGES = "post_localSGD_optimizer"


def is_added(owner: Any, name: str) -> bool:
    """Return whether this is an optimizer, and an attribute of this name is none that torch gives to such ones."""
    if not isinstance(owner, torch.optim.Optimizer) or name in _of_every_optimizer() or name in SET_BY_STEPS:
        return False
    if is_own_optimizer(owner):
        return name not in dir(torch.optim.Optimizer)
    return type(owner).__module__.startswith("torch.optim.") and name[0] != "_" and name not in dir(type(owner))


@functools.cache
def _of_every_optimizer() -> frozenset[str]:
    optimizer = torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.0)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return frozenset(vars(optimizer))


def class_of(base: Ref) -> Ref:
    """The referent of `type(base)`."""
    if base.value is UNKNOWN:
        return Ref()
    place = (*base.place, ("attribute", "__class__", "")) if base.place else None
    return Ref(("class", id(type(base.value))), type(base.value), place)


def static_attribute(owner: Any, name: str) -> Any:
    """An attribute, found without running code of the owner; methods come bound."""
    if isinstance(owner, nn.Module):
        for kept in tables_in(owner):
            if name in kept:
                return kept[name]
    try:
        value = inspect.getattr_static(owner, name)
    except AttributeError:
        return UNKNOWN
    if isinstance(value, staticmethod):
        return value.__func__
    if isinstance(value, classmethod):
        return types.MethodType(value.__func__, owner if isinstance(owner, type) else type(owner))
    if isinstance(value, types.FunctionType) and not isinstance(owner, type):
        in_instance = name in getattr(owner, "__dict__", {})
        return value if in_instance else types.MethodType(value, owner)
    if isinstance(value, functools.cached_property):
        return UNKNOWN
    if isinstance(value, types.MemberDescriptorType):  # of __slots__
        try:
            return value.__get__(owner)
        except AttributeError:
            return UNKNOWN
    return value


def part_of(base: Ref) -> Ref:
    """Something that is in what `base` names, or shares its memory."""
    return Ref(base.key, UNKNOWN, base.place, is_part=True)


_WITH_ITEMS = (list, tuple, dict, OrderedDict, defaultdict, deque)


def item_of(base: Ref, index: Any) -> Ref:
    """The referent of `base[index]`; `index` is UNKNOWN if it is no constant."""
    base = _as_set(base)
    value, place, container = UNKNOWN, base.place, base.value
    is_had = type(container) is not defaultdict or index in container  # else it would be made
    if type(container) in _WITH_ITEMS and isinstance(index, (int, str)) and is_had:
        try:
            value = container[index]
        except (LookupError, TypeError):
            pass
        else:
            step = ("item", "str" if isinstance(index, str) else "int", str(index))
            place = (*place, step) if place else None
    return Ref(base.key, value, place if value is not UNKNOWN else base.place, is_part=True)


@dataclass(frozen=True)
class Callee:
    """A function of the user, what its first parameter is bound to, and what `functools.partial` gives it then."""

    function: types.FunctionType
    receiver: Ref | None
    given: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)


def callee_of(target: Ref, receiver: Ref | None) -> Callee | None:
    """The function of the user's that a call runs, if that can be told. `receiver`: what stands before the dot."""
    value = target.value if target.value is not UNKNOWN or target.alias is None else target.alias.value
    if isinstance(value, functools.partial):
        partial = callee_of(Ref(None, value.func), None)
        return partial and replace(partial, given=value.args, named={**value.keywords})
    if isinstance(value, types.MethodType):
        own = Ref() if receiver is None else _as_set(receiver)
        own = own if own.value is value.__self__ else Ref(None, value.__self__)
        return _if_user(_unwrapped(value.__func__), own)
    if isinstance(value, types.FunctionType):
        function = _unwrapped(value)
        return _if_user(function, receiver if _is_method_of(receiver, function) else None)
    if value is UNKNOWN or isinstance(value, type):
        return None
    if isinstance(value, nn.Module):
        inner = modules_in(value).get("module")
        if inner is not None and not is_script_file(file_of_type(type(value))):
            value, target = inner, Ref(None, inner)  # a wrapper: DistributedDataParallel
        return _if_user(inspect.getattr_static(type(value), "forward", None), _as_set(target))
    return _if_user(inspect.getattr_static(type(value), "__call__", None), _as_set(target))


def dispatched(value: Any) -> list[types.FunctionType]:
    """The script's functions among which one of `functools.singledispatch` chooses, by the type of its argument."""
    owner = value.dispatcher if isinstance(value, functools.singledispatchmethod) else value
    registry = getattr(owner, "registry", None) if isinstance(owner, types.FunctionType) else None
    found = [*registry.values()] if isinstance(registry, types.MappingProxyType) else []
    return [one for one in found if isinstance(one, types.FunctionType) and is_script_file(one.__code__.co_filename)]


def _unwrapped(function: Any) -> Any:
    """The function of the user's that decorators of libraries run: `torch.no_grad()`, a scheduler around a step."""
    while isinstance(function, types.FunctionType) and not is_script_file(function.__code__.co_filename):
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            break
        function = inner
    return function


def _is_method_of(receiver: Ref | None, function: Any) -> bool:
    """Return whether a function that was set on an object runs the method of this name of the object's class."""
    if receiver is None or receiver.value is UNKNOWN or not isinstance(function, types.FunctionType):
        return False
    return _unwrapped(inspect.getattr_static(type(receiver.value), function.__name__, None)) is function


def own_method(owner: Any, name: str) -> types.FunctionType | None:
    """A method of a class of the user's, which an operator or a statement calls: `__enter__`, `__getitem__`."""
    if owner is UNKNOWN:
        return None
    function = inspect.getattr_static(type(owner), name, None)
    return (
        function if isinstance(function, types.FunctionType) and is_script_file(function.__code__.co_filename) else None
    )


def own_accessor(owner: Any, name: str, kind: str) -> types.FunctionType | None:
    """The function that reads (`fget`) or sets (`fset`) an attribute that is a property of a class of the user's."""
    if owner is UNKNOWN or isinstance(owner, types.ModuleType):
        return None
    found = inspect.getattr_static(type(owner), name, None)
    function = getattr(found, kind, None) if isinstance(found, property) else None
    return (
        function if isinstance(function, types.FunctionType) and is_script_file(function.__code__.co_filename) else None
    )


def sets_otherwise(owner: Any, name: str) -> bool:
    """Return whether a class of the user's sets this attribute by code of its own: a descriptor, or `__setattr__`."""
    if owner is UNKNOWN or isinstance(owner, (types.ModuleType, type)) or not is_user_type(type(owner)):
        return False
    found = inspect.getattr_static(type(owner), name, None)
    is_own = isinstance(inspect.getattr_static(type(found), "__set__", None), types.FunctionType)
    return is_own or own_method(owner, "__setattr__") is not None


_SHOWN_BY = ("tqdm", "logging", "_io", "rich", "wandb", "tensorboard")
_KNOWN = ("relight", "numpy", "accelerate", "transformers", "lightning", "lightning_fabric", "pytorch_lightning", "trl")
_SEEN_BY_VALUES = ("os", "sqlite3")  # the environment, databases in memory


def is_of_a_library(value: Any) -> bool:
    """Return whether it is an object of a library's class, whose methods may change it: a queue, a metric.

    Schedulers, scalers and the like of torch are watched where they are used.
    """
    if value is UNKNOWN or isinstance(value, (types.ModuleType, type, type(None), bool, int, float, str, bytes, tuple)):
        return False
    if isinstance(value, contextvars.ContextVar):  # seen by its values
        return False
    if isinstance(value, nn.Module):
        return not is_user_type(type(value))
    home = type(value).__module__.partition(".")[0]
    return not (callable(value) or home in (*_SHOWN_BY, *_SEEN_BY_VALUES, "torch") or is_user_type(type(value)))


def may_hold_state(value: Any) -> bool:
    """Return whether it is an object of an installed library, but none that relight knows: an environment, a graph."""
    home = type(value).__module__.partition(".")[0]
    is_known = home in sys.stdlib_module_names or home in _KNOWN or isinstance(value, nn.Module)
    return not is_known and is_of_a_library(value)


def container_behind(value: Any) -> tuple[Any, str]:
    """The object whose built-in method this is, and that method's name; UNKNOWN if it is none."""
    if isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, (types.ModuleType, type)):
        return value.__self__, value.__name__
    return UNKNOWN, ""


def _if_user(function: Any, receiver: Ref | None) -> Callee | None:
    if not isinstance(function, types.FunctionType) or not is_script_file(function.__code__.co_filename):
        return None
    return Callee(function, receiver)


def is_generator(value: Any) -> bool:
    """Return whether drawing numbers from it changes it."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    kind = type(value)
    return kind.__module__.partition(".")[0] == "numpy" and kind.__name__ in (
        "Generator",
        "RandomState",
        "SeedSequence",
    )


def is_iterator(value: Any) -> bool:
    """Return whether it is used up by `next`. Generators of relight are not: they offer the steps."""
    if value is UNKNOWN or not isinstance(value, Iterator) or _is_only_written(value):
        return False
    code = getattr(value, "gi_code", None)
    return code is None or is_script_file(code.co_filename)


def _is_only_written(value: Any) -> bool:
    """Return whether it is a file, perhaps a log, that nothing can be read from: Python takes each file for one."""
    return isinstance(value, io.IOBase) and not value.closed and not value.readable()


def has_contents(value: Any) -> bool:
    """True if its methods may change what it holds, in a way that could be carried. Unknown values may be such."""
    kinds = (list, dict, set, deque, torch.Tensor, bytearray)
    return value is UNKNOWN or isinstance(value, kinds) or _is_array(value) or is_type_of_cells(type(value))


def _is_array(value: Any) -> bool:
    kind = type(value)
    return kind.__module__ == "numpy" and kind.__name__ == "ndarray"
