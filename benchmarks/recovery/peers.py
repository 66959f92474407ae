"""Measures how other systems recover: kills one process of a running job and reads the job's event logs.

Every figure comes from the events that the training processes themselves wrote; the measuring process only
decides when to kill. What is measured, the same for every system:

computing again
    until every rank has begun a forward pass whose result is kept. A forward pass that is thrown away,
    because the rank's collective then fails or its gradients do not count, is not training.
replacement contributes
    until the process that took the victim's place has completed a step that its batch is part of.
next new step
    until every rank taking part has completed the first step that no attempt begun before the kill completed:
    the moment at which the job is further than it could have been.
steps again
    steps begun before the kill and computed again after it: one if just the step in flight is redone.
steps undone
    those among them that had been completed, so that finished work was lost.
batches skipped
    batches (one rank's share of one step) that the parameters moved on without.
ranks restarted
    ranks that another process holds afterwards: one if no healthy process had to end.

Run by ``python -m benchmarks.recovery.peers --system torchft --trials 5``. The parts that know no system
(``Job``, ``run_trial``, ``Trial``, ``table``, ``write_results``) serve other measurements in this folder.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, TypeVar

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = (REPOSITORY, REPOSITORY / "src")  # also without an installed relight
WORLD_SIZE = 4
POLL_S = 0.01
START_DEADLINE_S = 180.0  # until the step of the fault is under way
RECOVERY_DEADLINE_S = 120.0  # from the fault; past it, the system has not recovered
END_DEADLINE_S = 10.0  # for killed processes to be gone
WARM_UP_STEPS = 3  # left out of the median step time

# Anywhere between two checkpoints of torchrun_checkpoint; for the others any warm step will do.
TORCHRUN_FAULT_STEPS = range(20, 40)
TORCHFT_FAULT_STEPS = range(8, 13)

TorchftMode = Literal["default", "strict"]
T = TypeVar("T")


class JobFailed(Exception):
    """The system under test ended, or never began, for a reason other than the fault."""


# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Event:
    """One line of an event log; ``workload.EventLog`` says what the names mean."""

    t_ns: int
    rank: int
    pid: int
    event: str
    step: int


class EventReader:
    """Reads what was appended to the event logs of a directory, however many processes come and go."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read_bytes: dict[Path, int] = defaultdict(int)
        self.events: list[Event] = []

    def poll(self) -> bool:
        """Read on; whether `events` has grown. A line without its end waits for the next time."""
        known = len(self.events)
        for path in sorted(self._directory.glob("*.jsonl")):
            if path.stat().st_size > self._read_bytes[path]:
                self.events.extend(self._new_events(path))
        return len(self.events) > known

    def _new_events(self, path: Path) -> Iterator[Event]:
        with path.open("rb") as file:
            file.seek(self._read_bytes[path])
            whole, end, _ = file.read().rpartition(b"\n")
        self._read_bytes[path] += len(whole) + len(end)
        for line in whole.splitlines():
            fields = json.loads(line)
            yield Event(*(fields[field.name] for field in dataclasses.fields(Event)))


@dataclass(frozen=True)
class Attempt:
    """One process's attempt at one step; `outcome` stays None if it was cut short."""

    rank: int
    pid: int
    step: int
    start_ns: int
    forward_ns: int | None
    end_ns: int | None
    outcome: str | None

    @property
    def kept(self) -> bool:
        """True if this rank's batch became part of its parameters."""
        return self.outcome == "step_end"


_OUTCOMES = ("step_end", "step_passive", "step_discarded")


def attempts_of(events: Iterable[Event]) -> list[Attempt]:
    """Cut each process's events into its attempts."""
    by_process: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        by_process[event.rank, event.pid].append(event)
    attempts = []
    for _, own in sorted(by_process.items()):
        starts = [index for index, event in enumerate(own) if event.event == "step_start"]
        attempts += [_attempt(own[start:end]) for start, end in itertools.pairwise([*starts, len(own)])]
    return attempts


def _attempt(events: Sequence[Event]) -> Attempt:
    start = events[0]
    forward = next((event for event in events if event.event == "forward"), None)
    end = next((event for event in events if event.event in _OUTCOMES), None)
    # A process may learn the true number of its step only after it began: its last word counts.
    named_by = end or forward or start
    return Attempt(
        rank=start.rank,
        pid=start.pid,
        step=named_by.step,
        start_ns=start.t_ns,
        forward_ns=forward.t_ns if forward else None,
        end_ns=end.t_ns if end else None,
        outcome=end.event if end else None,
    )


def median_step_s(attempts: Iterable[Attempt], rank: int) -> float:
    """Median time from one completed step's start to the next one's start, without the first few."""
    starts = [attempt.start_ns for attempt in attempts if attempt.rank == rank and attempt.kept]
    gaps_ns = [later - earlier for earlier, later in itertools.pairwise(starts)]
    return statistics.median(gaps_ns[WARM_UP_STEPS:]) / 1e9


# ---------------------------------------------------------------- a fault and what came after


@dataclass(frozen=True)
class FaultPlan:
    """The time and the victim of a kill: once `fraction` of a median step has passed since the victim began `step`."""

    rank: int
    step: int
    fraction: float


@dataclass(frozen=True)
class Fault:
    """A fault as it was injected."""

    rank: int
    pid: int
    step: int
    fraction: float  # of the median step time, as it came out
    phase: str  # the victim's last event
    t_ns: int


@dataclass(frozen=True)
class Recovery:
    """One recovery as the logs show it; all `_ns` are times of the machine's monotonic clock."""

    computing_ns: dict[int, int]  # by rank
    restored_ns: int | None  # the replacement's state was loaded; None for a system that does not say
    contributes_ns: int
    new_step: int
    new_step_ns: int
    steps_again: int
    steps_undone: int
    batches_skipped: int
    ranks_restarted: int


@dataclass(frozen=True)
class Trial:
    """One kill of one process of one system. Figures are seconds from the kill; None: it never happened."""

    system: str
    seed: int
    fault: Fault
    step_s: float  # median, undisturbed, before the kill
    computing_again_s: float | None
    replacement_contributes_s: float | None
    next_new_step_s: float | None
    steps_again: int | None
    steps_undone: int | None
    batches_skipped: int | None
    ranks_restarted: int | None
    load_before: float  # of the machine, one-minute average before the job started
    raw: Recovery | None
    failure: str | None = None  # why there is no recovery


def find_recovery(events: Sequence[Event], fault: Fault, world_size: int = WORLD_SIZE) -> Recovery | None:
    """Return the times of the recovery, or None while it is not over.

    It is over when every rank has completed one and the same new step. Attempts begun before the kill are no
    part of it even if a survivor completes one a moment later: that work was done without any recovery, and a
    system that goes back to a checkpoint then throws it away.
    """
    attempts = attempts_of(events)
    before = [attempt for attempt in attempts if attempt.start_ns <= fault.t_ns]
    kept = [attempt for attempt in attempts if attempt.start_ns > fault.t_ns and attempt.kept]
    last_completed = max((attempt.step for attempt in before if attempt.kept), default=-1)
    last_begun = max(attempt.step for attempt in before)

    ranks_of: dict[int, set[int]] = defaultdict(set)
    for attempt in kept:
        ranks_of[attempt.step].add(attempt.rank)
    new_steps = sorted(step for step in ranks_of if step > last_completed)
    whole = next((step for step in new_steps if len(ranks_of[step]) == world_size), None)
    if whole is None:
        return None

    first_kept = {rank: _first(kept, rank) for rank in range(world_size)}
    replacement = first_kept[fault.rank]
    restored = (e.t_ns for e in events if e.event == "restored" and e.pid == replacement.pid)
    old_pids = {attempt.pid for attempt in before}
    moved_on = range(last_completed + 1, whole + 1)
    again = {attempt.step for attempt in kept if attempt.step <= last_begun}
    return Recovery(
        computing_ns={rank: _known(attempt.forward_ns) for rank, attempt in first_kept.items()},
        restored_ns=next((t_ns for t_ns in restored if t_ns > fault.t_ns), None),
        contributes_ns=_known(replacement.end_ns),
        new_step=new_steps[0],
        new_step_ns=max(_known(attempt.end_ns) for attempt in kept if attempt.step == new_steps[0]),
        steps_again=len(again),
        steps_undone=sum(step <= last_completed for step in again),
        batches_skipped=sum(world_size - len(ranks_of[step]) for step in moved_on),
        ranks_restarted=sum(attempt.pid not in old_pids for attempt in first_kept.values()),
    )


def _first(attempts: Iterable[Attempt], rank: int) -> Attempt:
    own = (attempt for attempt in attempts if attempt.rank == rank)
    return min(own, key=lambda attempt: attempt.start_ns)


def _known(t_ns: int | None) -> int:
    """A time that a completed attempt always has."""
    assert t_ns is not None
    return t_ns


# ---------------------------------------------------------------- one trial


class Job(Protocol):
    """A system under test, about to train on `WORLD_SIZE` ranks that log their events to `log_dir`."""

    log_dir: Path

    def start(self) -> None:
        """Start all processes; return at once."""

    def supervise(self) -> None:
        """Called every few milliseconds. Raise `JobFailed` if the job cannot go on."""

    def stop(self) -> None:
        """End every process that the job ever started, whatever state it is in."""


def run_trial(job: Job, system: str, seed: int, plan: FaultPlan) -> Trial:
    """Run a job up to a fault, inject it, and wait until the job has recovered or its deadline has passed."""
    load_before = os.getloadavg()[0]
    reader = EventReader(job.log_dir)
    try:
        job.start()
        fault, step_s = _inject(job, reader, plan)
        recovery, failure = _await_recovery(job, reader, fault)
    finally:
        job.stop()
    return _trial(system, seed, fault, step_s, load_before, recovery, failure)


def _inject(job: Job, reader: EventReader, plan: FaultPlan) -> tuple[Fault, float]:
    def victim_start() -> Event | None:
        reader.poll()
        wanted = (plan.rank, plan.step, "step_start")
        return next((e for e in reader.events if (e.rank, e.step, e.event) == wanted), None)

    start = _poll(victim_start, job, START_DEADLINE_S)
    if start is None:
        raise JobFailed(f"rank {plan.rank} had not begun step {plan.step} after {START_DEADLINE_S:.0f} s")
    step_s = median_step_s(attempts_of(reader.events), plan.rank)
    # This wait is the fault's schedule: it is counted from the victim's own time stamp.
    time.sleep(max(0.0, start.t_ns / 1e9 + plan.fraction * step_s - time.monotonic()))
    t_ns = time.monotonic_ns()
    os.kill(start.pid, signal.SIGKILL)
    reader.poll()
    phase = max((e for e in reader.events if e.pid == start.pid), key=lambda e: e.t_ns).event
    fraction = (t_ns - start.t_ns) / 1e9 / step_s
    return Fault(plan.rank, start.pid, plan.step, round(fraction, 3), phase, t_ns), step_s


def _await_recovery(job: Job, reader: EventReader, fault: Fault) -> tuple[Recovery | None, str | None]:
    def recovered() -> Recovery | None:
        return find_recovery(reader.events, fault) if reader.poll() else None

    try:
        recovery = _poll(recovered, job, RECOVERY_DEADLINE_S)
    except JobFailed as error:
        return None, str(error)
    return recovery, None if recovery else f"not recovered after {RECOVERY_DEADLINE_S:.0f} s"


def _poll(ready: Callable[[], T | None], job: Job, deadline_s: float) -> T | None:
    """Look again and again until there is an answer; None if there was none by the deadline."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        job.supervise()
        answer = ready()
        if answer is not None:
            return answer
        time.sleep(POLL_S)
    return None


def _trial(
    system: str,
    seed: int,
    fault: Fault,
    step_s: float,
    load_before: float,
    recovery: Recovery | None,
    failure: str | None,
) -> Trial:
    def since_fault(t_ns: int) -> float:
        return round((t_ns - fault.t_ns) / 1e9, 3)

    return Trial(
        system=system,
        seed=seed,
        fault=fault,
        step_s=round(step_s, 3),
        computing_again_s=since_fault(max(recovery.computing_ns.values())) if recovery else None,
        replacement_contributes_s=since_fault(recovery.contributes_ns) if recovery else None,
        next_new_step_s=since_fault(recovery.new_step_ns) if recovery else None,
        steps_again=recovery.steps_again if recovery else None,
        steps_undone=recovery.steps_undone if recovery else None,
        batches_skipped=recovery.batches_skipped if recovery else None,
        ranks_restarted=recovery.ranks_restarted if recovery else None,
        load_before=round(load_before, 2),
        raw=recovery,
        failure=failure,
    )


def plan_fault(system: str, seed: int, trial: int, steps: range) -> FaultPlan:
    """A fault drawn from the seed alone: any rank, any of `steps`, any moment of it."""
    draw = random.Random(f"{seed}/{system}/{trial}")
    return FaultPlan(draw.randrange(WORLD_SIZE), draw.choice(steps), draw.random())


@contextlib.contextmanager
def trial_directory(workdir: Path) -> Iterator[Path]:
    """A folder for one trial's logs and checkpoints, which is removed in the end."""
    workdir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="trial-", dir=workdir))
    try:
        (directory / "events").mkdir()
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


# ---------------------------------------------------------------- processes


def launch(command: Sequence[str], output: Path, **variables: str) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, with what it prints appended to a file."""
    environment = os.environ | {
        **variables,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (*map(str, SOURCES), os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(output.parent),  # what a killed launcher leaves there goes with the trial's folder
    }
    with output.open("ab") as file:
        return subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip


def end_processes(roots: Iterable[subprocess.Popen[bytes]], log_dir: Path) -> None:
    """End these processes and everything below them, by process id.

    Each root is stopped before its children are listed, so that it cannot start another meanwhile. Training
    processes whose parent is already dead are found through the logs that they wrote.
    """
    roots = list(roots)
    doomed = [process for root in roots for process in _frozen_tree(root)]
    doomed += _logged_processes(log_dir)
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for root in roots:
        root.wait(END_DEADLINE_S)
    psutil.wait_procs(doomed, timeout=END_DEADLINE_S)


def _frozen_tree(root: subprocess.Popen[bytes]) -> list[Any]:
    if root.poll() is not None:
        return []
    try:
        process = psutil.Process(root.pid)
        process.suspend()
        return [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return []


def _logged_processes(log_dir: Path) -> list[Any]:
    reader = EventReader(log_dir)
    reader.poll()
    found = []
    for pid in {event.pid for event in reader.events}:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(pid)
            if str(log_dir) in process.cmdline():  # else the number has been given to a stranger
                found.append(process)
    return found


def tail(path: Path, lines: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""


# ---------------------------------------------------------------- torchrun


class TorchrunJob:
    """A script under torchrun, which restarts all ranks when one of them dies."""

    def __init__(self, directory: Path, script: str, seed: int, *extra: str, restarts: int = 3) -> None:
        self.log_dir = directory / "events"
        self._output = directory / "torchrun.txt"
        self._command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(WORLD_SIZE), "--max-restarts", str(restarts)),
            *("-m", f"benchmarks.recovery.{script}"),
            *("--log-dir", str(self.log_dir), "--seed", str(seed), *extra),
        ]
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        # The store that the agent shares by default still holds the ranks' addresses of before the restart.
        # New ranks connect to those, so that restarts fail by chance (pytorch#135712; torch 2.13).
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._processes.append(launch(self._command, self._output, **variables))

    def supervise(self) -> None:
        if self.exited() is not None:
            raise JobFailed(f"torchrun ended with status {self.exited()}:\n{tail(self._output)}")

    def exited(self) -> int | None:
        """Its exit status, or None while it runs."""
        return self._processes[0].poll()

    def stop(self) -> None:
        end_processes(self._processes, self.log_dir)


def measure_torchrun(trials: int, seed: int, workdir: Path) -> list[Trial]:
    """Kill one rank of a job that torchrun restarts from its last checkpoint, at most 20 steps old."""
    return [_reported(torchrun_trial(trial, seed, workdir)) for trial in range(trials)]


def torchrun_trial(trial: int, seed: int, workdir: Path) -> Trial:
    """One of them."""
    plan = plan_fault("torchrun", seed, trial, TORCHRUN_FAULT_STEPS)
    with trial_directory(workdir) as directory:
        checkpoints = ("--checkpoint-dir", str(directory))
        job = TorchrunJob(directory, "torchrun_checkpoint", seed, *checkpoints)
        return run_trial(job, "torchrun", seed, plan)


def measure_plain(steps: int, seed: int, workdir: Path) -> float:
    """Median step time in seconds of plain DDP without a fault: what the others' step times start from."""
    with trial_directory(workdir) as directory:
        job = TorchrunJob(directory, "plain_ddp", seed, "--steps", str(steps), restarts=0)
        try:
            job.start()
            end = time.monotonic() + START_DEADLINE_S + steps
            while job.exited() is None and time.monotonic() < end:
                time.sleep(POLL_S)
        finally:
            job.stop()
        if job.exited() != 0:
            raise JobFailed(f"plain DDP ended with status {job.exited()}")
        reader = EventReader(job.log_dir)
        reader.poll()
        attempts = attempts_of(reader.events)
        return statistics.median(median_step_s(attempts, rank) for rank in range(WORLD_SIZE))


# ---------------------------------------------------------------- torchft


class TorchftJob:
    """Four replica groups of one process each, a lighthouse, and this process to start dead groups again.

    The supervisor notices a death within milliseconds and starts the replacement at once, sooner than the
    torchrun agents or the scheduler that torchft's documentation uses for it.
    """

    MAX_RESTARTS = 8

    def __init__(self, directory: Path, mode: TorchftMode, seed: int) -> None:
        self.log_dir = directory / "events"
        self._directory = directory
        self._mode = mode
        self._seed = seed
        self._port = _free_port()
        self._lighthouse: subprocess.Popen[bytes] | None = None
        self._groups: dict[int, subprocess.Popen[bytes]] = {}
        self._restarts = 0

    def start(self) -> None:
        self._lighthouse = launch(self._lighthouse_command(), self._directory / "lighthouse.txt")
        for group in range(WORLD_SIZE):
            self._start_group(group)

    def supervise(self) -> None:
        if self._lighthouse is None or self._lighthouse.poll() is not None:
            raise JobFailed(f"the lighthouse ended:\n{tail(self._directory / 'lighthouse.txt')}")
        for group, process in self._groups.items():
            if process.poll() is not None:
                self._replace(group)

    def stop(self) -> None:
        lighthouse = [self._lighthouse] if self._lighthouse else []
        end_processes([*self._groups.values(), *lighthouse], self.log_dir)

    def _replace(self, group: int) -> None:
        if self._restarts == self.MAX_RESTARTS:
            raise JobFailed(f"group {group} ended once too often:\n{tail(self._output(group))}")
        self._restarts += 1
        self._start_group(group)

    def _start_group(self, group: int) -> None:
        command = [
            *(sys.executable, "-m", "benchmarks.recovery.torchft_ddp"),
            *("--group", str(group), "--groups", str(WORLD_SIZE), "--mode", self._mode),
            *("--lighthouse", f"http://127.0.0.1:{self._port}"),
            *("--log-dir", str(self.log_dir), "--seed", str(self._seed)),
        ]
        self._groups[group] = launch(command, self._output(group))

    def _output(self, group: int) -> Path:
        return self._directory / f"group{group}.txt"

    def _lighthouse_command(self) -> list[str]:
        """The command line of torchft's own documentation; its heartbeat timeout stays at 5 s."""
        return [
            str(Path(sysconfig.get_path("scripts")) / "torchft_lighthouse"),
            *("--bind", f"127.0.0.1:{self._port}"),
            *("--min_replicas", str(WORLD_SIZE if self._mode == "strict" else 1)),
            *("--quorum_tick_ms", "100", "--join_timeout_ms", "10000"),
        ]


def measure_torchft(mode: TorchftMode, trials: int, seed: int, workdir: Path) -> list[Trial]:
    """Kill one replica group of a torchft job, in its defaults or with all groups required."""
    return [_reported(torchft_trial(mode, trial, seed, workdir)) for trial in range(trials)]


def torchft_trial(mode: TorchftMode, trial: int, seed: int, workdir: Path) -> Trial:
    """One of them."""
    system = "torchft" if mode == "default" else f"torchft-{mode}"
    plan = plan_fault(system, seed, trial, TORCHFT_FAULT_STEPS)
    with trial_directory(workdir) as directory:
        return run_trial(TorchftJob(directory, mode, seed), system, seed, plan)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# ---------------------------------------------------------------- results


_FIGURES = {
    "computing_again_s": "every rank computes again",
    "replacement_contributes_s": "replacement contributes",
    "next_new_step_s": "next new step completed",
    "steps_again": "steps again",
    "steps_undone": "steps undone",
    "batches_skipped": "batches skipped",
    "ranks_restarted": "ranks restarted",
    "step_s": "undisturbed step",
}


def table(trials: Sequence[Trial]) -> str:
    """One row per system, in Markdown: medians, and the least and the greatest in brackets."""
    rows = [["system", "recovered", *_FIGURES.values()]]
    for system in dict.fromkeys(trial.system for trial in trials):
        own = [trial for trial in trials if trial.system == system]
        recovered = sum(trial.raw is not None for trial in own)
        rows.append([system, f"{recovered} of {len(own)}", *(_cell(own, name) for name in _FIGURES)])
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(trials: Sequence[Trial], name: str) -> str:
    values = [value for trial in trials if (value := getattr(trial, name)) is not None]
    if not values:
        return "never"
    middle, least, most = (f"{value:.4g}" for value in (statistics.median(values), min(values), max(values)))
    unit = " s" if name.endswith("_s") else ""
    return f"{middle}{unit}" if least == most else f"{middle}{unit} [{least}, {most}]"


def conditions() -> dict[str, object]:
    """Under which the figures hold: a figure without them says nothing."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        },
        "versions": {
            "python": platform.python_version(),
            "kernel": platform.release().partition("-")[0],
            **{name: _version(name) for name in ("torch", "torchft", "relight")},
        },
    }


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
        return next(names, platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        own = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
        return str(own["version"]) if package == own["name"] else None


def write_results(path: Path, trials: Sequence[Trial], **more: object) -> None:
    """Write all trials, raw times included, with the conditions they were measured under."""
    path.parent.mkdir(parents=True, exist_ok=True)
    results = {
        **conditions(),
        "world_size": WORLD_SIZE,
        **more,
        "trials": [dataclasses.asdict(trial) for trial in trials],
    }
    path.write_text(json.dumps(results, indent=2) + "\n")


def describe(trial: Trial) -> str:
    """One line: who was killed where, and how the trial went."""
    fault = trial.fault
    where = f"rank {fault.rank}, step {fault.step}, {fault.phase}, {fault.fraction:.2f} of a step"
    outcome = trial.failure or f"new step after {trial.next_new_step_s} s"
    return f"{trial.system}: killed {where}: {outcome}"


def _reported(trial: Trial) -> Trial:
    """Say at once how a trial went: a run takes minutes."""
    print(describe(trial), flush=True)
    return trial


# ---------------------------------------------------------------- command line


def main() -> None:
    parser = argparse.ArgumentParser(description="How other systems recover from the kill of one process")
    parser.add_argument("--system", choices=("plain", "torchrun", "torchft", "torchft-strict"), required=True)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the faults, the parameters and the data")
    parser.add_argument("--workdir", type=Path, default=Path(tempfile.gettempdir()) / "recovery-benchmark")
    parser.add_argument("--output", type=Path, help="JSON file; default: results/SYSTEM.json here")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_on_signal)
    output = options.output or Path(__file__).parent / "results" / f"{options.system}.json"
    if options.system == "plain":
        step_s = measure_plain(30, options.seed, options.workdir)
        print(f"plain DDP: median step {step_s:.3f} s")
        write_results(output, [], plain_step_s=round(step_s, 3))
        return
    measure: dict[str, Callable[[int, int, Path], list[Trial]]] = {
        "torchrun": measure_torchrun,
        "torchft": lambda *run: measure_torchft("default", *run),
        "torchft-strict": lambda *run: measure_torchft("strict", *run),
    }
    trials = measure[options.system](options.trials, options.seed, options.workdir)
    print(table(trials))
    write_results(output, trials)


def end_on_signal(number: int, _frame: object) -> NoReturn:
    """End through the `finally` clauses, which end the processes of the trial; a second signal must not cut them short.

    They have deadlines of their own.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, lambda *_: None)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
