from collections.abc import Callable, Hashable
from pathlib import Path

import pytest

from tests.survival.harness import Bench, Outcome


@pytest.fixture(scope="session")
def references() -> dict[Hashable, Outcome]:
    """Ends of undisturbed jobs: computed when first asked for, once in a session."""
    return {}


@pytest.fixture
def bench(tmp_path: Path, references: dict[Hashable, Outcome]) -> Bench:
    """Runs jobs, each in a directory of its own."""
    directories = (tmp_path / f"job-{number}" for number in range(10_000))
    return Bench(lambda: next(directories), references)


@pytest.fixture
def small_disk(mount: Callable[[str], Path]) -> Path:
    return mount("size=2m")
