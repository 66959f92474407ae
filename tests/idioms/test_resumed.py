"""Jobs that are killed as a whole and started again: what their scripts carry comes from the checkpoint as well."""

from pathlib import Path

import pytest

from tests.idioms.library import path_of
from tests.idioms.resumed import examine, with_checkpoints
from tests.idioms.trial import run_variant
from tests.idioms.verdict import Verdict

LACKS = "it lacks what the code after the steps of that job's last epoch has changed"

# Counters in closures and a history; the best weights, in a loop of epochs; the number of an epoch, given on twice; a
# setting of torch; the order of an optimizer's state; counts of what was read; averages of shards; what no checkpoint
# has: a queue, a hook, a tensor in which a step has laid the parameters.
VERDICTS = {
    "closure_counters": Verdict.EQUAL,
    "epochs_of_function": Verdict.EQUAL,
    "epochs_step_in_method": Verdict.EQUAL,
    "dtype_for_good": Verdict.EQUAL,
    "sum_over_state": Verdict.EQUAL,
    "counting_sampler": Verdict.EQUAL,
    "counting_from_rank": Verdict.EQUAL,
    "hsdp_ema_policy": Verdict.EQUAL,
    "scales_in_queue": Verdict.TOLD,
    "hook_for_good": Verdict.TOLD,
    "flat_lazy_optimizer": Verdict.TOLD,
}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_job_that_is_started_again_ends_as_if_it_had_never_ended(name: str) -> None:
    """Or says that this is not known."""
    verdict, words = examine(name, every=3)
    assert verdict is VERDICTS[name], words


@pytest.mark.parametrize("name", ["scale_after_block"])
def test_a_job_that_gets_more_steps_goes_on_after_the_code_that_followed_the_last_one(name: str) -> None:
    verdict, words = examine(name, every=3, more_steps=True)
    assert (verdict, words) == (Verdict.EQUAL, "")


def test_a_step_that_cannot_be_repeated_ends_no_job_that_starts_again() -> None:
    """A module that a step makes comes after the job's second step, which is repeated; the start is after that."""
    verdict, words = examine("late_plugin", every=3, more_steps=True)
    assert verdict is Verdict.TOLD, words
    assert "in the second step after a start from a checkpoint: step 9 was computed twice" in words
    assert "UsageError" not in words


def test_a_job_that_gets_more_epochs_is_told_what_its_checkpoint_lacks(tmp_path: Path) -> None:
    """The last checkpoint is written before the code that follows the last epoch's steps: a scheduler's step."""
    source = with_checkpoints(path_of("epochs_of_function").read_text(), tmp_path / "checkpoints", 4)
    assert source is not None
    endings = []
    for epochs in (1, 1, 2):
        script = tmp_path / "epochs_of_function.py"
        script.write_text(source.replace("epochs=4", f"epochs={epochs}"))
        endings.append(run_variant("epochs_of_function", script))
    assert [ending.status for ending in endings] == [0, 0, 0]
    assert [LACKS in ending.words for ending in endings] == [False, False, True]
