"""State of callbacks: plain values in their attributes, and in those of the script's own objects that they hold.

Kept from the first step on. `on_train_batch_end` of a step runs at the beginning of the next one, so it first changes
something in the second step, which is computed twice: relight itself would find only then what is to be undone.
"""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelSummary, ProgressBar

from relight.errors import UsageError
from relight.integrations.lightning.values import copied, is_plain, moved
from relight.integrations.trainers.held import is_own_object

_SHOW = (ProgressBar, ModelSummary)  # without state that training depends on
_KEPT_ELSEWHERE = (torch.nn.Module, Trainer, LightningDataModule)
_DEEPEST = 6
Way = tuple[Any, ...]  # attributes, keys and places on the way to an object


def state_of(callback: Callback) -> list[tuple[Way, dict[str, Any]]]:
    """Return copies of what a callback holds."""
    if isinstance(callback, _SHOW):
        return []
    return [(way, _plain_values_of(thing)) for way, thing in _objects_in(callback)]


def load(callback: Callback, saved: list[tuple[Way, dict[str, Any]]]) -> None:
    """Put back what `state_of` returned, into the objects that are there. Lists lose what came into them since then.

    Raises UsageError: an object of the source is not there, since a step has made it.
    """
    there = dict(_objects_in(callback))
    for way, values in saved:
        thing = there.get(tuple(way))
        if thing is None or (isinstance(thing, list) and len(thing) < values.get("length", 0)):
            raise UsageError(
                f"callback {type(callback).__qualname__}: {'.'.join(map(str, way))} has objects that steps made, and "
                "this replacement has none: keep numbers in it, or give the callback state_dict() and load_state_dict()"
            )
        if isinstance(thing, list):
            del thing[values["length"] :]
            continue
        for name, value in values.items():
            mine = vars(thing).get(name)
            setattr(thing, name, moved(value, mine.device if isinstance(mine, torch.Tensor) else None))


def _plain_values_of(thing: Any) -> dict[str, Any]:
    if isinstance(thing, list):
        return {"length": len(thing)}
    return {name: copied(value) for name, value in vars(thing).items() if is_plain(value)}


def _objects_in(callback: Callback) -> Iterator[tuple[Way, Any]]:
    """Yield the callback, and the objects of the script's own and the lists that it holds, each once."""
    yield (), callback
    seen = {id(callback)}
    for name, value in vars(callback).items():
        yield from _found_in(value, (name,), seen)


def _found_in(value: Any, way: Way, seen: set[int]) -> Iterator[tuple[Way, Any]]:
    if len(way) > _DEEPEST or is_plain(value) or id(value) in seen or isinstance(value, _KEPT_ELSEWHERE):
        return
    seen.add(id(value))
    if type(value) is list:
        yield way, value
    if type(value) in (list, tuple):
        inside: list[tuple[Any, Any]] = list(enumerate(value))
    elif type(value) is dict:
        inside = [(key, each) for key, each in value.items() if type(key) in (str, int)]
    elif is_own_object(value):
        yield way, value
        inside = list(vars(value).items())
    else:
        return
    for name, each in inside:
        yield from _found_in(each, (*way, name), seen)
