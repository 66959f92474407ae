"""The agent is watched too: when it dies, its processes live on, and a successor takes them over."""

import signal

import psutil
import pytest

from relight.server.job.faults import ENVIRONMENT
from tests.survival.harness import Bench, Job, Training, send
from tests.survival.judge import check_survived

TRAINING = Training(steps=105, arguments=("--pause", "0.02", "--tell", "--hold-at", "100"))
FLAGS = ("--outside-hang-timeout-seconds", "600")


def lose_agent(job: Job, number: signal.Signals) -> psutil.Process:
    """Signal the agent; returns its successor."""
    agent = job.module("relight.agent")
    assert agent is not None
    send(agent, number)
    successor: list[psutil.Process] = []

    def found() -> bool:
        process = job.module("relight.agent")
        if process is not None and process.pid != agent.pid:
            successor.append(process)
        return bool(successor)

    job.wait_until(found, "there is another agent")
    return successor[0]


def pids(job: Job) -> dict[str, int]:
    return {name: process.pid for name, process in job.workers().items()}


def committed(job: Job) -> int:
    """Return the number of steps that the ranks have told of."""
    return job.output().count("committed ")


def wait_for_steps(job: Job, more: int) -> None:
    """Until the ranks have committed so many more steps, told through the agent that lives now."""
    goal = committed(job) + more * TRAINING.ranks
    job.wait_until(lambda: committed(job) >= goal, f"{more} more steps are committed")


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.all)])
def test_an_agent_that_dies_is_followed_by_another(bench: Bench, number: signal.Signals) -> None:
    with bench.start(TRAINING, flags=FLAGS) as job:
        job.wait_until(lambda: "committed 5" in job.output() and len(job.workers()) == 4, "training has begun")
        before = pids(job)
        lose_agent(job, number)
        wait_for_steps(job, 5)
        assert pids(job) == before
        job.release()
        outcome = job.wait()
    check_survived(outcome, bench.reference(TRAINING))
    assert not outcome.report.failures, outcome.describe()
    assert not outcome.report.recoveries, outcome.describe()


def test_a_worker_that_dies_under_the_second_agent_is_replaced(bench: Bench) -> None:
    with bench.start(TRAINING, flags=FLAGS) as job:
        job.wait_until(lambda: "committed 5" in job.output() and len(job.workers()) == 4, "training has begun")
        lose_agent(job, signal.SIGKILL)
        wait_for_steps(job, 5)
        send(job.workers()["w1"], signal.SIGKILL)
        job.release()
        outcome = job.wait()
    check_survived(outcome, bench.reference(TRAINING))
    assert [failure.rank for failure in outcome.report.failures] == [1], outcome.describe()
    assert len(outcome.report.recoveries) == 1, outcome.describe()


@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.all), True], ids=["derived", "of_its_own"])
def test_a_worker_dies_while_there_is_no_agent(bench: Bench, own: bool) -> None:
    """State that belonged to that rank alone is in memory that the other workers of its host hold too."""
    arguments = (*TRAINING.arguments, "--batchnorm", "--local-buffers") if own else TRAINING.arguments
    training = Training(steps=TRAINING.steps, arguments=arguments)
    with bench.start(training, flags=FLAGS) as job:
        job.wait_until(lambda: "committed 5" in job.output() and len(job.workers()) == 4, "training has begun")
        victim = job.workers()["w2"]
        agent = job.module("relight.agent")
        assert agent is not None
        send(agent, signal.SIGKILL)
        send(victim, signal.SIGKILL)
        job.release()
        outcome = job.wait()
    check_survived(outcome, bench.reference(training))
    assert [failure.rank for failure in outcome.report.failures] == [2], outcome.describe()


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=pytest.mark.all)], ids=["derived", "of_its_own"])
def test_controller_and_agent_die_in_a_recovery(bench: Bench, own: bool) -> None:
    """The dead rank's page was in the first controller's journal, and in the hands of the first agent and of others."""
    arguments = ("--batchnorm", "--local-buffers") if own else ()
    training = Training(steps=9, arguments=arguments)
    plan = {ENVIRONMENT: "orders Stop 1"}
    with bench.start(training, flags=FLAGS, faults=["kill rank 1 in BACKWARD of step 3"], environment=plan) as job:
        job.wait_until(lambda: '"type":"Stop"' in job.journal(), "the controller ends with its order to stop")
        agent = job.module("relight.agent")
        assert agent is not None
        send(agent, signal.SIGKILL)
        outcome = job.wait()
    check_survived(outcome, bench.reference(training))
    assert len(outcome.report.recoveries) == 1, outcome.describe()
    assert outcome.report.controller_restarts == 1, outcome.describe()
    assert [failure.rank for failure in outcome.report.failures] == [1], outcome.describe()
