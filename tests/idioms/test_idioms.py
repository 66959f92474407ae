"""The library of idioms: each script ends with the bits of an undisturbed run, or relight says what to change."""

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from tests.idioms.library import names, path_of
from tests.idioms.trial import (
    early_kills,
    killed_at_random,
    killed_in_phases,
    phase_kills,
    run_variant,
    undisturbed,
    without_relight,
)
from tests.idioms.verdict import Ending, Verdict, digests_in, judge, sections, what_differs

# Two writes in a step; D and G in turns; a momentum encoder; a variable of the loop; flags for a moment; own subgroups.
# Loaders that only an evaluation reads, made from the rank.
COMMON = (
    *("dcgan", "gan_alternate", "moco", "tbptt_rnn", "eval_inside", "subgroups"),
    *("held_out_of_rank", "channels_last_cnn", "soap_bases"),
)


# Wrappers that were used before the loop, and others used for the first time after a step's first write.
ADDED_UP = ("lr_finder", "vqgan_late_discriminator")


# For a variant of a script.
_DIE_ONCE = """
def die_once(rank, is_due):
    import os
    import signal

    import torch.distributed as dist

    if is_due and dist.get_rank() == rank:
        try:
            open({!r}, "x").close()
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Output of these scripts without relight, once in a session: undisturbed, they have the same bits under it."""
    directory = tmp_path_factory.getbasetemp()
    directory = directory.parent if "PYTEST_XDIST_WORKER" in os.environ else directory
    with (directory / "idioms-without-relight").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if not (output := file.read()):
            output = without_relight(*COMMON, *ADDED_UP)
            file.write(output)
    return sections(output)


@pytest.mark.parametrize("name", COMMON)
def test_a_common_shape_survives_kills_in_phases(name: str, plain: dict[str, str]) -> None:
    verdict, words = judge(killed_in_phases(name, phase_kills(name, seed=0, kills=2)), digests_in(plain[name]))
    assert verdict in (Verdict.EQUAL, Verdict.REFUSED), f"{verdict}: {words}"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("modes_between_steps", "kill rank 1 in BACKWARD of step 7"),  # that code runs after the undone attempt, too
        ("modes_between_steps", "freeze rank 1 in BEFORE_BARRIER of step 5"),  # the others finish the step
        ("annealed_attribute", "freeze rank 1 in BEFORE_BARRIER of step 7"),
        ("counting_optimizer", "kill rank 1 in BARRIER of step 7"),
        ("run_dictionary", "kill rank 0 in FORWARD of step 5"),
        ("block_on_a_stack", "kill rank 0 in FORWARD of step 3"),
        ("step_of_trainer", "kill rank 1 in FORWARD of step 5"),
        ("wrapper_attributes", "kill rank 1 in AFTER_STEP of step 5"),
        ("wrapper_attributes", "kill rank 0 in BARRIER of step 6"),
        ("hsdp_counting_blocks", "kill rank 2 in FORWARD of step 5"),
        ("step_of_trainer", "kill rank 0 between steps at step 4"),
    ],
)
def test_what_scripts_keep_in_attributes_and_dictionaries_goes_on(name: str, fault: str) -> None:
    ending = killed_in_phases(name, [fault])
    verdict, words = judge(ending, undisturbed(name).digests)
    assert (verdict, ending.bits) == (Verdict.EQUAL, "yes"), words


@pytest.mark.parametrize("name", ["evaluates_after_epochs", "validates_in_a_trainer"])
@pytest.mark.parametrize("fault", ["kill rank 1 in AFTER_STEP of step 7", "kill rank 0 in AFTER_WRITE of step 7"])
def test_ranks_wait_in_an_evaluation_until_a_replacement_comes_to_it(name: str, fault: str) -> None:
    """Each epoch has four steps. What is printed and drawn there, and the stopping, depend on the lost rank's part."""
    ending = killed_in_phases(name, [fault])
    verdict, words = judge(ending, undisturbed(name).digests)
    assert (verdict, ending.bits, ending.failures) == (Verdict.EQUAL, "yes", 1), words


@pytest.mark.parametrize(
    ("name", "rank", "line"),
    [
        ("reduces_by_batch", 1, "        output = model(x)\n"),
        ("reduces_by_batch", 0, "        both = torch.tensor("),
        ("reduces_by_batch", 2, "    seen = [None]"),
        ("reduces_by_batch", 1, "        history.append("),  # the others go on to the next step
        ("evaluates_through_wrapper", 1, "        sums[0] +="),
        ("evaluates_through_wrapper", 0, "    spread = output.std()"),  # while three of its collectives are under way
        ("stops_by_broadcast", 1, "        dist.broadcast(decision"),  # rank 3 gets it from rank 1, and rank 2 has it
        ("rank_zero_evaluates", 0, "            x = x + 0.01"),
        ("rank_zero_evaluates", 0, "                best, best_weights"),
    ],
)
def test_a_replacement_runs_code_between_epochs_that_the_lost_rank_had_begun(
    name: str, rank: int, line: str, tmp_path: Path
) -> None:
    """A rank kills itself once there. The others wait in a later collective of it, or go on to the next step."""
    text = path_of(name).read_text()
    assert text.count(line) == 1
    is_due = "number == 2" if "model(x)" in line else "True"
    indent = " " * (len(line) - len(line.lstrip()))
    variant = text.replace(line, f"{indent}die_once({rank}, {is_due})\n{line}")
    path = tmp_path / "variant.py"
    path.write_text(
        variant.replace("import relight\n", f"import relight\n{_DIE_ONCE.format(str(tmp_path / 'mark'))}", 1)
    )
    ending = run_variant(name, path)
    verdict, words = judge(ending, undisturbed(name).digests)
    assert (verdict, ending.bits, ending.failures) == (Verdict.EQUAL, "yes", 1), words


@pytest.mark.parametrize("step", [0, 3, 5])
def test_code_after_an_interrupted_block_reads_what_it_has_not_set(step: int) -> None:
    """The job's first step, that of an epoch's function, and one with a smaller batch: other ranks wait in forward."""
    ending = killed_in_phases("meters_after_block", [f"kill rank 0 in FORWARD of step {step}"])
    verdict, words = judge(ending, undisturbed("meters_after_block").digests)
    assert (verdict, ending.bits) == (Verdict.EQUAL, "yes"), words
    assert "exception" not in ending.left  # of a survivor, which would be replaced as well


def test_messages_of_processes_that_a_standby_started_as_another_rank_are_doubted() -> None:
    """The rank is lost before steps speak to its environments; its replacement has those of the last rank."""
    ending = killed_in_phases("environment_processes", ["kill rank 0 between steps at step 2"])
    assert (ending.status, ending.bits) == (0, "not known"), ending.words
    assert "when it was built as another rank" in ending.words


@pytest.mark.parametrize("fault", ["kill rank 1 in AFTER_WRITE of step 5", "kill rank 0 in AFTER_STEP of step 8"])
def test_a_replacement_takes_what_all_ranks_change_alike_after_an_epoch(fault: str) -> None:
    ending = killed_in_phases("epochs_halved_by_hand", [fault])
    verdict, words = judge(ending, undisturbed("epochs_halved_by_hand").digests)
    assert (verdict, ending.bits) == (Verdict.EQUAL, "not known"), words
    assert "right if that code does the same on all ranks" in ending.words


@pytest.mark.parametrize("fault", ["kill rank 0 in AFTER_WRITE of step 6", "kill rank 0 in BARRIER of step 7"])
def test_a_replacement_takes_that_timers_were_stopped_after_the_block(fault: str) -> None:
    """The survivor has run the code after the block, and in the first case has begun the next step, too."""
    ending = killed_in_phases("timers_around_blocks", [fault])
    verdict, words = judge(ending, undisturbed("timers_around_blocks").digests)
    assert (verdict, ending.failures) == (Verdict.EQUAL, 1), words


def test_a_replacement_whose_first_step_is_interrupted_has_the_number_of_the_epoch() -> None:
    """Rank 1 is in the block then: the others have its part of an all-reduce before the backward pass."""
    faults = ["kill rank 1 in BACKWARD of step 9", "kill rank 0 in BACKWARD of step 9 attempt 1"]
    ending = killed_in_phases("epoch_temperature", faults)
    verdict, words = judge(ending, undisturbed("epoch_temperature").digests)
    assert (verdict, ending.bits, ending.failures) == (Verdict.EQUAL, "yes", 2), words


@pytest.mark.parametrize("step", [4, 5, 7])
@pytest.mark.parametrize("point", ["BEFORE_BARRIER", "BARRIER"])
def test_a_rank_is_lost_while_ranks_agree_on_buffers_that_change_by_chance(point: str, step: int) -> None:
    ending = killed_in_phases("buffers_by_chance", [f"kill rank 1 in {point} of step {step}"])
    verdict, words = judge(ending, undisturbed("buffers_by_chance").digests)
    assert (verdict, ending.bits, ending.failures) == (Verdict.EQUAL, "yes", 1), words


@pytest.mark.parametrize("name", ADDED_UP)
def test_gradients_are_added_up_in_the_order_of_torchrun(name: str, plain: dict[str, str]) -> None:
    assert undisturbed(name).digests == digests_in(plain[name])


@pytest.mark.parametrize(
    "name",
    ["cnn_batchnorm", "lbfgs", "frozen_batchnorm", "fake_quant", "observation_norm", "stochastic_depth_norms"],
)
def test_state_of_one_rank_is_none_that_differs(name: str) -> None:
    """Buffers that forward changes, from the first step on or later, and numbers that an optimizer keeps."""
    ending = undisturbed(name, flags=("--verify-every", "1"))
    assert (ending.status, ending.bits, ending.failures) == (0, "yes", 0), ending.words


EARLY_AND_LATE = ("kill rank 0 in BACKWARD of step 0", "kill rank 1 in BARRIER of step 5")
# The backward passes of a rank that is slow get more gates, which are put in place in a later forward pass.
SLOW = tuple(f"slow rank 0 in BACKWARD of step {step}" for step in range(4))


@pytest.mark.parametrize(("name", "faults"), [("tensor_subclass", SLOW), ("counting_modes", EARLY_AND_LATE)])
def test_modes_of_the_script_count_as_without_a_failure(name: str, faults: tuple[str, ...]) -> None:
    reference = undisturbed(name)
    assert reference.status == 0, reference.words
    assert killed_in_phases(name, faults).digests == reference.digests


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("corpora_by_name", ("kill rank 0 in BACKWARD of step 0",)),
        ("corpora_by_name", ("kill rank 0 in BACKWARD of step 2",)),
        ("archive_explorer", ("kill rank 0 in BACKWARD of step 0", "kill rank 0 in BARRIER of step 8")),
        ("counting_sampler", ("kill rank 0 in BACKWARD of step 0", "kill rank 1 after step 5")),
        ("log_every_epochs", ("kill rank 0 in BACKWARD of step 3",)),
        ("events_by_enum", ("kill rank 0 in BACKWARD of step 4", "kill rank 1 in OPTIMIZER of step 10")),
        ("draws_after_loop", ("kill rank 1 in AFTER_WRITE of step 10",)),
        ("epochs_from_checkpoint", ("kill rank 0 in BACKWARD of step 4", "kill rank 1 in BACKWARD of step 10")),
    ],
)
def test_a_replacement_begins_with_what_the_rank_had(name: str, faults: tuple[str, ...]) -> None:
    ending = killed_in_phases(name, faults)
    verdict, words = judge(ending, undisturbed(name).digests)
    assert (verdict, ending.bits) == (Verdict.EQUAL, "yes"), words


@pytest.mark.all
@pytest.mark.parametrize("name", names())
def test_a_shape_survives_kills_in_each_phase_and_at_random_times(name: str) -> None:
    reference = undisturbed(name)
    if reference.status:
        verdict, words = judge(reference, {})
        assert verdict is Verdict.REFUSED, f"{verdict}: {words}"
        return
    for sentences in (phase_kills(name, seed=0, kills=6), early_kills(name, seed=0), []):
        disturbed = killed_in_phases(name, sentences) if sentences else killed_at_random(name, seed=0)
        verdict, words = judge(disturbed, reference.digests)
        assert not verdict.is_failure, f"{verdict}: {words}"


@pytest.mark.parametrize("name", names())
def test_each_script_says_its_shape(name: str) -> None:
    text = path_of(name).read_text()
    assert text.startswith('"""'), name
    assert "finish(" in text, name


ENDED: dict[str, Any] = {"status": 0, "steps": 9, "failures": 2, "bits": "yes"}


def test_verdicts() -> None:
    bits = {0: "aa model=1 optimizer=2", 1: "bb model=3 optimizer=2"}
    other = {**bits, 1: "cc model=4 optimizer=2"}
    assert judge(Ending(**ENDED, digests=bits), bits) == (Verdict.EQUAL, "")
    assert judge(Ending(**ENDED, digests=other), bits) == (Verdict.SILENT, "rank 1: model")
    told = {**ENDED, "bits": "not known", "words": "a buffer was new"}
    assert judge(Ending(**told, digests=other), bits) == (Verdict.TOLD, "rank 1: model: a buffer was new")
    assert judge(Ending(**told, digests=bits), bits) == (Verdict.EQUAL, "a buffer was new")
    refused = {**ENDED, "status": 1, "words": "hand it over", "usage": True}
    assert judge(Ending(**{**refused, "steps": 0}, digests={}), {}) == (Verdict.REFUSED, "hand it over")
    assert judge(Ending(**refused, digests={}), bits) == (Verdict.TOLD, "hand it over")
    assert judge(Ending(**{**refused, "usage": False}, digests={}), bits) == (Verdict.LOST, "hand it over")
    assert what_differs({0: bits[0]}, bits) == "rank 1 printed nothing"


def test_digest_lines_are_found_between_other_output() -> None:
    output = "[rank 1] loss 0.3\n[rank 1] digest rank=1 0a model=1\n[rank 0] digest rank=0 0b model=2\nend\n"
    assert digests_in(output) == {0: "0b model=2", 1: "0a model=1"}
    assert sections(f"moco: status 0 after 1.2 s\n{output}\nclip: status 1 after 0.1 s\nno\n").keys() == {"moco"}
