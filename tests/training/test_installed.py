"""Warnings of relight about the installed torch."""

import ast
import contextlib
import importlib
import re
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch

from checks import torch_names
from relight.errors import MissingInterfaceError, UsageError
from relight.training.torch_private import installed
from relight.training.torch_private.installed import (
    ATTRIBUTES,
    FEATURES,
    NEEDED,
    TESTED,
    code_of,
    describe_installed,
    is_tested,
    missing,
    refuse_missing,
    refuse_missing_of,
)

# Names that are not looked for at start.
NOT_NEEDED = {
    "_FrameAction": "goes with _FrameExecStrategy",
    "_FrameExecStrategy": "used where it exists",
    "_devices": "of C++, set when the first group forms: before the first step",
    "_timeout": "of C++, set when the first group forms: before the first step",
    "_initialize_pp_stages": "used where it exists",
    "_last_post_reduce_events": "used where it exists",
    "_mask": "the end of a name that torch.nn.utils.prune documents",
    "_modules_to_run_forward": "used where it exists",
    "_opt_called": "set on an optimizer by schedulers, which warn by it; left out where it is",
    "_orig": "the end of a name that torch.nn.utils.prune documents",
    "_relight": "relight's own",
    "_relight_place": "relight's own",
    "_sampler_iter_yielded": "of torchdata's iterators",
    "_torchdynamo_disable": "of the compiler, which takes seconds to import; test_torch_private.py tries it",
}


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


def moved(home: str, name: str) -> CodeType:
    """Return the code of one of torch's modules from its text, in which a name was changed everywhere."""
    path = importlib.import_module(home).__file__
    assert path is not None
    text = re.sub(rf"\b({name})\b", lambda match: f"{match[1]}_moved", Path(path).read_text())
    return compile(text, path, "exec")


def attributes(needed: Mapping[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(home, name) for home, names in needed.items() for name in names]


def remove(home: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = moved(home, name)
    monkeypatch.setattr(installed, "code_of", lambda asked: gone if asked == home else code_of(asked))


@pytest.mark.parametrize(("home", "name"), attributes(ATTRIBUTES))
def test_an_attribute_that_is_removed_is_named(home: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remove(home, name, monkeypatch)
    assert missing() == [f"{home}.{name}"]


FEATURE_ATTRIBUTES = [(feature, *pair) for feature, needed in FEATURES.items() for pair in attributes(needed)]


@pytest.mark.parametrize(("feature", "home", "name"), FEATURE_ATTRIBUTES)
def test_an_attribute_of_a_feature_that_is_removed_is_named(
    feature: str, home: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = refuse_missing_of.__wrapped__
    look(feature)
    remove(home, name, monkeypatch)
    expected = re.escape(f"lacks {home}.{name}, which relight, for {feature}, needs")
    with pytest.raises(MissingInterfaceError, match=expected):
        look(feature)


def test_every_private_name_that_is_used_is_looked_for() -> None:
    """A name may be left out only if relight itself has another way where it is missing."""
    needed = [NEEDED, ATTRIBUTES, *FEATURES.values()]
    listed = {
        part
        for table in needed
        for home, names in table.items()
        for name in (home, *names)
        for part in re.split(r"[.|]", name)
    }
    for path in sorted((torch_names.SOURCE / "training" / "torch_private").rglob("*.py")):
        if path.stem == "installed":
            continue
        used = {
            name
            for _, text in torch_names.violations(ast.parse(path.read_text()), frozenset())
            for name in re.findall(r"(?<![A-Za-z0-9_])_[A-Za-z][A-Za-z0-9_]*", text)
        }
        own = set(torch_names.names_defined(ast.parse(path.read_text())))
        unlisted = used - listed - own - NOT_NEEDED.keys()
        assert not unlisted, f"{path.stem} uses {sorted(unlisted)}: add them to installed.py"
