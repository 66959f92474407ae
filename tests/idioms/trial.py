"""One script of the library as one job of `relight run`: left alone, killed in phases, or killed at random times."""

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from relight.core.account.report import JobReport
from relight.core.account.verdict import NOT_KNOWN
from tests.idioms.library import path_of, ranks_of
from tests.idioms.verdict import Ending, digests_in
from tests.survival.harness import HANG_SECONDS, PATIENCE, ROOT, Job, Training, plain_environment, send

DEVICE_VARIABLE = "RELIGHT_IDIOMS_DEVICE"  # torch's default device in each script
DEADLINE_SECONDS = 80.0 * PATIENCE
STRIKES = 2  # at random times, in one job
# Each rank is struck, in each phase; far enough apart for a new standby now and then, not always.
PHASES = (
    "kill rank {} in FORWARD of step 2",
    "kill rank {} in BACKWARD of step 4",
    "kill rank {} in BARRIER of step 5",
    "kill rank {} in OPTIMIZER of step 7",
    "kill rank {} between steps at step 9",
    "kill rank {} in AFTER_WRITE of step 10",
)
# In a job of its own: before the pattern of the steps is known, and before the check of a repeated step.
EARLY = ("kill rank {} in BACKWARD of step 0", "kill rank {} in BARRIER of step 1")
# Each step slows one rank down at one place: so a random moment lies in the steps of a job, also of its replacements.
_SLOWED = ("FORWARD", "BACKWARD", "BEFORE_BARRIER", "BARRIER", "OPTIMIZER", "AFTER_WRITE")
_SLOWED_STEPS = range(1, 20)
_PACE_SECONDS = 3.0  # of the slowed steps of a job, less than all of them
_NOTICED_SECONDS = 0.5 * PATIENCE  # after which a death would have stopped the ranks


class IdiomJob(Job):
    """Tells of what it leaves in its verdict."""

    left = ""

    def check_nothing_is_left(self) -> None:
        deadline = time.monotonic() + 3.0 * PATIENCE
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.left = f"left: {self._describe_processes()}" if left else ""
        self.kill()


def phase_kills(name: str, seed: int, kills: int) -> list[str]:
    """Ranks that are killed, by phase."""
    draw = random.Random(f"{name}/{seed}/phases")
    ranks = [(draw.randrange(3) + number) % ranks_of(name) for number in range(len(PHASES))]
    chosen = sorted(draw.sample(range(len(PHASES)), min(kills, len(PHASES))))
    return [PHASES[number].format(ranks[number]) for number in chosen]


def early_kills(name: str, seed: int) -> list[str]:
    """Two ranks that are killed in the first two steps."""
    draw = random.Random(f"{name}/{seed}/early")
    return [sentence.format(draw.randrange(ranks_of(name))) for sentence in EARLY]


def without_relight(*names: str) -> str:
    """Output of scripts without relight; see `plain`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.idioms.plain", *names],
        cwd=ROOT,
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    return done.stdout + done.stderr


def undisturbed(name: str, keep: Path | None = None, flags: Sequence[str] = ()) -> Ending:
    """The job as it should be, with more flags of `relight run`. Its run directory is copied into `keep`."""
    return _run(name, [], keep, flags=flags)


def killed_in_phases(name: str, sentences: Sequence[str], keep: Path | None = None) -> Ending:
    """The job with planned faults."""
    return _run(name, sentences, keep, planned=len(sentences))


def killed_at_random(name: str, seed: int, strikes: int = STRIKES, keep: Path | None = None) -> Ending:
    """The job, of which random processes are killed at random times after training was entered."""
    draw = random.Random(f"{name}/{seed}/times")
    slow = [
        f"slow rank {draw.randrange(ranks_of(name))} in {draw.choice(_SLOWED)} of step {step}" for step in _SLOWED_STEPS
    ]
    return _run(name, slow, keep, partial(_kill_at_random, draw=draw, strikes=strikes), planned=strikes)


def run_variant(name: str, path: Path, faults: Sequence[str] = ()) -> Ending:
    """Run a variant, at this path, of the script with this name, with planned faults."""
    return _run(name, faults, None, path=path, planned=len(faults))


def kill_when(name: str, path: Path, is_due: Callable[[], bool]) -> bool:
    """Run a variant, at this path, of a script, and kill all of its job once that is due. False: it ended before."""
    slow = [f"slow rank 0 in FORWARD of step {step}" for step in _SLOWED_STEPS]
    training = Training(ranks=ranks_of(name), steps=0, program=str(path))
    with (
        tempfile.TemporaryDirectory(prefix="idiom-") as directory,
        IdiomJob(Path(directory), training, faults=slow, standbys=0, hang_seconds=2 * HANG_SECONDS) as job,
    ):
        with contextlib.suppress(AssertionError):  # it has ended
            job.wait_until(is_due, "it is to be killed")
        if not is_due() or not job.workers():
            return False
        job.kill()
    return True


def _run(
    name: str,
    faults: Sequence[str],
    keep: Path | None,
    disturb: Callable[[Job], None] | None = None,
    planned: int = 0,
    flags: Sequence[str] = (),
    path: Path | None = None,
) -> Ending:
    """A job with faults in words, disturbed from outside; `planned`: how many failures are on purpose."""
    training = Training(ranks=ranks_of(name), steps=0, program=str(path or path_of(name)))
    environment = None
    if device := os.environ.get(DEVICE_VARIABLE):
        arguments = (device, str(path_of(name)))
        training = dataclasses.replace(
            training, program=str(ROOT / "tests" / "idioms" / "on_device.py"), arguments=arguments
        )
        environment = {
            "CUDA_VISIBLE_DEVICES": "0",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "LATE_DEVICES": str(training.ranks + 1),
        }
    with tempfile.TemporaryDirectory(prefix="idiom-") as directory:
        job = IdiomJob(
            Path(directory),
            training,
            faults=faults,
            standbys=1,
            hang_seconds=2 * HANG_SECONDS,
            flags=flags,
            environment=environment,
        )
        with job:
            if disturb is not None:
                disturb(job)
            try:
                outcome = job.wait(DEADLINE_SECONDS)
            except AssertionError as error:
                return Ending(status=-1, digests={}, steps=0, failures=0, bits="", words=str(error)[-3000:])
            finally:
                if keep is not None:
                    shutil.copytree(directory, keep / f"{name}-{time.time():.0f}", dirs_exist_ok=True)
            report = outcome.report
            words = report.error or "; ".join(doubt.reason for doubt in report.doubts)
            if outcome.status and not words:
                words = outcome.stderr[-600:]
            return Ending(
                status=outcome.status,
                digests=digests_in(outcome.stdout),
                steps=report.steps,
                failures=len(report.failures),
                bits=report.bits_as_undisturbed or (NOT_KNOWN if report.doubts else ""),
                words=words,
                usage="UsageError" in words
                or words.startswith("the state of version 1 differs")  # ranks that train apart
                or any(failure.kind == "usage" for failure in report.failures),
                late="failed in the code after the last step" in report.error,
                left="; ".join(part for part in (job.left, _unplanned(report, planned)) if part),
            )


def _unplanned(report: JobReport, planned: int) -> str:
    """All failures, if there were more than those on purpose."""
    if len(report.failures) <= planned:
        return ""
    found = (f"rank {failure.rank} {failure.kind} {failure.phase} {failure.step}" for failure in report.failures)
    return f"more failures than planned: {', '.join(found)}"


def _kill_at_random(job: Job, draw: random.Random, strikes: int) -> None:
    """Each time wait until the ranks train, and then for a random time."""
    with contextlib.suppress(AssertionError):  # it ended: of itself, or because of what is to be found out
        job.wait_until(lambda: _count(job, "TrainingEntered") >= job.training.ranks, "ranks train")
        for _ in range(strikes):
            moment = time.monotonic() + draw.random() * _PACE_SECONDS / strikes
            job.wait_until(lambda: time.monotonic() > moment, "the moment")  # noqa: B023
            stopped, resumed = _count(job, "Stopped"), _count(job, "StepResumed")
            workers = sorted(job.workers().items())
            if workers:
                send(draw.choice(workers)[1], signal.SIGKILL)
            noticed = time.monotonic() + _NOTICED_SECONDS
            job.wait_until(lambda: time.monotonic() > noticed or _count(job, "Stopped") > stopped, "ranks stop")  # noqa: B023
            if _count(job, "Stopped") > stopped:  # it was no standby
                job.wait_until(lambda: _count(job, "StepResumed") >= resumed + job.training.ranks, "ranks train")  # noqa: B023


def _count(job: Job, event: str) -> int:
    """Count the times that a process has said so."""
    return job.journal().count(f'"event":{{"type":"{event}"')
