"""Warnings of relight about the installed torch."""

import contextlib
import importlib
import re
from functools import reduce
from typing import Any

import pytest
import torch

from relight.errors import UsageError
from relight.training.torch_private import installed
from relight.training.torch_private.installed import (
    NEEDED,
    TESTED,
    describe_installed,
    is_tested,
    missing,
    refuse_missing,
)


def test_the_installed_torch_is_a_tested_one_and_has_all_that_is_needed() -> None:
    assert missing() == []
    assert is_tested(torch.__version__)
    assert describe_installed() == ""


def test_builds_and_patches_of_a_tested_release_are_tested() -> None:
    assert is_tested(f"{TESTED[-1]}.7+cu130")
    assert not is_tested("1.13.0")


def test_another_release_is_named_with_those_that_were_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.99.0+cpu")
    said = describe_installed()
    assert "9.99.0" in said
    assert TESTED[-1] in said


def test_what_is_missing_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {**NEEDED, "torch": ("_C._no_such_thing",), "torch.no_such_module": ("anything",)}
    monkeypatch.setattr(installed, "NEEDED", gone)
    with pytest.raises(UsageError, match=r"lacks torch\._C\._no_such_thing, torch\.no_such_module, which"):
        refuse_missing()


@pytest.mark.parametrize(("home", "name"), [(home, name) for home, names in NEEDED.items() for name in names])
def test_an_interface_that_is_removed_is_named(home: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in turn is really taken away from the installed torch, or what holds it where that is of C++."""
    module = importlib.import_module(home)
    path, _, last = name.rpartition(".")
    owner: Any = reduce(getattr, path.split("."), module) if path else module
    with contextlib.suppress(AttributeError, TypeError):
        monkeypatch.delattr(owner, last)
    if hasattr(owner, last):  # of C++, or inherited too
        monkeypatch.setattr(module, name.partition(".")[0], object())
    assert f"{home}.{name}" in missing()
    with pytest.raises(UsageError, match=rf"lacks .*{re.escape(f'{home}.{name}')}.*, which relight needs"):
        refuse_missing()
