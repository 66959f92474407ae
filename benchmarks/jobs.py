"""The jobs that the benchmarks measure: a script of this folder under `relight run`, or plainly under torchrun.

What relight says about itself is read from its run directory: `report.json`, and `journal.jsonl` with every fact
and every order in it. The journal's times are moved to the machine's monotonic clock, on which workers and this
process measure too.
"""

from __future__ import annotations

import datetime
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.recovery.peers import POLL_S, JobFailed, end_processes, launch, tail
from relight.core.account.report import JobReport, decode_report

START_DEADLINE_S = 180.0
GRACE_S = 15.0  # for a job that was asked to end

# Processes of the control plane are found by the module they run.
CONTROL_PLANE = {"launcher": "relight.cli", "controller": "relight.server", "agent": "relight.agent"}


class _Process:
    """Anything that is launched from a command line, and must be gone in the end."""

    def __init__(self, directory: Path, name: str, command: list[str], **variables: str) -> None:
        self.log_dir = directory / "events"
        self.output = directory / f"{name}.txt"
        self._name = name
        self._command = command
        self._variables = variables
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start all processes; return at once."""
        self._process = launch(self._command, self.output, **self._variables)

    @property
    def pid(self) -> int:
        """The pid of the launcher."""
        assert self._process is not None
        return self._process.pid

    def exited(self) -> int | None:
        """Its exit status, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def supervise(self) -> None:
        """Raise `JobFailed` if the job has ended: a job under test trains until it is stopped."""
        if self.exited() is not None:
            raise JobFailed(f"{self._name} ended with status {self.exited()}:\n{tail(self.output)}")

    def await_end(self, deadline_s: float) -> None:
        """Wait for a job that ends by itself. Raises JobFailed if it does not, or if it fails."""
        wait_until(lambda: self.exited() is not None, deadline_s, f"the end of {self._name}")
        if self.exited() != 0:
            raise JobFailed(f"{self._name} ended with status {self.exited()}:\n{tail(self.output)}")

    def stop(self) -> None:
        """End every process of the job, whatever state it is in."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                pass  # whatever keeps it: it ends now
        end_processes([self._process], self.log_dir)


class RelightJob(_Process):
    """`relight run` of a module. `stop` lets it write its report."""

    def __init__(
        self,
        directory: Path,
        module: str,
        *arguments: str,
        world_size: int,
        standbys: int = 1,
        flags: tuple[str, ...] = (),
    ) -> None:
        self.run_dir = directory / "run"
        command = [
            *(sys.executable, "-m", "relight.cli", "run", "--nproc-per-node", str(world_size)),
            *("--standby", str(standbys), "--run-dir", str(self.run_dir), "--oversubscribe", "--quiet"),
            *flags,
            *("-m", module, *arguments),
        ]
        super().__init__(directory, "relight", command)

    def report(self) -> JobReport:
        """The report of the finished or stopped job. Raises JobFailed if it wrote none."""
        try:
            return decode_report((self.run_dir / "report.json").read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise JobFailed(f"relight left no report ({error}):\n{tail(self.output)}") from error


class PlainJob(_Process):
    """A module under torchrun, without any fault tolerance."""

    def __init__(self, directory: Path, module: str, *arguments: str, world_size: int) -> None:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(world_size), "--max-restarts", "0"),
            *("-m", module, *arguments),
        ]
        super().__init__(directory, "torchrun", command)


def wait_until(ready: Callable[[], bool], deadline_s: float, what: str, job: _Process | None = None) -> None:
    """Look again and again. Raises JobFailed past the deadline, or if the job ends meanwhile."""
    end = time.monotonic() + deadline_s
    while not ready():
        if job is not None:
            job.supervise()
        if time.monotonic() > end:
            raise JobFailed(f"waited {deadline_s:.0f} s for {what}")
        time.sleep(POLL_S)


# ---------------------------------------------------------------- relight's journal


@dataclass(frozen=True)
class Entry:
    """One line of the journal: a fact that arrived at the controller, or an order that left it."""

    t_ns: int  # of the machine's monotonic clock
    kind: str  # such as "Stopped" or "Restore"
    fields: dict[str, Any]


class Journal:
    """Reads the journal of a run that may still be going on."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "journal.jsonl"
        self._read_bytes = 0
        self._started_ns: int | None = None  # the journal's zero, on the monotonic clock
        self.entries: list[Entry] = []

    def poll(self) -> None:
        """Read what was appended."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read_bytes += len(whole) + len(end)
        for line in whole.splitlines():
            self.entries.extend(self._entry(json.loads(line)))

    def _entry(self, line: dict[str, Any]) -> Iterator[Entry]:
        found = line.get("event") or line.get("command")
        if found is None:
            return
        if self._started_ns is None:
            self._started_ns = _monotonic_start_ns(line)
        t_ns = self._started_ns + round(line["now"] * 1e9)
        yield Entry(t_ns, found["type"], {name: value for name, value in found.items() if name != "type"})

    def of(self, kind: str, **fields: object) -> list[Entry]:
        """All lines of a kind that have these values."""
        return [
            entry
            for entry in self.entries
            if entry.kind == kind and all(entry.fields.get(name) == value for name, value in fields.items())
        ]

    def ready_standbys(self) -> int:
        """Standbys that are warm and wait now."""
        ready = {entry.fields["process"] for entry in self.of("StandbyReady")}
        gone = {entry.fields["process"] for kind in ("Assign", "ProcessExited") for entry in self.of(kind)}
        return len(ready - gone)

    def members(self) -> dict[int, int]:
        """Process id by rank, as the newest assignments have it."""
        pids = {entry.fields["process"]: entry.fields["pid"] for entry in self.of("ProcessStarted")}
        return {entry.fields["rank"]: pids[entry.fields["process"]] for entry in self.of("Assign")}


def _monotonic_start_ns(line: dict[str, Any]) -> int:
    """The journal counts seconds from the controller's start; its lines also have the wall clock."""
    wall_ns = datetime.datetime.fromisoformat(line["wall"]).timestamp() * 1e9
    to_monotonic_ns = time.monotonic_ns() - time.time_ns()
    return round(wall_ns + to_monotonic_ns - float(line["now"]) * 1e9)
