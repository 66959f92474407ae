"""The controller is killed: idle, at every line of its journal, again while it comes back. Training loses nothing.

The exact places come from relight/server/faults.py: before and after what the journal says is carried out. A kill from
outside then strikes at random.
"""

import random
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from relight.server.job.faults import ENVIRONMENT
from tests.disk import fill
from tests.survival.harness import PATIENCE, Bench, Job, Outcome, Training, send
from tests.survival.judge import check_survived

SHORT = Training(steps=9)
IDLE = Training(steps=105, arguments=("--pause", "0.02", "--tell", "--hold-at", "100"))
FLAGS = ("--outside-hang-timeout-seconds", "600")
KILL = "kill rank 1 in BACKWARD of step 3"
FREEZE = "freeze rank 1 in BEFORE_BARRIER of step 3"

STARTING = (
    "event AgentJoined 1",
    "sent Spawn 2",
    "event ProcessStarted 1",
    "sent Assign 1",
    "event TrainingEntered 2",
    "orders Begin 1",
)
RECOVERING = (
    "sent Begin 1",
    "event ProcessDying 1",
    "orders Stop 1",
    "sent Stop 1",
    "sent Assign 4",  # the first three are those of the initial ranks
    "event Stopped 1",
    "event Stopped 3",
    "sent Restore 1",
    "event Restored 1",
    "event Restored 3",
    "orders Resume 1",
    "sent Resume 1",
    "event ProcessExited 1",
    "event StepResumed 2",
)
ENDING = ("event TrainingDone 3", "orders Release 1", "sent Release 1", "event ProcessExited 3", "orders EndJob 1")
# "orders Stop 1" runs always in test_agent_death.py.
IN_CI = {"event TrainingEntered 2", "sent Restore 1", "sent Release 1"}


def restarts(outcome: Outcome) -> int:
    return outcome.report.controller_restarts


def lose_controller(job: Job, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal the controller, and wait until its successor is in charge."""
    before = job.journal().count("ControllerRestarted")
    controller = job.module("relight.server")
    assert controller is not None
    send(controller, number)
    job.wait_until(lambda: job.journal().count('"ControllerRestarted"') > before, "another controller is in charge")


def committed(job: Job) -> int:
    return job.output().count("committed ")


def trains(job: Job) -> bool:
    return "committed 5" in job.output() and len(job.workers()) == 4


# --- while nothing else happens -------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.all)])
def test_training_does_not_notice_that_the_controller_dies(bench: Bench, number: signal.Signals) -> None:
    with bench.start(IDLE, flags=FLAGS) as job:
        job.wait_until(lambda: trains(job), "training has begun")
        before = {name: process.pid for name, process in job.workers().items()}
        lose_controller(job, number)
        goal = committed(job) + 5 * IDLE.ranks
        job.wait_until(lambda: committed(job) >= goal, "five more steps are committed")
        assert {name: process.pid for name, process in job.workers().items()} == before
        job.release()
        outcome = job.wait()
    check_survived(outcome, bench.reference(IDLE))
    assert restarts(outcome) == 1
    assert not outcome.report.failures, outcome.describe()
    assert not outcome.report.recoveries, outcome.describe()
    assert "training goes on, and another takes over" in outcome.stderr


@pytest.mark.all
def test_a_controller_that_says_nothing_is_replaced(bench: Bench) -> None:
    """Whatever it hangs in: here it is stopped, and its process state must not be what shows it."""
    with bench.start(IDLE, flags=(*FLAGS, "--frozen-timeout-seconds", "600")) as job:
        job.wait_until(lambda: trains(job), "training has begun")
        lose_controller(job, signal.SIGSTOP)
        assert "no update from the controller for 30 s" in job.messages()
        job.release()
        outcome = job.wait()
    check_survived(outcome, bench.reference(IDLE))
    assert restarts(outcome) == 1
    assert not outcome.report.failures, outcome.describe()


def test_a_worker_that_dies_while_there_is_no_controller_is_replaced(bench: Bench) -> None:
    """Its survivors stand in a broken collective until the successor hears of it."""
    with bench.start(IDLE, flags=FLAGS) as job:
        job.wait_until(lambda: trains(job), "training has begun")
        controller, worker = job.module("relight.server"), job.workers()["w1"]
        assert controller is not None
        send(controller, signal.SIGKILL)
        send(worker, signal.SIGKILL)
        job.release()
        outcome = job.wait()
    check_survived(outcome, bench.reference(IDLE))
    assert restarts(outcome) == 1
    assert [failure.rank for failure in outcome.report.failures] == [1], outcome.describe()
    assert outcome.report.recoveries[0].replacement_kind == "standby", outcome.describe()


@pytest.mark.parametrize("order", ["together", "agent first"])
@pytest.mark.all
def test_controller_and_agent_die(bench: Bench, order: str) -> None:
    with bench.start(IDLE, flags=FLAGS) as job:
        job.wait_until(lambda: trains(job), "training has begun")
        before = {name: process.pid for name, process in job.workers().items()}
        agent, controller = job.module("relight.agent"), job.module("relight.server")
        assert agent is not None
        assert controller is not None
        send(agent, signal.SIGKILL)
        if order == "agent first":
            job.wait_until(lambda: "a new agent adopts them" in job.messages(), "its death is noticed")
        send(controller, signal.SIGKILL)
        goal = committed(job) + 5 * IDLE.ranks
        job.wait_until(lambda: committed(job) >= goal, "five more steps are committed")
        assert {name: process.pid for name, process in job.workers().items()} == before
        job.release()
        outcome = job.wait()
    check_survived(outcome, bench.reference(IDLE))
    assert restarts(outcome) == 1
    assert not outcome.report.failures, outcome.describe()


# --- at every line of the journal -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=() if place in IN_CI else pytest.mark.all)
        for place in (*STARTING, *RECOVERING, *ENDING)
    ],
)
def test_the_controller_dies_at(bench: Bench, place: str) -> None:
    outcome = bench.run(SHORT, faults=[KILL], environment={ENVIRONMENT: place})
    check_survived(outcome, bench.reference(SHORT))
    # An order that leads to the end is the last thing that the journal knows: nothing follows it.
    assert restarts(outcome) == (0 if place == "orders EndJob 1" else 1), outcome.describe()
    assert [failure.rank for failure in outcome.report.failures] == [1], outcome.describe()
    assert len(outcome.report.recoveries) == 1, outcome.describe()
    assert outcome.report.recoveries[0].replaced == (1,), outcome.describe()


@pytest.mark.all
@pytest.mark.parametrize("place", RECOVERING)
def test_the_controller_dies_when_survivors_finish_the_step(bench: Bench, place: str) -> None:
    """Once it was decided to go forward, no rank may be sent back: some rank may have written."""
    place = place.replace("ProcessDying", "ProcessSuspected")
    outcome = bench.run(SHORT, faults=[FREEZE], environment={ENVIRONMENT: place})
    check_survived(outcome, bench.reference(SHORT))
    assert restarts(outcome) == 1, outcome.describe()
    assert len(outcome.report.recoveries) == 1, outcome.describe()


@pytest.mark.all
@pytest.mark.parametrize("first", RECOVERING[2:12:2])
@pytest.mark.parametrize("second", ["sent Stop 1", "event Stopped 2", "sent Restore 1", "sent Resume 1"])
def test_the_second_controller_dies_too(bench: Bench, first: str, second: str) -> None:
    outcome = bench.run(SHORT, faults=[KILL], environment={ENVIRONMENT: f"{first}; {second}; sent Release 1"})
    check_survived(outcome, bench.reference(SHORT))
    assert restarts(outcome) in (1, 2, 3), outcome.describe()  # a recovery that was all but over is not begun again
    assert len(outcome.report.recoveries) == 1, outcome.describe()


@pytest.mark.all
@pytest.mark.parametrize("place", ["sent Stop 1", "sent Restore 1", "event Restored 2"])
@pytest.mark.parametrize("again", ["kill rank 0 in STOP of recovery 1", "kill rank 1 in RESTORE_RECEIVE of recovery 2"])
def test_a_rank_and_the_controller_die_in_a_recovery(bench: Bench, place: str, again: str) -> None:
    outcome = bench.run(SHORT, faults=[KILL, again], standbys=2, environment={ENVIRONMENT: place})
    check_survived(outcome, bench.reference(SHORT))
    assert restarts(outcome) == 1, outcome.describe()


def test_generations_are_never_used_twice(bench: Bench) -> None:
    outcome = bench.run(SHORT, faults=[KILL], environment={ENVIRONMENT: "sent Stop 1; sent Stop 1; sent Restore 1"})
    check_survived(outcome, bench.reference(SHORT))
    journal = (outcome.run_dir / "journal.jsonl").read_text()
    opened = [int(number) for number in re.findall(r'"command":{"type":"Stop".*?"generation":(\d+)', journal)]
    assert opened == sorted(set(opened)) == [2, 3, 4, 5]


# --- at random ------------------------------------------------------------------------------------------------------
@pytest.mark.all
@pytest.mark.parametrize("seed", range(6))
def test_the_controller_dies_again_and_again(bench: Bench, seed: int) -> None:
    """From the first moment to the last, while workers die as well."""
    draw = random.Random(f"controller {seed}")
    training = Training(
        steps=60,
        arguments=(
            "--pause",
            "0.02",
        ),
    )
    faults = [f"kill rank {draw.randrange(3)} in BACKWARD of step {step}" for step in (10, 25, 40)]
    with bench.start(training, faults=faults) as job:
        killed: set[int] = set()
        while job.launcher.poll() is None and len(killed) < 8:
            time.sleep(draw.random() * 1.5)
            controller = job.module("relight.server")
            if controller is not None and controller.pid not in killed:
                killed.add(controller.pid)
                send(controller, signal.SIGKILL)
        outcome = job.wait()
    check_survived(outcome, bench.reference(training))
    assert killed


# --- what ends the job ----------------------------------------------------------------------------------------------
def test_a_controller_that_is_killed_again_and_again_does_not_end_the_job(bench: Bench) -> None:
    plan = ";".join(["sent Begin 1"] * 4)
    with bench.start(IDLE, environment={ENVIRONMENT: plan}) as job:
        job.wait_until(lambda: "number 4 within a minute" in job.messages(), "four have died")
        job.release()
        outcome = job.wait()
    assert outcome.status == 0, outcome.describe()
    assert outcome.report.controller_restarts == 4, outcome.describe()


def test_without_launcher_and_controller_nothing_is_left(bench: Bench) -> None:
    with bench.start(IDLE) as job:
        job.wait_until(lambda: trains(job), "training has begun")
        controller = job.module("relight.server")
        assert controller is not None
        send(controller, signal.SIGKILL)
        send(job.launcher, signal.SIGKILL)
        outcome = job.wait(20.0 * PATIENCE)
    assert outcome.status == -signal.SIGKILL


# --- a full disk ----------------------------------------------------------------------------------------------------
def start_on(job_directory: Path, disk: Path, training: Training) -> Job:
    """A job whose run directory lies on this disk."""
    return Job(job_directory, training, flags=FLAGS, run_dir=disk / "run")


def test_a_full_disk_does_not_stop_recoveries(bench: Bench, tmp_path: Path, small_disk: Path) -> None:
    with start_on(tmp_path / "job", small_disk, IDLE) as job:
        job.wait_until(lambda: trains(job), "training has begun")
        ballast = fill(small_disk)
        send(job.workers()["w1"], signal.SIGKILL)
        job.wait_until(lambda: "recovered in" in job.messages(), "a recovery without a journal")
        assert job.messages().count("the journal") == 1
        ballast.unlink()
        send(job.workers()["w2"], signal.SIGKILL)
        job.wait_until(lambda: job.messages().count("recovered in") == 2, "a recovery with a journal")
        assert "is written again; nothing is missing" in job.messages()
        lose_controller(job)
        job.release()
        outcome = job.wait()
    check_survived(outcome, bench.reference(IDLE))
    assert [failure.rank for failure in outcome.report.failures] == [1, 2], outcome.describe()


def test_a_controller_that_died_on_a_full_disk_does_not_guess(tmp_path: Path, small_disk: Path) -> None:
    """Events since the journal's last line are not known, so no generation is opened again."""
    with start_on(tmp_path / "job", small_disk, IDLE) as job:
        job.wait_until(lambda: trains(job), "training has begun")
        fill(small_disk)
        send(job.workers()["w1"], signal.SIGKILL)
        job.wait_until(lambda: "recovered in" in job.messages(), "a recovery without a journal")
        controller: psutil.Process | None = job.module("relight.server")
        assert controller is not None
        send(controller, signal.SIGKILL)
        outcome = job.wait()
    assert outcome.status == 1, outcome.describe()
    assert "died while its journal could not be written" in outcome.stderr
    assert "Resume from your last checkpoint" in outcome.stderr
