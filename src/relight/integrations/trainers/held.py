"""Things that trainers and callbacks hold, in the shape in which `relight.Training` takes them."""

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

from relight.script_files import is_script_file

_DEEPEST = 4  # objects, one in another
_MOST = 64  # items of a container
_FRAMEWORKS = ("accelerate", "lightning", "relight", "torch", "torchdata", "torchmetrics", "transformers", "trl")


class HeldScheduler:
    """A scheduler that steps after an evaluation, or in a hook, which is not the write of a step."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        """Return that of the scheduler."""
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Pass it on to the scheduler."""
        self._scheduler.load_state_dict(saved)


def modules_held(
    holders: Mapping[str, Any], known: Iterable[nn.Module], schedulers: Iterable[Any] = ()
) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    """Return modules with parameters that objects hold, by names made of the way to each: a teacher, say.

    Returned by themselves: averages of torch's AveragedModel, schedulers, and objects of libraries with `state_dict`,
    such as an average of another kind. Looked into are containers and objects of the script's own classes, some deep.
    `known`: modules that are handed over anyway, with all in them; so are `schedulers`.
    """
    seen = {id(inner) for module in known for inner in module.modules()} | set(map(id, schedulers))
    modules: dict[str, nn.Module] = {}
    others: dict[str, Any] = {}
    ahead = deque((f"{holder}_{name}", value, 1) for holder, thing in holders.items() for name, value in _in(thing))
    while ahead:
        name, value, depth = ahead.popleft()
        if id(value) in seen or isinstance(value, (Dataset, DataLoader)):
            continue
        if isinstance(value, nn.Module):
            inner = {id(each) for each in value.modules()}
            if inner & seen or next(value.parameters(), None) is None:
                continue  # it wraps what is handed over, or has no state that ranks share
            seen |= inner
            found: dict[str, Any] = others if isinstance(value, AveragedModel) else modules
            found[name] = value
        elif isinstance(value, LRScheduler):
            seen.add(id(value))
            others[name] = HeldScheduler(value)
        elif _has_state(value):
            seen.add(id(value))
            others[name] = value
        elif depth < _DEEPEST and (is_own_object(value) or type(value) in (list, tuple, dict)):
            seen.add(id(value))
            ahead.extend((f"{name}_{each}", inner, depth + 1) for each, inner in _in(value))
    return modules, others


def is_own_object(thing: Any) -> bool:
    """Return whether an object is of a class of the script's own."""
    module = sys.modules.get(type(thing).__module__)
    file = getattr(module, "__file__", None)
    return hasattr(thing, "__dict__") and file is not None and is_script_file(file)


def _in(thing: Any) -> Iterator[tuple[str, Any]]:
    """The items of a container, or the attributes of an object."""
    if isinstance(thing, (list, tuple)):
        pairs: Iterable[tuple[Any, Any]] = enumerate(thing)
    else:
        pairs = thing.items() if isinstance(thing, dict) else vars(thing).items()
    for key, value in islice(pairs, _MOST):
        yield str(key), value


def _has_state(thing: Any) -> bool:
    """Return whether an object of a library says what its state is; trainers keep those of frameworks by themselves."""
    if (
        isinstance(thing, (type, torch.optim.Optimizer))
        or is_own_object(thing)
        or type(thing).__module__.split(".")[0] in _FRAMEWORKS
    ):
        return False
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
