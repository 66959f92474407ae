"""DDP wrappers that are used late, rarely, alternately, twice in a step or never: the bits of an undisturbed job."""

import re
import subprocess
import sys

import pytest

from tests.survival.harness import DEADLINE_SECONDS, PROGRAMS, ROOT, Bench, Training, plain_environment
from tests.survival.judge import check_faults, check_survived

TRAINING = Training(ranks=3, steps=8, program="wrappers.py")
# The first step in which some wrapper is used is repeated (0), finished by survivors (2), copied (4 and 6). A reducer
# that does not know of its wrapper's history adds up other gradients, or waits forever. In step 4, survivors wait in a
# backward pass for which a network is frozen.
FAULTS = [
    "kill rank 1 in BACKWARD of step 0",
    "kill rank 0 in BEFORE_BARRIER of step 2",
    "kill rank 2 in FORWARD of step 4",
    "kill rank 2 in BEFORE_BARRIER of step 6",
]


def ends(output: str) -> dict[str, str]:
    return dict(re.findall(r"end (\w+) (\w+)", output))


def test_each_wrapper_has_the_buckets_of_its_own_history(bench: Bench) -> None:
    outcome, reference = bench.run(TRAINING, faults=FAULTS, standbys=2), bench.reference(TRAINING)
    check_survived(outcome, reference)
    check_faults(outcome, FAULTS)
    assert ends(outcome.stdout) == ends(reference.stdout)
    assert len(ends(outcome.stdout)) == 11


@pytest.mark.all
def test_each_wrapper_has_the_bits_of_torchrun(bench: Bench) -> None:
    """But for a static graph, which keeps its first buckets."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*command, str(PROGRAMS / "wrappers.py"), "--plain", "--steps", "8"],
        cwd=ROOT,
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=True,
    )
    plain, own = ends(done.stdout), ends(bench.reference(TRAINING).stdout)
    assert {name for name in own if own[name] != plain[name]} <= {"static"}
