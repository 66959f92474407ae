"""A dashboard for a test, ended with it."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dashboard.made_up import MadeUpJob
from tests.dashboard.served import Served

Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a dashboard for a run directory."""
    started: list[Served] = []

    def begin(run_dir: Path, host: str = "127.0.0.1", port: int = 0) -> Served:
        started.append(Served(run_dir, host, port))
        return started[-1]

    try:
        yield begin
    finally:
        for served in started:
            if served.process.poll() is None:
                assert served.close() == 0


@pytest.fixture
def made(tmp_path: Path) -> MadeUpJob:
    """A job of four ranks with ten steps, which began twelve seconds ago."""
    job = MadeUpJob(tmp_path / "run", ranks=4, wall=time.time() - 12, step_seconds=1.0)
    job.steps(10)
    return job
