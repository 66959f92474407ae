"""Jobs that are killed as a whole and started again: what their scripts carry comes from the checkpoint as well."""

import pytest

from tests.idioms.resumed import examine
from tests.idioms.verdict import Verdict

# Counters in closures and a history; weights that were the best, in a loop of epochs.
NAMES = ("closure_counters", "epochs_of_function")


@pytest.mark.parametrize("name", NAMES)
def test_a_job_that_is_started_again_ends_as_if_it_had_never_ended(name: str) -> None:
    verdict, words = examine(name, every=3)
    assert verdict is Verdict.EQUAL, words
