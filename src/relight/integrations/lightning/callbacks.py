"""State of callbacks: plain values in their attributes, and in those of the script's own objects that they hold.

Kept from the first step on. `on_train_batch_end` of a step runs at the beginning of the next one, so it first changes
something in the second step, which is computed twice: relight itself would find only then what is to be undone.
"""

import functools
from collections.abc import Collection, Container, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelSummary, ProgressBar

from relight.errors import UsageError
from relight.integrations.lightning.values import copied, is_plain, moved
from relight.integrations.trainers.held import is_own_object
from relight.integrations.trainers.own_names import words_in
from relight.transfer.io.constants import callable_of, name_of_callable

_SHOW = (ProgressBar, ModelSummary)  # without state that training depends on
_KEPT_ELSEWHERE = (Trainer, LightningDataModule)
_ALL = ("__dict__", "vars")  # in the code of a state_dict: it says all attributes
_DEEPEST = 6
_LIST, _SAME, _MODULE = "list", "same", "module"  # kinds of things beside those of classes, by their names
_PLAIN, _MADE, _OTHER = range(3)  # items of a list: a value, a thing with an entry of its own, of a library
Way = tuple[Any, ...]  # attributes, keys and places on the way to an object


def state_of(callback: Callback, left: Collection[str] = ()) -> list[tuple[Way, str, Any]]:
    """Return copies of what a callback holds: the way to each object or list, its kind, and its contents.

    `left`: attributes that are left out.
    """
    if isinstance(callback, _SHOW):
        return []
    said = {name for name, value in vars(callback).items() if says_itself(callback, name, value)}
    return [
        (way, kind, _contents(kind, thing))
        for way, kind, thing in _things_in(callback)
        if kind != _MODULE and (not way or way[0] not in said.union(left))
    ]


def modules_of(callback: Callback, known: Container[torch.nn.Module] = ()) -> Iterator[tuple[Way, torch.nn.Module]]:
    """Yield the modules with parameters that a callback holds, less those that have a known one in them."""
    for way, kind, thing in _things_in(callback):
        if kind == _MODULE and thing not in known and not any(each in known for each in thing.modules()):
            yield way, thing


def says_itself(callback: Callback, name: str, value: Any) -> bool:
    """Return whether the callback's own `state_dict` uses an attribute that holds modules, or others that have one."""
    words = _words_said(type(callback))  # type: ignore[arg-type]
    return (name in words or not words.isdisjoint(_ALL)) and _holds_state(value)


@functools.cache
def _words_said(kind: type[Callback]) -> frozenset[str]:
    return frozenset(() if kind.state_dict is Callback.state_dict else words_in(kind, "state_dict"))


def _holds_state(value: Any, depth: int = 0) -> bool:
    if is_plain(value) or depth > _DEEPEST:
        return False
    if hasattr(value, "state_dict"):
        return True
    inside = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return any(_holds_state(each, depth + 1) for each in (vars(value).values() if is_own_object(value) else inside))


def load(callback: Callback, saved: list[tuple[Way, str, Any]]) -> None:
    """Put back what `state_of` returned, into the objects that are there.

    Lists lose what came into them since then. In a replacement, objects that steps of its predecessor made are made.
    Raises UsageError: that is an object which cannot be made here.
    """
    for way, kind, contents in saved:
        if kind == _SAME:
            _put(callback, way, functools.reduce(_inside, contents, callback))
            continue
        thing = _thing_at(callback, way, kind)
        if kind == _LIST:
            if any(sort == _OTHER for sort, _ in contents[len(thing) :]):
                raise _lacks(callback, way)
            thing[:] = [
                moved(value, None) if sort == _PLAIN else _inside(thing, place)
                for place, (sort, value) in enumerate(contents)
            ]
            continue
        for name, value in contents.items():
            mine = vars(thing).get(name)
            setattr(thing, name, moved(value, mine.device if isinstance(mine, torch.Tensor) else None))


def _thing_at(callback: Callback, way: Way, kind: str) -> Any:
    """Return the list or object at the end of a way, or make one: its contents follow."""
    found: Any = functools.reduce(_inside, way, callback)
    is_there = type(found) is list if kind == _LIST else found is callback or is_own_object(found)
    if is_there:
        return found
    made: Any = []
    if kind != _LIST:
        if not isinstance(its_class := callable_of(kind), type):
            raise _lacks(callback, way)
        made = object.__new__(its_class)
    _put(callback, way, made)
    return made


def _put(callback: Callback, way: Way, thing: Any) -> None:
    *way_to_holder, last = way
    holder: Any = functools.reduce(_inside, way_to_holder, callback)
    if type(holder) in (list, dict):
        holder[last] = thing
    elif holder is callback or is_own_object(holder):
        setattr(holder, last, thing)
    elif _inside(holder, last) is not thing:
        raise _lacks(callback, way)


def _inside(holder: Any, name: Any) -> Any:
    """Return an item or attribute; None: there is none."""
    if type(holder) in (list, tuple):
        return holder[name] if name < len(holder) else None
    return (holder if type(holder) is dict else getattr(holder, "__dict__", {})).get(name)


def _lacks(callback: Callback, way: Way) -> UsageError:
    return UsageError(
        f"callback {type(callback).__qualname__}: {'.'.join(map(str, way))} has objects that steps made, and this "
        "replacement has none and cannot make them: keep numbers, tensors or objects of your own classes in attributes "
        "and lists, or give the callback state_dict() and load_state_dict()"
    )


def _contents(kind: str, thing: Any) -> Any:
    if kind == _SAME:
        return thing
    if kind == _LIST:
        return list(map(_item, thing))
    return {name: copied(value) for name, value in vars(thing).items() if is_plain(value)}


def _item(value: Any) -> list[Any]:
    if is_plain(value):
        return [_PLAIN, copied(value)]
    is_kept_elsewhere = isinstance(value, (torch.nn.Module, *_KEPT_ELSEWHERE))
    return [_MADE if type(value) is list or (is_own_object(value) and not is_kept_elsewhere) else _OTHER, None]


def _things_in(callback: Callback) -> Iterator[tuple[Way, str, Any]]:
    """Yield the callback, and the objects of the script's own, lists and modules that it holds, each once.

    Where one of them is held again, the way to the first place is yielded for it.
    """
    yield (), "", callback
    seen: dict[int, Way] = {id(callback): ()}
    for name, value in vars(callback).items():
        yield from _found_in(value, (name,), seen)


def _name_of(kind: Any) -> str:
    """Return the name by which another process finds a class whose objects are their attributes; "": there is none."""
    if kind.__new__ is not object.__new__:
        return ""
    return name_of_callable(kind) or ""


def _found_in(value: Any, way: Way, seen: dict[int, Way]) -> Iterator[tuple[Way, str, Any]]:
    if len(way) > _DEEPEST or is_plain(value) or isinstance(value, _KEPT_ELSEWHERE):
        return
    if isinstance(value, torch.nn.Module):
        if next(value.parameters(), None) is not None:
            yield way, _MODULE, value  # kept where it is handed over
        return
    is_own = is_own_object(value)
    if not is_own and type(value) not in (list, tuple, dict):
        return
    if id(value) in seen:
        yield way, _SAME, seen[id(value)]
        return
    seen[id(value)] = way
    inside: list[tuple[Any, Any]] = []
    if is_own:
        yield way, _name_of(type(value)), value
        inside = list(vars(value).items())
    elif type(value) is dict:
        inside = [(key, each) for key, each in value.items() if type(key) in (str, int)]
    else:
        if type(value) is list:
            yield way, _LIST, value
        inside = list(enumerate(value))
    for name, each in inside:
        yield from _found_in(each, (*way, name), seen)
