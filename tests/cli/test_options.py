"""Every option is documented; every setting is declared once, with bounds that --help shows and errors name."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from relight.cli import make_parser
from relight.core.controller import ControllerSettings
from relight.core.detection.detector import DetectorSettings
from relight.errors import UsageError
from relight.wire.option import Option, SettingOption, options_of
from relight.wire.settings import JobSettings

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "\n".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
SETTINGS = {setting.field: setting for setting in options_of(JobSettings)}


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of all commands, and of theirs."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from commands(command)


def options() -> Iterator[tuple[str, tuple[str, ...]]]:
    """All options of all commands, each with its spellings."""
    for parser in commands(make_parser()):
        for action in parser._actions:
            if action.option_strings and "--help" not in action.option_strings:
                yield parser.prog, tuple(action.option_strings)


@pytest.mark.parametrize(("command", "spellings"), list(options()))
def test_every_option_is_in_the_manual(command: str, spellings: tuple[str, ...]) -> None:
    found = (re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", PAGES) for flag in spellings)
    assert any(found), f"{command}: {' or '.join(spellings)} is on no page of docs/"


@pytest.mark.parametrize("part", [ControllerSettings, DetectorSettings])
def test_what_the_core_decides_by_are_settings_of_the_job(part: type[msgspec.Struct]) -> None:
    settings = {field.name: field for field in msgspec.structs.fields(JobSettings)}
    for field in msgspec.structs.fields(part):
        if isinstance(getattr(JobSettings, field.name, None), property):  # it follows from settings
            continue
        assert field.name in settings
        if field.default is not msgspec.NODEFAULT:
            assert field.default == settings[field.name].default, field.name


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.field)
def test_the_default_is_within_the_bounds(setting: SettingOption) -> None:
    if setting.kind is not str:
        setting.option.check(setting.default, setting.flags[0])


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.field)
def test_help_names_bounds_and_default(setting: SettingOption) -> None:
    assert setting.option.bounds in setting.help
    assert setting.kind is bool or "default" in setting.help


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        (Option("", "", above=0, noun="number of seconds"), 0, "a number of seconds above 0"),
        (Option("", "", above=0, noun="number of seconds"), float("nan"), "nan"),
        (Option("", "", above=0), float("inf"), "inf"),
        (Option("", "", least=1), 0, "expected 1 or more"),
        (Option("", "", least=1, most=5, noun="port"), 6, "expected a port from 1 to 5"),
    ],
)
def test_a_wrong_value_is_named_with_its_option_and_its_bounds(option: Option, value: float, words: str) -> None:
    with pytest.raises(UsageError, match=rf"^--flag {value:g}: expected ") as raised:
        option.check(value, "--flag")
    assert words in str(raised.value)


def test_values_at_the_bounds_are_accepted() -> None:
    Option("", "", least=1, most=5).check(1, "--flag")
    Option("", "", least=1, most=5).check(5, "--flag")
    Option("", "", above=1).check(1.01, "--flag")
    Option("", "", least=1).check(None, "--flag")
