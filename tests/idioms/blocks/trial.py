"""Runs composed scripts as jobs of `relight run`, and says what came of them."""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.idioms.blocks.faults import is_in_script
from tests.idioms.blocks.plan import Plan
from tests.idioms.blocks.render import render
from tests.survival.harness import GONE_SECONDS, PATIENCE, Job, Training

DEADLINE_SECONDS = 90.0 * PATIENCE
_DIGEST = re.compile(r"digest rank=(\d+) (\{[^}]*\})")

EQUAL = "equal"
REFUSED = "refused"  # relight's own UsageError, before a step was committed
LATE = "late"  # the same, but after training had begun; or the undisturbed job failed in another way
TOLD = "told"  # other bits, and the report says that they are not known to be those of an undisturbed run
ENDED = "ended"  # the disturbed job ended, and said that it could not vouch for the state
SILENT = "SILENT"  # other bits, and nothing was said
LOST = "LOST"  # the job ended although replicas lived
UNSTABLE = "unstable"  # two undisturbed runs differ: the composer's own fault
FAILURES = (SILENT, LOST, LATE, UNSTABLE)
VERDICTS = (EQUAL, REFUSED, TOLD, ENDED, *FAILURES)

_TORN = re.compile(
    r"no (rank|process) (holds|has) .*(state|version)|half written|interrupted inside a write|torn|cannot be repeated|"
    r"worth nothing"
)


class Doubt(msgspec.Struct, frozen=True):
    reason: str = ""


class Report(msgspec.Struct, frozen=True):
    """Those fields of `report.json` that are read."""

    error: str = ""
    steps: int = 0
    failures: tuple[object, ...] = ()
    notices: tuple[str, ...] = ()
    cut_collectives: int = 0
    bits_as_undisturbed: str = ""
    doubts: tuple[Doubt, ...] = ()


@dataclass(frozen=True)
class Run:
    """One job, after its end."""

    status: int
    digests: dict[int, tuple[str, ...]]  # all that each rank printed
    report: Report
    output: str
    seconds: float

    @property
    def doubt(self) -> str:
        """Reasons of relight to doubt the bits; empty: none."""
        if self.report.doubts:
            return "doubted: " + "; ".join(sorted({doubt.reason for doubt in self.report.doubts}))
        if self.report.bits_as_undisturbed not in ("", "yes"):
            return f"bits as undisturbed: {self.report.bits_as_undisturbed}"
        return f"{self.report.cut_collectives} collectives cut" if self.report.cut_collectives else ""

    def error(self) -> str:
        """The last lines that tell why it failed."""
        lines = [line for line in self.output.splitlines() if "Error" in line or "error" in line]
        return self.report.error or "\n".join(lines[-3:])

    def tail(self) -> str:
        """The first traceback, or the end of the output."""
        _, found, rest = self.output.partition("Traceback")
        lines = (found + rest if found else self.output[-2500:]).splitlines()
        return "\n".join(lines[-60:])


@dataclass(frozen=True)
class Verdict:
    """The verdict on one plan."""

    word: str
    why: str = ""

    @property
    def failed(self) -> bool:
        """True if it is one that must not happen."""
        return self.word in FAILURES


class _Composed(Job):
    """A job whose leftovers are removed rather than held against it: others may use this machine too."""

    def check_nothing_is_left(self) -> None:
        deadline = time.monotonic() + GONE_SECONDS
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.kill()


class Trials:
    """Runs plans; how undisturbed scripts end is remembered."""

    def __init__(self, directory: Path, locks: Sequence[Path] = (), *, standbys: int = 1) -> None:
        self._directory = directory
        self._locks = locks
        self._standbys = standbys
        self._undisturbed: dict[tuple[str, int], Run] = {}
        self._number = 0

    def judge(self, plan: Plan) -> Verdict:
        """Run the plan undisturbed, if it was not yet, and disturbed."""
        expected = self.undisturbed(plan)
        if expected.status != 0:
            early = "UsageError" in expected.output and expected.report.steps <= 1
            return Verdict(REFUSED if early else LATE, expected.error() if early else expected.tail())
        found = self.run(plan, plan.faults)
        verdict = compare(expected, found)
        if verdict.word == SILENT:
            again = self.run(plan, ())
            if again.digests != expected.digests:
                return Verdict(UNSTABLE, difference(expected, again))
        return verdict

    def undisturbed(self, plan: Plan) -> Run:
        """Return how the script of the plan ends if nothing disturbs it."""
        key = (render(plan), plan.ranks)
        if key not in self._undisturbed:
            self._undisturbed[key] = self.run(plan, ())
        return self._undisturbed[key]

    def run(self, plan: Plan, faults: Sequence[str]) -> Run:
        """One job, to its end."""
        self._number += 1
        directory = self._directory / f"{plan.seed}-{self._number}"
        script = directory / "script.py"
        struck = directory / "struck"
        struck.mkdir(parents=True)
        script.write_text(render(plan))
        strikes = " ".join(fault for fault in faults if is_in_script(fault))
        planned = [fault for fault in faults if not is_in_script(fault)]
        training = Training(ranks=plan.ranks, steps=plan.steps, program=str(script))
        with self._one_of_the_locks():
            began = time.monotonic()
            job = _Composed(
                directory,
                training,
                faults=planned,
                standbys=self._standbys if faults else 0,
                environment={"STRIKES": strikes, "STRUCK": str(struck)},
            )
            with job:
                status = _wait(job)
            seconds = time.monotonic() - began
        report = Report()
        with contextlib.suppress(OSError, msgspec.DecodeError):
            report = msgspec.json.decode((job.run_dir / "report.json").read_bytes(), type=Report)
        digests: dict[int, tuple[str, ...]] = {}
        for rank, value in _DIGEST.findall(job.output()):
            digests[int(rank)] = (*digests.get(int(rank), ()), value)
        output = job.output() + job.messages()
        shutil.rmtree(directory, ignore_errors=True)
        return Run(status, digests, report, output, seconds)

    @contextlib.contextmanager
    def _one_of_the_locks(self) -> Iterator[None]:
        """Several fuzzers may share a machine: a job runs while it holds one of the files."""
        files = [path.open("a") for path in self._locks]
        try:
            while files and not any(_locked(file.fileno()) for file in files):
                time.sleep(0.3)
            yield
        finally:
            for file in files:
                file.close()


def compare(expected: Run, found: Run) -> Verdict:
    """The verdict on a disturbed run."""
    if found.status != 0:
        if found.doubt or _TORN.search(found.report.error):
            return Verdict(ENDED, found.error())
        return Verdict(LOST, f"status {found.status} after {found.seconds:.0f} s: {found.error()}\n{found.tail()}")
    different = difference(expected, found)
    if not different:
        return Verdict(EQUAL, found.doubt)
    return Verdict(TOLD, f"{found.doubt}; {different}") if found.doubt else Verdict(SILENT, different)


def difference(expected: Run, found: Run) -> str:
    """The values that differ, by rank; empty: none."""
    lines = []
    for rank in sorted(expected.digests):
        wanted = expected.digests[rank][-1]
        values = found.digests.get(rank, ())
        if not values:
            lines.append(f"rank {rank} printed nothing")
        for value in values:
            if value != wanted:
                names = sorted(name for name, part in _parts(value).items() if _parts(wanted).get(name) != part)
                lines.append(f"rank {rank}: {', '.join(names)}")
    return "; ".join(lines)


def _parts(text: str) -> dict[str, str]:
    return dict(re.findall(r"'(\w+)': '(\w+)'", text))


def _wait(job: Job) -> int:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (status := job.launcher.poll()) is None:
        if time.monotonic() > deadline:
            return -1  # its processes are killed when the job's context ends
        time.sleep(0.05)
    job.check_nothing_is_left()
    return int(status)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def scratch() -> Path:
    """A directory for jobs, of which nothing is kept."""
    return Path(tempfile.mkdtemp(prefix="composed-", dir=os.environ.get("TMPDIR")))
