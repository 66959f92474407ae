"""Wrappers that libraries put around optimizers, schedulers and loaders: relight tracks what is inside.

A wrapper is known by its shape, whichever version of its library made it:

| wrapper | shape |
|---|---|
| Fabric's optimizer, accelerate's AcceleratedOptimizer | `optimizer`, with whose state and groups it shares its own |
| torchtitan's OptimizersContainer | `optimizers`, a list of optimizers |
| accelerate's AcceleratedScheduler | `scheduler` and `step_with_optimizer` |
| torchtitan's LRSchedulersContainer | `schedulers`, a list of schedulers |
| Fabric's loader | `_dataloader` |
| accelerate's DataLoaderShard | `base_dataloader` |

An optimizer that keeps state of its own beside that of another one (Lookahead, SAM) is no wrapper of this kind.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader


def unwrapped_optimizers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the optimizers inside, by name; those of a container are numbered."""
    return dict(pair for name, optimizer in given.items() for pair in _inside_optimizer(name, optimizer))


def _inside_optimizer(name: str, given: Any) -> Iterator[tuple[str, Any]]:
    if is_container(given):
        for number, optimizer in enumerate(given.optimizers):
            yield from _inside_optimizer(f"{name}.{number}", optimizer)
        return
    inner = getattr(given, "optimizer", None)
    is_other = isinstance(inner, Optimizer) and inner is not given
    if is_other and _shares(given, inner, "state") and _shares(given, inner, "param_groups"):
        yield from _inside_optimizer(name, inner)
    else:
        yield name, given


def is_container(thing: Any) -> bool:
    """Return whether this only calls the optimizers in its list, as torchtitan's container does."""
    inside = getattr(thing, "optimizers", None)
    return (
        isinstance(inside, (list, tuple))
        and bool(inside)
        and all(isinstance(optimizer, Optimizer) and optimizer is not thing for optimizer in inside)
        and not (isinstance(thing, Optimizer) and thing.state)
    )


def _shares(one: Any, other: Any, name: str) -> bool:
    return getattr(one, name, None) is getattr(other, name)


def each_by_name(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the objects that were given, each of a dict or list of several by a name of its own."""
    found: dict[str, Any] = {}
    for name, thing in given.items():
        if isinstance(thing, (list, tuple)) or (isinstance(thing, dict) and not hasattr(type(thing), "state_dict")):
            pairs = thing.items() if isinstance(thing, dict) else enumerate(thing)
            found |= {f"{name}.{key}": one for key, one in pairs}
        elif thing is not None:
            found[name] = thing
    return found


def unwrapped_objects(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns schedulers inside of wrappers in place of these; other objects as they are."""
    found: dict[str, Any] = {}
    for name, thing in given.items():
        several: Any = getattr(thing, "schedulers", None)
        if not isinstance(thing, LRScheduler) and _are_schedulers(several):
            found |= {f"{name}.{number}": scheduler for number, scheduler in enumerate(several)}
        elif hasattr(thing, "step_with_optimizer") and hasattr(thing, "scheduler"):
            found[name] = thing.scheduler
        else:
            found[name] = thing
    return found


def _are_schedulers(things: Any) -> bool:
    return isinstance(things, (list, tuple)) and bool(things) and all(isinstance(one, LRScheduler) for one in things)


def is_loader(thing: Any) -> bool:
    """Return whether it is a DataLoader, or a wrapper around one."""
    return isinstance(thing, DataLoader) or _unwrapped_loader(thing)[0] is not thing


def unwrapped_data(given: Any) -> tuple[Any, torch.device | None]:
    """Returns the loader inside, and the device to which the wrapper moves its batches, if it moves them.

    Of several loaders it returns each one's, in a container of the same kind.
    """
    if type(given) not in (dict, list, tuple):
        return _unwrapped_loader(given)
    several = list(given.values()) if isinstance(given, dict) else list(given)
    if not all(map(is_loader, several)):
        return given, None
    inside = [_unwrapped_loader(one) for one in several]
    loaders = [loader for loader, _ in inside]
    made = dict(zip(given, loaders, strict=True)) if isinstance(given, dict) else type(given)(loaders)
    return made, next((device for _, device in inside if device is not None), None)


def _unwrapped_loader(given: Any) -> tuple[Any, torch.device | None]:
    for name, device in (("_dataloader", "_device"), ("base_dataloader", "device")):
        inner = vars(given).get(name) if hasattr(given, "__dict__") else None
        if isinstance(inner, DataLoader):
            loader, inner_device = _unwrapped_loader(inner)
            return loader, getattr(given, device, None) or inner_device
    return given, None
