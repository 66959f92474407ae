"""The versions of what the workers of a host run, without importing it."""

import contextlib
import platform
from collections.abc import Mapping

COMPARED = ("relight", "torch")  # all hosts of a job must have the same


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, relight and torch here; of what is not installed, none."""
    import importlib.metadata  # the controller compares versions, and does not look here

    found = {"python": platform.python_version()}
    for name in COMPARED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def describe_difference(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Say what another host has that differs from this one; empty if nothing does, or one of them is not known."""
    differing = [name for name in COMPARED if name in here and name in there and here[name] != there[name]]
    if not differing:
        return ""
    has = " and ".join(f"{name} {there[name]}" for name in differing)
    wanted = " and ".join(f"{name} {here[name]}" for name in differing)
    return f"it has {has}, and the job's first host has {wanted}; install the same versions on every host"
