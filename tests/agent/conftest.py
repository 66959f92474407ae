from collections.abc import Iterator

import pytest

from tests.agent.peer import Job


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    try:
        yield job
    finally:
        job.close()
