"""However a job is ended, and whenever: within seconds nothing of it is left."""

import contextlib
import os
import re
import signal
import time
import uuid

import pytest

from tests.survival.harness import PATIENCE, Bench, Job, Training, send
from tests.survival.leftovers import SHARED_MEMORY

END_SECONDS = 8.0 * PATIENCE
TRAINING = Training(steps=100_000, arguments=("--tell",))
# A recovery that lasts: a survivor never comes to form the new group.
FAULTS = ("kill rank 1 in BACKWARD of step 3", "block rank 0 in REFORM of recovery 1")


def is_launched(job: Job) -> bool:
    return any(job.temporary.glob("relight-*"))


def has_workers(job: Job) -> bool:
    return len(job.workers()) >= 2


def trains(job: Job) -> bool:
    return "committed 3" in job.output()


def recovers(job: Job) -> bool:
    return "failure 1" in job.messages()


MOMENTS = {"launch": is_launched, "startup": has_workers, "training": trains, "recovery": recovers}
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGKILL: -9}
IN_CI = {
    (signal.SIGINT, "training"),
    (signal.SIGTERM, "recovery"),
    (signal.SIGKILL, "training"),
    (signal.SIGKILL, "startup"),
}


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        pytest.param(number, moment, marks=() if (number, moment) in IN_CI else pytest.mark.all)
        for number in STATUS
        for moment in MOMENTS
        if (number, moment) != (signal.SIGKILL, "launch")  # no other process knows of its directory yet
    ],
)
def test_a_signal_to_the_launcher_ends_everything(bench: Bench, number: signal.Signals, moment: str) -> None:
    with bench.start(TRAINING, faults=FAULTS if moment == "recovery" else ()) as job:
        job.wait_until(lambda: MOMENTS[moment](job), moment)
        sent = time.monotonic()
        send(job.launcher, number)
        outcome = job.wait(END_SECONDS)
        assert time.monotonic() - sent < END_SECONDS
        assert outcome.status == STATUS[number], outcome.describe()


@pytest.mark.all
def test_a_second_ctrl_c_does_not_wait(bench: Bench) -> None:
    with bench.start(TRAINING) as job:
        job.wait_until(lambda: trains(job), "training")
        controller = job.module("relight.server")
        assert controller is not None
        send(controller, signal.SIGSTOP)  # no controller answers the first one
        send(job.launcher, signal.SIGINT)
        job.wait_until(lambda: "SIGINT" in job.messages(), "the first one is told")
        sent = time.monotonic()
        send(job.launcher, signal.SIGINT)
        outcome = job.wait(END_SECONDS)
        assert time.monotonic() - sent < 4.0 * PATIENCE
        assert outcome.status == 130, outcome.describe()


def test_a_name_left_in_shared_memory_is_noticed_if_the_job_made_it(bench: Bench) -> None:
    with bench.start(Training()) as job, contextlib.ExitStack() as planted:
        job.wait_until(lambda: has_workers(job), "workers")
        (directory,) = job.temporary.glob("relight-*")
        pid = job.workers()["w0"].pid
        plant(planted, "sem.relight-neighbour-w0-a", f"torch_{os.getpid()}_7", f"psm_{uuid.uuid4().hex}")
        job.release()
        job.wait()
        names = (f"cuda.shm.{os.getuid()}.{pid:x}.1", f"sem.{directory.name}-w0-a", f"torch_{pid}_7")
        with contextlib.ExitStack() as own:
            plant(own, *names)
            with pytest.raises(AssertionError, match=rf"^{re.escape(str([*names]))} still"):
                job.check_nothing_is_left()
        job.check_nothing_is_left()


def plant(planted: contextlib.ExitStack, *names: str) -> None:
    for name in names:
        path = SHARED_MEMORY / name
        path.touch()
        planted.callback(path.unlink)
