"""The working directory is nothing to a job: modules that lie there are not imported, whatever they are called."""

import sys

from tests.survival.harness import Bench, Job, Training
from tests.survival.judge import check_faults, check_survived

FAULTS = ("kill rank 1 in OPTIMIZER of step 2",)
TRAINING = Training(ranks=2)
DEPENDENCIES = {"msgspec", "numpy", "psutil", "rich", "torch", "xxhash"}


def test_modules_of_any_name_may_lie_in_the_working_directory(bench: Bench) -> None:
    """A `queue.py` of a user's ended each agent that was started, and the job waited for one forever."""
    directory = bench.make_directory()
    directory.mkdir(parents=True, exist_ok=True)
    for name in sys.stdlib_module_names | DEPENDENCIES:
        (directory / f"{name}.py").write_text("raise SystemExit('imported from the working directory')\n")
    with Job(directory, TRAINING, faults=FAULTS) as job:
        outcome = job.wait()
    check_survived(outcome, bench.reference(TRAINING))
    check_faults(outcome, FAULTS)
