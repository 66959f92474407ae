"""Learning-rate schedulers that exist in this process, whether or not the script has handed them over."""

import gc
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from relight.script_files import is_user_type

_DEEPEST = 8  # schedulers in lists of others, and the lists: SequentialLR, ChainedScheduler


def missing_schedulers(optimizers: Collection[Optimizer], handed: Iterable[Any]) -> list[Any]:
    """Return the schedulers of these optimizers that are not among the objects handed over, nor parts of these."""
    known = {id(part) for thing in handed for part in _parts_of(thing, _DEEPEST)}
    if any(True for _ in _others(known, optimizers)):
        gc.collect()  # it may be one that the script has thrown away
    return list(_others(known, optimizers))


def _others(known: Collection[int], optimizers: Collection[Optimizer]) -> Iterator[Any]:
    kinds: dict[type, bool] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in kinds:
            kinds[kind] = _is_scheduler(kind)
        if kinds[kind] and id(thing) not in known and follows(thing, optimizers):
            yield thing


def follows(scheduler: Any, optimizers: Collection[Optimizer]) -> bool:
    """Return whether a scheduler is one of these optimizers'."""
    return any(one is optimizer for one in vars(scheduler).values() for optimizer in optimizers)


def _is_scheduler(kind: type) -> bool:
    """Return whether it is a class of schedulers. Those of the script's own, not of torch's kind, are carried."""
    if issubclass(kind, LRScheduler):
        return True
    is_named_so = "scheduler" in kind.__name__.lower() and kind.__dictoffset__ != 0
    return is_named_so and hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict") and not is_user_type(kind)


def _parts_of(thing: Any, depth: int) -> Iterator[Any]:
    yield thing
    inside = thing if isinstance(thing, (list, tuple)) else getattr(thing, "__dict__", {}).values()
    for part in inside if depth else ():
        if isinstance(part, (list, tuple)) or _is_scheduler(type(part)):
            yield from _parts_of(part, depth - 1)


def own_state_dict(thing: Any) -> Any:
    """Return an object's `state_dict`, without schedulers in it (GradualWarmupScheduler's), which come alone."""
    state = thing.state_dict()
    if not shows_attributes(thing):
        return state
    return {key: value for key, value in state.items() if not isinstance(value, LRScheduler)}


def shows_attributes(thing: Any) -> bool:
    """Return whether this is a scheduler whose state is what its attributes are; what is missing stays on loading."""
    return isinstance(thing, LRScheduler) and type(thing).state_dict is LRScheduler.state_dict
