from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transfer.fleet import Fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Engines and a publisher that end with the test."""
    fleet = Fleet(tmp_path)
    try:
        yield fleet
    finally:
        fleet.close()
