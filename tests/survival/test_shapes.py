"""Steps of any shape are undone as a whole: a rank dies between their writes, and the bits stay those of no failure."""

from pathlib import Path

import pytest

from tests.programs.shapes import SHAPES
from tests.survival.harness import Bench, Training
from tests.survival.judge import check_protocol, check_survived

STEPS = 11
# Behind the first steps, in which everything is copied, and again after a recovery.
DEATHS = ("backward:5:1", "written:8:0")
LATE_DEATHS = ("late:4:1", "written:7:0", "end:9:1")
HAVE_LATE_PLACES = ("two-writes", "lazy", "logged", "sam")
ALWAYS = ("two-writes", "lazy", "evaluation")
SURPRISING = ("seldom",)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, marks=() if shape in ALWAYS else pytest.mark.all)
        for shape in SHAPES
        if shape not in SURPRISING
    ],
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


def test_the_end_of_a_job_names_what_could_not_be_undone(bench: Bench) -> None:
    """The first step that writes twice: a rank dies after the first write, and the other cannot go back."""
    arguments = ("--shape", "seldom", "--die", "written:6:1")
    outcome = bench.run(Training(ranks=2, steps=STEPS, program="shapes.py", arguments=arguments), standbys=1)
    assert outcome.status != 0, outcome.describe()
    assert "in step 6 allreduce came after the write at shapes.py:" in outcome.report.error, outcome.describe()


def test_a_rank_dies_while_others_agree_on_the_buckets_of_the_first_step(bench: Bench) -> None:
    """The end of the block has collectives of its own, before the barrier: DDP's, of its new gradient buckets."""
    arguments = ("--shape", "decay")
    disturbed = Training(ranks=2, steps=3, program="shapes.py", arguments=(*arguments, "--die", "end:0:1"))
    outcome = bench.run(disturbed, standbys=1)
    check_survived(outcome, bench.reference(Training(ranks=2, steps=3, program="shapes.py", arguments=arguments)))
    assert len(outcome.report.failures) == 1, outcome.describe()


@pytest.mark.all
@pytest.mark.parametrize("shape", ["thawing", "assigned"])
def test_a_job_that_is_started_again_has_what_its_steps_changed(bench: Bench, tmp_path: Path, shape: str) -> None:
    """Groups of its optimizer, what requires gradients, attributes: a script that goes on late does none of it."""
    arguments = ("--shape", shape, "--checkpoints", str(tmp_path / "checkpoints"))
    first = bench.run(Training(ranks=2, steps=8, program="shapes.py", arguments=arguments), standbys=0)
    assert first.status == 0, first.describe()
    again = bench.run(Training(ranks=2, steps=STEPS, program="shapes.py", arguments=arguments), standbys=0)
    expected = bench.reference(Training(ranks=2, steps=STEPS, program="shapes.py", arguments=("--shape", shape)))
    assert "goes on from the checkpoint of step 8" in again.stderr, again.describe()
    assert again.finals == expected.finals, f"{again.describe()}\n{again.finals}\n{expected.finals}"
    assert not check_protocol(again), again.describe()
