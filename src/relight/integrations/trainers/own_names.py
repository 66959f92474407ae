"""Attributes that a framework's own classes use, as opposed to those that a script's subclass adds."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, MethodType
from typing import Any, Protocol


class Show(Protocol):
    """Has relight look into an object, under a name, less the attributes that the integration keeps.

    Returns whether relight keeps the others: if the class is the script's own, or `of_library` is true.
    """

    def __call__(
        self, name: str, thing: Any, keeps: Callable[[str, Any], bool], /, *, of_library: bool = False
    ) -> bool: ...


class MadeIn(Protocol):
    """Describes what hooks make in a step, and a replacement could not get; empty: nothing is known."""

    def __call__(self, hooks: Sequence[MethodType], given: Mapping[str, Any], /) -> str: ...


def names_in(kind: type, package: tuple[str, ...]) -> set[str]:
    """The names that the code of a class uses, as far as the class and those above it are of these packages."""
    methods = [one for each in kind.__mro__ if each.__module__.startswith(package) for one in vars(each).values()]
    functions = [one.fget if isinstance(one, property) else one for one in methods]
    return {name for one in functions for name in getattr(getattr(one, "__code__", None), "co_names", ())}


def words_in(kind: type, method: str) -> set[str]:
    """The names and texts that the code of a method uses, with those of the class's members that it names."""
    words: set[str] = set()
    ahead = [method]
    while ahead:
        member = inspect.unwrap(getattr(kind, ahead.pop(), None))  # type: ignore[arg-type]
        member = member.fget if isinstance(member, property) else member
        new = _words(getattr(member, "__code__", member)) - words
        words |= new
        ahead += new
    return words


def _words(value: Any) -> set[str]:
    if isinstance(value, CodeType):
        return {*value.co_names}.union(*map(_words, value.co_consts))
    if isinstance(value, (tuple, list, set, frozenset)):
        return set().union(*map(_words, value))
    return {value} if isinstance(value, str) else set()
