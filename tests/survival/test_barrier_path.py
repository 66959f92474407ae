"""The barrier of ranks that share memory goes through it."""

import pytest

from tests.programs.barrier_path import THROUGH_GLOO
from tests.survival.harness import Bench, Training

STEPS = 8


@pytest.mark.parametrize("flags", [(), ("--buddy-every", "2")], ids=["plain", "with snapshots"])
def test_gloo_is_only_asked_who_shares_memory(bench: Bench, flags: tuple[str, ...]) -> None:
    training = Training(ranks=2, steps=STEPS, program="barrier_path.py")
    with bench.start(training, standbys=0, flags=flags) as job:
        outcome = job.wait()
    assert outcome.status == 0, outcome.describe()
    for rank in range(2):
        counted = (outcome.run_dir.parent / THROUGH_GLOO.format(rank)).read_text()
        # The ranks compare their first steps as well, with more numbers than fit into that memory.
        assert int(counted) < STEPS / 2, outcome.describe()
