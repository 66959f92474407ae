"""Whole jobs, started by `relight run` as a user starts them, and judged by what is left of them.

Every job gets a directory for temporary files and a mark in its environment of its own. Its processes lead sessions
of their own and may be orphaned, so the mark is how they are found; nothing else is ever signalled.
"""

import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil

from relight.core.account.report import JobReport, decode_report
from relight.wire.template import ROOM_BYTES, ROOM_VARIABLE, SHARED_VARIABLE
from tests.survival.leftovers import Made, in_shared_memory, named_after

# All patience is a multiple of this: raise it where processors are slow or shared.
PATIENCE = float(os.environ.get("RELIGHT_TEST_PATIENCE", "1"))
HANG_SECONDS = 5.0 * PATIENCE
DEADLINE_SECONDS = 100.0 * PATIENCE
GONE_SECONDS = 3.0 * PATIENCE  # from the launcher's end until the last process is out of the process table

# Workers of jobs are forked of a process that has imported torch, which saves most of the time of a test.
# RELIGHT_TEST_PRELOAD= runs every worker as a new process.
PRELOAD = os.environ.get("RELIGHT_TEST_PRELOAD", "torch")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # which transformers reads as it is imported
PRELOADED = ("--preload", PRELOAD) if PRELOAD else ()  # flags of a job with an agent of its own

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "programs"
SHARED_TEMPLATE = ROOT / "tests" / "survival" / "shared_template.py"
_MARK = "RELIGHT_TEST_JOB"
SAVING = (
    "train.py",
    "train.sh",
    "divided.py",
    "pipeline.py",
    "carrying.py",
    "shapes.py",
    "leaving.py",
)  # programs that write digests of what they end with, and can be held


@dataclass(frozen=True, kw_only=True)
class Training:
    """All that decides the bits that a job ends with, failures aside."""

    ranks: int = 3
    steps: int = 7  # 0: the program's own affair
    arguments: tuple[str, ...] = ()  # of the program
    program: str = "train.py"
    is_late: bool = False  # on the late device (tests/device_extension)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a job, from its files."""

    command: tuple[str, ...]
    status: int
    stdout: str
    stderr: str
    run_dir: Path
    seconds: float
    report: JobReport
    finals: dict[int, dict[str, str]]  # per rank: digests of the final state, taken by the program itself

    def describe(self) -> str:
        """Everything that helps to understand a job that went wrong."""
        faults = "\n".join(f"  {f.number}: rank {f.rank} {f.kind} {f.phase} {f.step}" for f in self.report.failures)
        return (
            f"{' '.join(self.command)}\nstatus {self.status} after {self.seconds:.1f} s; {self.run_dir}\n"
            f"error: {self.report.error}\nfailures:\n{faults}\nrecoveries:\n"
            + "\n".join(
                f"  {r.number}: {r.decision} to {r.target_version}, repeated {r.steps_repeated}: {r.reason}"
                for r in self.report.recoveries
            )
            + f"\nstdout: {self.stdout[-1500:]}\nstderr: {self.stderr[-3000:]}"
        )


class Job:
    """A running job. Use it as a context: whatever happens inside, no process of it survives the end."""

    def __init__(
        self,
        directory: Path,
        training: Training,
        *,
        faults: Sequence[str] = (),
        standbys: int = 1,
        flags: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        hang_seconds: float = HANG_SECONDS,
        run_dir: Path | None = None,
        preload: str = PRELOAD,
    ) -> None:
        self.training = training
        self._preload = preload
        self.directory = directory
        self.run_dir = run_dir or directory / "run"
        self.final = directory / "final"
        self._hold = directory / "go"
        self._mark = uuid.uuid4().hex
        # Sockets live below it, and a socket's path may have 107 bytes.
        self.temporary = Path(tempfile.mkdtemp(prefix="rl-"))
        self._made = Made(self.temporary)
        self._shared_memory_before = in_shared_memory()
        self.command = (
            *(sys.executable, "-P", "-m", "relight.cli", "run"),
            *("--nproc-per-node", str(training.ranks), "--standby", str(standbys), "--run-dir", str(self.run_dir)),
            *("--hang-timeout-seconds", f"{hang_seconds:g}", "--outside-hang-timeout-seconds", f"{hang_seconds:g}"),
            *(("--preload", preload) if preload and "--no-python" not in flags else ()),
            *flags,
            *(word for sentence in faults for word in ("--chaos", sentence)),
            *((str(PROGRAMS / "on_late_device.py"),) if training.is_late else ()),
            str(PROGRAMS / training.program),
            *(("--steps", str(training.steps)) if training.steps else ()),
            *training.arguments,
            *(("--save", str(self.final), "--hold", str(self._hold)) if training.program in SAVING else ()),
        )
        directory.mkdir(parents=True, exist_ok=True)
        self._started = time.monotonic()
        with (directory / "stdout").open("wb") as out, (directory / "stderr").open("wb") as err:
            self.launcher = subprocess.Popen(
                self.command,
                cwd=directory,
                env=self._environment(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def _environment(self, extra: dict[str, str]) -> dict[str, str]:
        shared = {SHARED_VARIABLE: template_socket(self._preload)} if "--preload" in self.command else {}
        return {**plain_environment(), **shared, "TMPDIR": str(self.temporary), _MARK: self._mark, **extra}

    # --- while it runs ----------------------------------------------------------------------------------------
    def processes(self) -> list[psutil.Process]:
        """The job's living processes, the launcher included."""
        mark, found = f"{_MARK}={self._mark}".encode(), []
        for name in filter(str.isdecimal, os.listdir("/proc")):  # psutil reads as much in four times the time
            with contextlib.suppress(OSError, psutil.Error):  # gone, or another user's
                if mark in Path("/proc", name, "environ").read_bytes():
                    found.append(psutil.Process(int(name)))
        return found

    def workers(self) -> dict[str, psutil.Process]:
        """The job's workers and standbys by name."""
        named = ((_environment_of(p).get("RELIGHT_PROCESS"), p) for p in self.processes())
        return {name: process for name, process in named if name is not None and _leads_session(process)}

    def module(self, name: str) -> psutil.Process | None:
        """The living process that runs `python -m NAME`, such as relight.agent."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if ["-P", "-m", name] == process.cmdline()[1:4]:
                    return process
        return None

    def output(self) -> str:
        """Lines that the workers have printed so far."""
        return (self.directory / "stdout").read_text(errors="replace")

    def messages(self) -> str:
        """Lines that relight itself has printed so far."""
        return (self.directory / "stderr").read_text(errors="replace")

    def journal(self) -> str:
        """The controller's journal so far."""
        path = self.run_dir / "journal.jsonl"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Look again and again until the condition holds; the job must not end before."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert self.launcher.poll() is None, f"the job ended before {what}\n{self.messages()}"
            assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS:g} s: {what}\n{self.messages()}"
            time.sleep(0.01)

    def release(self) -> None:
        """Let the program go on that waits because of --hold-at, and without pauses."""
        self._hold.touch()

    # --- its end ----------------------------------------------------------------------------------------------
    def wait(self, deadline_seconds: float = DEADLINE_SECONDS) -> Outcome:
        """Wait for the end of the job; then nothing of it may be left."""
        try:
            status = self.launcher.wait(deadline_seconds)
        except subprocess.TimeoutExpired:
            state = self._describe_processes()
            self.kill()
            raise AssertionError(
                f"the job did not end within {deadline_seconds:g} s: {' '.join(self.command)}\n{state}\n"
                f"{self.output()[-1500:]}\n{self.messages()[-3000:]}\njournal:\n{self.journal()[-3000:]}"
            ) from None
        seconds = time.monotonic() - self._started
        self.check_nothing_is_left()
        return Outcome(
            command=self.command,
            status=status,
            stdout=self.output(),
            stderr=self.messages(),
            run_dir=self.run_dir,
            seconds=seconds,
            report=self._report(),
            finals=self._finals(),
        )

    def check_nothing_is_left(self) -> None:
        """No process, no shared memory, no private directory, of this job's."""
        deadline = time.monotonic() + GONE_SECONDS
        while left := self.processes() or self._left_in_shared_memory():
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        state = self._describe_processes()
        self.kill()
        assert not left, f"{left} still there {GONE_SECONDS:g} s after the end:\n{state}\n{self.messages()[-2000:]}"
        private = [str(path) for path in self.temporary.rglob("*relight*/**")]
        assert not private, f"a private directory is left: {private}\n{self.messages()[-2000:]}"

    def _left_in_shared_memory(self) -> list[str]:
        new = in_shared_memory() - self._shared_memory_before
        return named_after(new, self._made.names(), self._pids()) if new else []

    def _pids(self) -> set[int]:
        """Processes that the job's agents have started so far, also those that have ended."""
        return {int(pid) for pid in re.findall(r'"pid": ?(\d+)', self.journal())}

    def kill(self) -> None:
        """SIGKILL to every process of the job, until none is left."""
        while processes := self.processes():
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(processes, timeout=0.2)
        self.launcher.wait()

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._made.close()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _report(self) -> JobReport:
        path = self.run_dir / "report.json"
        return decode_report(path.read_bytes()) if path.exists() else JobReport(job="", error="there is no report")

    def _finals(self) -> dict[int, dict[str, str]]:
        found = {path.suffix[1:]: path for path in self.directory.glob(f"{self.final.name}.*")}
        return {int(rank): json.loads(path.read_text()) for rank, path in sorted(found.items()) if rank.isdecimal()}

    def _describe_processes(self) -> str:
        lines = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                environment = _environment_of(process)
                name = environment.get("RELIGHT_PROCESS", "")
                lines.append(f"{process.pid} {process.status()} {name} {' '.join(process.cmdline())[:100]}")
        return "\n".join(lines)


def plain_environment() -> dict[str, str]:
    """For programs that import relight and the tests from this checkout. They are not to find a GPU."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("RELIGHT_")}
    # What else is found there comes after this checkout: packages that were brought to a machine without a network.
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**inherited, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def finals_under_torchrun(directory: Path, ranks: int, program: str, *arguments: str) -> dict[int, dict[str, str]]:
    """Run a program without relight; return the digests of its final state, by rank."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *(str(PROGRAMS / program), *arguments, "--save", str(directory / "plain")),
    ]
    plain = subprocess.run(
        command,
        cwd=ROOT,
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert plain.returncode == 0, plain.stderr
    return {rank: json.loads((directory / f"plain.{rank}").read_text()) for rank in range(ranks)}


@functools.cache
def template_socket(modules: str = PRELOAD) -> str:
    """Start a process that imports these modules for all jobs of this one, and ends with it, however that ends.

    Returns the process's socket.
    """
    directory = Path(tempfile.mkdtemp(prefix="rl-"))
    socket = directory / "template"
    process = subprocess.Popen(
        (sys.executable, "-P", str(SHARED_TEMPLATE), str(os.getpid()), str(socket), modules),
        env={**plain_environment(), **OFFLINE, ROOM_VARIABLE: "0" * ROOM_BYTES},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )

    def end() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(directory)

    atexit.register(end)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not socket.exists():
        assert process.poll() is None, "the template process has ended"
        assert time.monotonic() < deadline, "the template process does not listen"
        time.sleep(0.01)
    return str(socket)


def _environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        environment: dict[str, str] = process.environ()
    except (psutil.Error, OSError):  # gone, a zombie, or another user's
        return {}
    return environment


def _leads_session(process: psutil.Process) -> bool:
    try:
        return bool(os.getsid(process.pid) == process.pid)
    except ProcessLookupError:
        return False


@dataclass
class Bench:
    """Runs jobs one after the other, and remembers how undisturbed ones end."""

    make_directory: Callable[[], Path]
    references: dict[Hashable, Outcome] = field(default_factory=dict)

    def run(
        self,
        training: Training,
        *,
        faults: Sequence[str] = (),
        standbys: int = 1,
        flags: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> Outcome:
        """Run a job to its end, whatever that is."""
        with self.start(training, faults=faults, standbys=standbys, flags=flags, environment=environment) as job:
            return job.wait(deadline_seconds)

    @contextlib.contextmanager
    def start(
        self,
        training: Training,
        *,
        faults: Sequence[str] = (),
        standbys: int = 1,
        flags: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> Iterator[Job]:
        """Start a job, to be disturbed from outside."""
        directory = self.make_directory()
        with Job(directory, training, faults=faults, standbys=standbys, flags=flags, environment=environment) as job:
            yield job

    def reference(self, training: Training) -> Outcome:
        """The outcome of the same training, undisturbed. Computed once in a session."""
        if training not in self.references:
            with self.start(training, standbys=0) as job:
                job.release()
                outcome = job.wait()
            assert outcome.status == 0, outcome.describe()
            assert not outcome.report.failures, outcome.describe()
            assert outcome.report.final_version == training.steps
            self.references[training] = outcome
        return self.references[training]


def send(process: psutil.Process | subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal one process of a job, if it is still there."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        process.send_signal(number)
