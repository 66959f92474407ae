"""Controllers for the tests of the server, each ended by its process id."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.controller_process import ControllerProcess


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ControllerProcess]]:
    """Start a controller with these settings."""
    started: list[ControllerProcess] = []

    def make(**settings: Any) -> ControllerProcess:
        started.append(ControllerProcess(tmp_path, **settings))
        return started[-1]

    try:
        yield make
    finally:
        for controller in started:
            controller.close()
