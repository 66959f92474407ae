"""Steps of any shape are undone as a whole: a rank dies between their writes, and the bits stay those of no failure."""

import pytest

from tests.programs.shapes import SHAPES
from tests.survival.harness import Bench, Training
from tests.survival.judge import check_survived

STEPS = 11
# Behind the first steps, in which everything is copied, and again after a recovery.
DEATHS = ("backward:5:1", "written:8:0")
LATE_DEATHS = ("late:4:1", "written:7:0", "end:9:1")
HAVE_LATE_PLACES = ("two-writes", "logged", "sam")
ALWAYS = ("two-writes", "momentum-encoder", "evaluation", "assigned")


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=() if shape in ALWAYS else pytest.mark.all) for shape in SHAPES]
)
def test_a_rank_dies_in_a_step_of_any_shape(bench: Bench, shape: str) -> None:
    training = Training(ranks=2, steps=STEPS, program="shapes.py", arguments=("--shape", shape))
    deaths = LATE_DEATHS if shape in HAVE_LATE_PLACES else DEATHS
    disturbed = Training(
        ranks=2,
        steps=STEPS,
        program="shapes.py",
        arguments=("--shape", shape, *(word for death in deaths for word in ("--die", death))),
    )
    outcome = bench.run(disturbed, standbys=2)
    check_survived(outcome, bench.reference(training))
    assert len(outcome.report.failures) == len(deaths), outcome.describe()
