"""A script leaves its loop with steps to go, while another rank is lost: the code after the loop comes after that."""

from pathlib import Path

import pytest

from tests.survival.harness import Bench, Training
from tests.survival.judge import check_faults, check_survived

STEPS = 6
LAST = STEPS - 1
# The others leave the loop while rank 0 is still to be replaced; in BARRIER, once they have finished without it.
PLACES = ("BARRIER", "OPTIMIZER", "AFTER_WRITE", "AFTER_STEP")
ALWAYS = {("break", "BARRIER"), ("break", "AFTER_WRITE"), ("bar", "BARRIER"), ("return", "AFTER_STEP")}


def leaving(how: str, *arguments: str, ranks: int = 2) -> Training:
    return Training(ranks=ranks, steps=STEPS, program="leaving.py", arguments=("--how", how, *arguments))


@pytest.mark.parametrize(
    ("how", "place"),
    [
        pytest.param(how, place, marks=() if (how, place) in ALWAYS else pytest.mark.all)
        for how in ("break", "return", "inside", "bar")
        for place in PLACES
    ],
)
def test_the_code_after_the_loop_waits_for_a_replacement(bench: Bench, how: str, place: str) -> None:
    fault = f"kill rank 0 in {place} of step {LAST}"
    training = leaving(how)
    outcome = bench.run(training, faults=[fault])
    check_survived(outcome, bench.reference(training))
    check_faults(outcome, [fault])


@pytest.mark.parametrize("place", ["BARRIER", pytest.param("AFTER_WRITE", marks=pytest.mark.all)])
def test_two_of_three_ranks_leave(bench: Bench, place: str) -> None:
    training = leaving("break", ranks=3)
    faults = [f"kill rank 1 in {place} of step {LAST}"]
    check_survived(bench.run(training, faults=faults), bench.reference(training))


def test_when_nobody_is_left_who_knows_the_bits_are_doubted(bench: Bench) -> None:
    """Rank 1 finishes the step, and dies before its script runs the code that would leave the loop."""
    late = f"slow rank 0 in BEFORE_BARRIER of step {LAST}"  # so that rank 1 waits for it there, and can finish the step
    faults = [late, f"kill rank 0 in BARRIER of step {LAST}", "kill rank 1 in RESUME of recovery 1"]
    outcome = bench.run(leaving("break"), faults=faults, standbys=2)
    assert outcome.status == 0, outcome.describe()
    # That the new rank 0 hears the end of rank 1 before relight does may be told as one more, of no rank.
    struck = [failure for failure in outcome.report.failures if failure.rank >= 0]
    assert [(failure.rank, failure.kind) for failure in struck] == [(0, "killed"), (1, "killed")], outcome.describe()
    assert outcome.report.final_version == STEPS + 5, outcome.describe()
    assert any("every rank that has run the code after" in doubt.reason for doubt in outcome.report.doubts)


def test_a_replacement_of_a_replacement(bench: Bench) -> None:
    """It leaves without having taken a step, as the one before it was about to."""
    training = leaving("break")
    faults = [f"kill rank 0 in BARRIER of step {LAST}", "kill rank 0 in RESUME of recovery 1"]
    check_survived(bench.run(training, faults=faults, standbys=2), bench.reference(training))


@pytest.mark.parametrize("how", ["held", "caught"])
def test_a_loop_of_which_nothing_was_seen_is_finished_at_the_end_of_the_script(bench: Bench, how: str) -> None:
    assert bench.reference(leaving(how)).finals == bench.reference(leaving("break")).finals


def test_after_an_exception_that_the_script_caught_a_rank_may_be_lost(bench: Bench) -> None:
    training = leaving("caught", "--leave-alone")
    fault = f"kill rank 0 in AFTER_WRITE of step {LAST}"
    check_survived(bench.run(training, faults=[fault]), bench.reference(training))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("how", ["held", "caught"])
def test_a_state_that_may_have_changed_since_is_not_copied(bench: Bench, how: str, *, late: bool) -> None:
    """The survivor runs the code after the loop without the replacement: the job ends, and says why.

    Args:
        late: the survivor hears of the loss in the step, and recovers before the code after the loop. Otherwise it may
            hear of the loss at any time.
    """
    slow = [f"slow rank 1 in AFTER_WRITE of step {LAST}"] if late else []
    outcome = bench.run(leaving(how), faults=[*slow, f"kill rank 0 in AFTER_STEP of step {LAST}"])
    assert outcome.status != 0, outcome.describe()
    assert "the code after the loop has run here" in outcome.report.error, outcome.describe()


def test_a_break_after_a_step_that_was_interrupted_is_refused(bench: Bench) -> None:
    late = f"slow rank 0 in FORWARD of step {LAST}"  # so that the other rank has begun the step, and not yet to write
    outcome = bench.run(leaving("unguarded"), faults=[late, f"kill rank 0 in BACKWARD of step {LAST}"])
    assert outcome.status != 0, outcome.describe()
    assert "`if step.committed`" in outcome.report.error, outcome.describe()
    assert not outcome.finals, outcome.describe()


def test_a_rank_that_goes_on_alone_is_named(bench: Bench) -> None:
    """After a recovery all ranks say whether they go on, before any computes."""
    outcome = bench.run(leaving("alone", ranks=3), faults=[f"kill rank 0 in BARRIER of step {LAST}"])
    assert outcome.status != 0, outcome.describe()
    assert "goes on after step 5, after which other ranks have left" in outcome.report.error, outcome.describe()


EPOCHS = """
import relight
import torch
from torch.nn.parallel import DistributedDataParallel

job = relight.init()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training = relight.Training(model=model, optimizer=optimizer, data=torch.utils.data.DataLoader(torch.ones(6, 2)))
for epoch in training.epochs(2, steps_per_epoch=3):
    for step in training.steps():
        with step as batch:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    print(f"rank {job.rank} ends epoch {epoch}", flush=True)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replacement_that_takes_no_step_ends_the_last_epoch(bench: Bench, tmp_path: Path, rank: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(EPOCHS)
    fault = f"kill rank {rank} in AFTER_STEP of step {LAST}"
    outcome = bench.run(Training(ranks=2, steps=0, program=str(script), arguments=()), faults=[fault])
    assert outcome.status == 0, outcome.describe()
    check_faults(outcome, [fault])
    assert outcome.stdout.count(f"rank {rank} ends epoch 1") == 1, outcome.describe()
    assert outcome.stdout.count(f"rank {rank} ends epoch 0") == 1, outcome.describe()
