from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.transfer.plan.update.way import Way
from tests.transfer.fleet import Fleet


@pytest.fixture(params=[Way.COPIED, Way.LENT])
def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Engines and a publisher that end with the test; buckets are copied, or lent."""
    fleet = Fleet(tmp_path, request.param)
    try:
        yield fleet
    finally:
        fleet.close()
