"""Options: the way a setting is asked for on a command line, declared beside the setting, as in wire/settings.py."""

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from relight.errors import UsageError


@dataclass(frozen=True)
class Option:
    """Flags, help and bounds of one setting. Its type and default are those of the field that it annotates."""

    group: str  # of the flags with which --help lists it; empty: it is listed with those of no group
    help: str
    _: KW_ONLY
    flags: tuple[str, ...] = ()  # default: the field's name
    metavar: str = "N"
    noun: str = ""  # what is counted or measured, for people: "number of seconds"
    above: float | None = None  # bounds
    least: float | None = None
    most: float | None = None
    unset: str = ""  # what happens if it is not given and has no default, in words
    inverted: bool = False  # the flag sets the field to False

    @property
    def bounds(self) -> str:
        """The values that are accepted, in words; empty for any."""
        if self.above is not None:
            return f"above {_number(self.above)}"
        if self.most is not None:
            return f"from {_number(self.least or 0)} to {_number(self.most)}"
        return "" if self.least is None else f"{_number(self.least)} or more"

    def check(self, value: float | None, flag: str) -> None:
        """Raise UsageError, with the flag, the value and the bounds, if the value is outside of them."""
        if value is None or isinstance(value, bool) or not self.bounds:
            return
        if (
            not math.isfinite(value)
            or (self.above is not None and value <= self.above)
            or (self.least is not None and value < self.least)
            or (self.most is not None and value > self.most)
        ):
            expected = f"a {self.noun} {self.bounds}" if self.noun else self.bounds
            raise UsageError(f"{flag} {_number(value)}: expected {expected}")


@dataclass(frozen=True, kw_only=True)
class SettingOption:
    """One option together with the field that it sets."""

    field: str
    kind: type  # bool, int, float, str or a path
    choices: tuple[str, ...]  # the only values that are accepted; empty: any
    default: Any
    option: Option

    @property
    def is_required(self) -> bool:
        """True if the flag must be given: its field has no default."""
        return self.default is msgspec.NODEFAULT

    @property
    def flags(self) -> tuple[str, ...]:
        """All spellings, the first one first."""
        return self.option.flags or (f"--{self.field.replace('_', '-')}",)

    @property
    def help(self) -> str:
        """The text for --help: what it does, the bounds and the default."""
        facts = [self.option.bounds] if self.option.bounds else []
        if self.option.unset:
            facts.append(f"default: {self.option.unset}")
        elif self.kind is not bool and self.default not in (None, "", msgspec.NODEFAULT):
            facts.append(f"default {_number(self.default)}")
        return f"{self.option.help} ({'; '.join(facts)})" if facts else self.option.help


def options_of(settings: type[msgspec.Struct]) -> Iterator[SettingOption]:
    """Yield the options of a settings type, in the order of its fields."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(settings)}
    for name, hint in get_type_hints(settings, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kinds, option = get_args(hint)
            choices = get_args(kinds) if get_origin(kinds) is Literal else ()
            kind, *_ = [str] if choices else [each for each in get_args(kinds) or (kinds,) if each is not type(None)]
            yield SettingOption(field=name, kind=kind, choices=choices, default=defaults[name], option=option)


def _number(value: Any) -> str:
    """Show a number, or a word, as people write it on a command line."""
    return f"{value:g}" if isinstance(value, float) else str(value)
