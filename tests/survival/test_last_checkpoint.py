"""A job that must end, though its state is still held, ends with a checkpoint of it; started again it goes on there."""

import contextlib
import signal
from pathlib import Path

import pytest

from relight.server.job.faults import ENVIRONMENT
from relight.training.checkpoint.files import place_of, published
from relight.wire.settings import read_settings
from tests.survival.harness import Bench, Outcome, Training, send
from tests.survival.judge import check_protocol

EVERY = 1000  # far beyond the end: only a last checkpoint is ever due
AT = 5
BUG = (f"raise in rank 1 in FORWARD of step {AT}", f"raise in rank 1 in FORWARD of step {AT} attempt 1")
GIVE_UP = ("--max-failures", "0")
# Everything that a rank may have of its own, and everything that all share.
RICH = ("--local-buffers", "--batchnorm", "--data", "stateful", "--streams", "preserve", "--scheduler")


def keeping(root: Path, training: Training) -> Training:
    more = ("--checkpoint", str(root), "--checkpoint-every", str(EVERY))
    return Training(
        ranks=training.ranks, steps=training.steps, program=training.program, arguments=(*training.arguments, *more)
    )


def plain(*arguments: str, ranks: int = 2) -> Training:
    return Training(ranks=ranks, steps=8, arguments=arguments)


def divided(layout: str, *arguments: str) -> Training:
    return Training(ranks=4, steps=8, program="divided.py", arguments=("--layout", layout, *arguments))


def check_saved(outcome: Outcome, root: Path, versions: tuple[int, ...] = (AT,)) -> int:
    """It ended with an error, and says which version it has saved, and where."""
    assert outcome.status == 1, outcome.describe()
    (version,) = published(root)
    assert version in versions, outcome.describe()
    path = place_of(root, version)
    assert (outcome.report.saved_version, outcome.report.saved_path) == (version, str(path)), outcome.describe()
    said = f"A checkpoint of step {version} was saved as {path}: start the same command again to go on"
    assert said in outcome.report.error
    assert said in outcome.stderr
    assert not check_protocol(outcome), outcome.describe()
    return version


def go_on(bench: Bench, root: Path, version: int, training: Training) -> None:
    again = bench.run(keeping(root, training), standbys=0)
    assert f"training goes on from the checkpoint of step {version}" in again.stderr, again.describe()
    reference = bench.reference(training)
    assert (again.status, again.report.error) == (0, ""), again.describe()
    assert again.report.final_state_digest == reference.report.final_state_digest
    assert again.report.final_lineage == reference.report.final_lineage
    assert again.finals == reference.finals, again.describe()


# The process that raised has whole state too, and stays for it. One that was killed left only what its agent has.
@pytest.mark.parametrize(
    ("faults", "flags", "arguments"),
    [
        pytest.param(BUG, (), RICH, marks=pytest.mark.all),  # ordinarily with deaths of the controller, below
        pytest.param(BUG, (), (), marks=pytest.mark.all),
        pytest.param((f"kill rank 0 in BACKWARD of step {AT}",), GIVE_UP, RICH, marks=pytest.mark.all),
        pytest.param((f"kill rank 1 in FORWARD of step {AT}",), GIVE_UP, (), marks=pytest.mark.all),
        pytest.param((f"freeze rank 0 in FORWARD of step {AT}",), GIVE_UP, RICH, marks=pytest.mark.all),
    ],
)
def test_what_was_reached_is_saved(
    bench: Bench, tmp_path: Path, faults: tuple[str, ...], flags: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    root, training = tmp_path / "checkpoints", plain(*arguments)
    outcome = bench.run(keeping(root, training), faults=faults, flags=flags)
    go_on(bench, root, check_saved(outcome, root), training)


@pytest.mark.all
@pytest.mark.parametrize("point", ["BEFORE_BARRIER", "BARRIER", "OPTIMIZER", "AFTER_WRITE"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_may_be_finished_is(bench: Bench, tmp_path: Path, point: str, rank: int) -> None:
    """Survivors that are prepared write it before they save."""
    root, training = tmp_path / "checkpoints", plain(*RICH)
    outcome = bench.run(
        keeping(root, training), faults=(f"kill rank {rank} in {point} of step {AT}",), flags=GIVE_UP, standbys=0
    )
    go_on(bench, root, check_saved(outcome, root, (AT, AT + 1)), training)


@pytest.mark.all
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_same_bug_in_all_ranks_leaves_the_last_of_them_to_save(bench: Bench, tmp_path: Path, ranks: int) -> None:
    root, training = tmp_path / "checkpoints", plain(ranks=ranks)
    faults = [f"raise in rank {rank} in FORWARD of step {AT}" for rank in range(ranks)]
    outcome = bench.run(keeping(root, training), faults=faults, flags=GIVE_UP if ranks == 1 else ())
    go_on(bench, root, check_saved(outcome, root), training)


@pytest.mark.all
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    "arguments", ["hsdp", "hsdp --batchnorm --scheduler", "tp_dp --clip", "zero_dp", "fsdp --batchnorm"]
)
def test_a_divided_state_is_saved(bench: Bench, tmp_path: Path, arguments: str, rank: int) -> None:
    """By the holders that are left; where there is only one, the process that raised is it."""
    layout, *more = arguments.split()
    root, training = tmp_path / "checkpoints", divided(layout, *more)
    action = "raise in" if layout == "fsdp" else "kill"
    outcome = bench.run(
        keeping(root, training), faults=(f"{action} rank {rank} in FORWARD of step {AT}",), flags=GIVE_UP
    )
    go_on(bench, root, check_saved(outcome, root), training)


@pytest.mark.all
def test_no_replacement_is_to_be_had(bench: Bench, tmp_path: Path) -> None:
    """Each process that is started to take the rank is killed before it can."""
    root, training, faults = tmp_path / "checkpoints", plain(*RICH), [f"kill rank 1 in FORWARD of step {AT}"]
    with bench.start(keeping(root, training), faults=faults, flags=("--max-failed-attempts", "3"), standbys=0) as job:
        while job.launcher.poll() is None:
            for name, process in job.workers().items():
                if name not in ("w0", "w1"):
                    send(process, signal.SIGKILL)
        outcome = job.wait()
    ending = "have failed (--max-failed-attempts 3) before one could take rank 1"
    assert ending in outcome.report.error, outcome.describe()
    go_on(bench, root, check_saved(outcome, root), training)


@pytest.mark.all
def test_that_it_is_complete_is_said_again_if_the_agent_dies_with_it(bench: Bench, tmp_path: Path) -> None:
    """The agent is killed as soon as something of it is there; mostly it is dead when it is told of the rest."""
    root, training = tmp_path / "checkpoints", plain(*RICH)
    faults = [f"kill rank 1 in FORWARD of step {AT}"]
    with bench.start(keeping(root, training), faults=faults, flags=GIVE_UP, standbys=0) as job:
        job.wait_until(lambda: job.module("relight.agent") is not None, "there is an agent")
        agent = job.module("relight.agent")
        assert agent is not None
        while job.launcher.poll() is None and not list(root.glob("step-*")):
            pass
        send(agent, signal.SIGKILL)
        outcome = job.wait()
    go_on(bench, root, check_saved(outcome, root), training)


# --- the controller dies in this stage ----------------------------------------------------------------------------
def restarts(places: str) -> int:
    """Those that the account has: what leads to the end is the last thing that the journal knows."""
    return sum(place not in ("event Saved 1", "orders EndJob 1") for place in places.split("; "))


@pytest.mark.all
@pytest.mark.parametrize(
    "places",
    [
        pytest.param("sent Stop 2", marks=pytest.mark.all),  # the first is that of the recovery before
        pytest.param("event Stopped 3", marks=pytest.mark.all),
        pytest.param("orders Save 1", marks=pytest.mark.all),
        pytest.param("sent Save 1", marks=pytest.mark.all),
        pytest.param("sent Save 1; sent Save 1; sent Save 1", marks=pytest.mark.all),
        "sent Save 1; event Saved 1",
        pytest.param("event Saved 1", marks=pytest.mark.all),
        pytest.param("orders EndJob 1", marks=pytest.mark.all),
    ],
)
def test_the_controller_may_die_meanwhile(bench: Bench, tmp_path: Path, places: str) -> None:
    root, training = tmp_path / "checkpoints", plain(*RICH)
    outcome = bench.run(keeping(root, training), faults=BUG, environment={ENVIRONMENT: places})
    assert outcome.report.controller_restarts == restarts(places), outcome.describe()
    go_on(bench, root, check_saved(outcome, root), training)


@pytest.mark.all
@pytest.mark.parametrize(
    ("layout", "place"),
    [("hsdp --batchnorm", "sent Save 1"), ("tp_dp", "sent Stop 1"), ("zero_dp", "event Saved 1")],
)
def test_the_controller_may_die_while_a_divided_state_is_saved(
    bench: Bench, tmp_path: Path, layout: str, place: str
) -> None:
    root, training = tmp_path / "checkpoints", divided(*layout.split())
    outcome = bench.run(
        keeping(root, training),
        faults=(f"kill rank 0 in BACKWARD of step {AT}",),
        flags=GIVE_UP,
        environment={ENVIRONMENT: place},
    )
    assert outcome.report.controller_restarts == restarts(place), outcome.describe()
    go_on(bench, root, check_saved(outcome, root), training)


@pytest.mark.all
def test_the_controller_is_killed_while_files_are_written(bench: Bench, tmp_path: Path) -> None:
    root, training = tmp_path / "checkpoints", plain("--width", "3000", *RICH)  # some 100 MB
    with bench.start(keeping(root, training), faults=BUG) as job:
        job.wait_until(lambda: any(root.glob("*.incomplete")), "something was written")
        controller = job.module("relight.server")
        assert controller is not None
        send(controller, signal.SIGKILL)
        outcome = job.wait()
    assert outcome.report.controller_restarts == 1, outcome.describe()
    go_on(bench, root, check_saved(outcome, root), training)


@pytest.mark.all
def test_what_is_written_already_is_not_written_again(bench: Bench, tmp_path: Path) -> None:
    """Both ranks have written their files when the controller dies, and the checkpoint is complete or nearly so."""
    root, training = tmp_path / "checkpoints", plain(*RICH)
    written: dict[str, int] = {}

    def look() -> bool:
        for path in root.glob("step-*/*"):
            with contextlib.suppress(FileNotFoundError):  # moved, as a whole
                written.setdefault(path.name, path.stat().st_mtime_ns)
        return "rank-1.msgpack" in written and "part-0.msgpack" in written

    with bench.start(keeping(root, training), faults=BUG, environment={ENVIRONMENT: "sent Save 1"}) as job:
        job.wait_until(look, "both ranks had written")
        outcome = job.wait()
    check_saved(outcome, root)
    for name in ("rank-1.msgpack", "part-0.msgpack"):
        assert (place_of(root, AT) / name).stat().st_mtime_ns == written[name]


# --- without ------------------------------------------------------------------------------------------------------
def check_not_saved(outcome: Outcome, root: Path, why: str) -> None:
    assert outcome.status == 1, outcome.describe()
    assert outcome.report.saved_version == -1
    assert why in outcome.report.error, outcome.describe()
    assert published(root) == []
    assert not check_protocol(outcome), outcome.describe()


@pytest.mark.all
def test_what_cannot_be_written_ends_the_job_all_the_same(bench: Bench, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    training, flags = keeping(root, plain("--hold-at", "2")), ("--outside-hang-timeout-seconds", "60")
    with bench.start(training, faults=BUG, flags=flags) as job:
        job.wait_until(root.exists, "the directory of the checkpoints was made")
        (settings,) = job.temporary.rglob("settings.json")
        (root / f"step-{AT:010d}.{read_settings(settings.parent).run_id}-0.incomplete").touch()
        job.release()
        outcome = job.wait()
    check_not_saved(outcome, root, "so it is a bug, not a failure). No last checkpoint was written: rank ")


@pytest.mark.all
def test_a_failure_while_it_is_written_ends_the_job_all_the_same(bench: Bench, tmp_path: Path) -> None:
    """Rank 1 is the only one that has its part; it dies when it is asked to pause."""
    root = tmp_path / "checkpoints"
    faults = (f"kill rank 2 in FORWARD of step {AT}", "kill rank 1 in STOP of recovery 1")
    outcome = bench.run(keeping(root, divided("fsdp")), faults=faults, flags=GIVE_UP)
    assert outcome.status == 1, outcome.describe()
    assert outcome.report.saved_version == -1
    assert published(root) == []


@pytest.mark.all
def test_before_the_first_step_is_finished_there_is_nothing_to_save(bench: Bench, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    outcome = bench.run(keeping(root, plain()), faults=("kill rank 1 in FORWARD of step 0",), flags=GIVE_UP)
    check_not_saved(outcome, root, "No last checkpoint was written: no step was finished yet")


@pytest.mark.all
def test_a_complete_checkpoint_of_that_step_is_left_alone(bench: Bench, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    bench.run(keeping(root, Training(ranks=2, steps=AT)), standbys=0)
    before = {path.name: path.stat().st_mtime_ns for path in place_of(root, AT).iterdir()}
    outcome = bench.run(keeping(root, plain()), faults=BUG)
    assert check_saved(outcome, root) == AT
    assert {path.name: path.stat().st_mtime_ns for path in place_of(root, AT).iterdir()} == before
