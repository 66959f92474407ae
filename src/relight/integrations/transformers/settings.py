"""Attributes of objects of the library that callbacks may set, which belong to no class of the script's own.

Among them arguments, configurations of models, the tokenizer and the collator.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.trainer_callback import TrainerControl, TrainerState

from relight.integrations.transformers.values import copied, is_plain, like, names_of

_LIBRARIES = ("transformers", "peft", "trl")
_ABSENT = object()


class Settings:
    """Plain attributes of these objects, as far as steps have changed them."""

    def __init__(self, trainer: Any) -> None:
        self._objects = dict(_objects_of(trainer))
        self._fields = {"state": names_of(TrainerState), "control": names_of(TrainerControl)}  # kept otherwise
        self._first = {name: self._plain(name, copied) for name in self._objects}  # as training begins
        self._there = {name: set(vars(one)) for name, one in self._objects.items()}  # also what is not plain

    def _plain(self, name: str, take: Callable[[Any], Any] = lambda value: value) -> dict[str, Any]:
        fields = self._fields.get(name, ())
        attributes = vars(self._objects[name])
        return {key: take(value) for key, value in attributes.items() if key not in fields and is_plain(value)}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return copies of those that differ from what they were as training began."""
        changed = {}
        for name, first in self._first.items():
            now = self._plain(name)
            if new := {key: copied(value) for key, value in now.items() if _differ(value, first.get(key, _ABSENT))}:
                changed[name] = new
        return changed

    def load_state_dict(self, saved: dict[str, dict[str, Any]]) -> None:
        """Make all of them what they were then."""
        for name, first in self._first.items():
            attributes = vars(self._objects[name])
            then = {**first, **saved.get(name, {})}
            for key, value in self._plain(name).items():
                if key not in then:
                    if key not in self._there[name]:
                        del attributes[key]
                elif _differ(value, then[key]):
                    attributes[key] = like(value, then[key])
            attributes |= {key: copied(value) for key, value in then.items() if key not in attributes}


def _objects_of(trainer: Any) -> list[tuple[str, Any]]:
    named = [("state", trainer.state), ("control", trainer.control), ("args", trainer.args)]
    others = {"processing_class": trainer.processing_class, "data_collator": trainer.data_collator}
    named += [(name, one) for name, one in others.items() if _is_librarys(one)]
    held = {id(one): one for one in _held_by(trainer.model)}
    return [*named, *((f"held_{number}", one) for number, one in enumerate(held.values()))]


def _held_by(model: nn.Module) -> list[Any]:
    """Objects of the library that a model and its parts hold: configurations, those in these, PEFT's allocator."""
    held = [one for module in model.modules() for one in _librarys_in(module)]
    return [one for first in held for one in (first, *_librarys_in(first))]


def _librarys_in(thing: Any) -> list[Any]:
    values = [one for value in vars(thing).values() for one in (value.values() if type(value) is dict else (value,))]
    return [one for one in values if _is_librarys(one)]


def _is_librarys(thing: Any) -> bool:
    """Return whether it is an object of the library with attributes: no module, and of no class of the script's own."""
    home = type(thing).__module__.partition(".")[0]
    return home in _LIBRARIES and hasattr(thing, "__dict__") and not isinstance(thing, nn.Module)


def _differ(value: Any, other: Any) -> bool:
    """Return whether two plain values are different ones, bit for bit; a number that is no number equals itself."""
    if value is other:
        return False
    if type(value) is not type(other):
        return True
    if isinstance(value, torch.Tensor):
        return value.dtype != other.dtype or value.shape != other.shape or not torch.equal(value, other)
    if isinstance(value, dict):
        return list(value) != list(other) or any(_differ(each, other[key]) for key, each in value.items())
    if isinstance(value, np.ndarray):
        return value.dtype != other.dtype or not np.array_equal(value, other)
    if isinstance(value, (list, tuple)):
        return len(value) != len(other) or any(map(_differ, value, other))
    return bool(value != other)
