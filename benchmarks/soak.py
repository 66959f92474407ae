"""A thousand faults of all kinds in one job of real processes, one after the other, by a seed.

A nemesis lets the job go on from window to window of steps, and makes one fault in each: planned ones, which workers
carry out themselves at an exact place (`relight chaos`), and signals from outside at random moments, to workers,
standbys, the agent and the controller. Some recoveries get a fault of their own. The next window is opened once every
rank is at the end of its window and, mostly, a standby is warm.

What is judged in the end: the job took all its steps; no rank committed a step twice (none was undone); the loss of
every step and all state at the end have the bits of an undisturbed job; `relight check` finds nothing wrong in
the journal; no process, no shared memory and no private directory is left; controller and agent take no more memory
than at the start.

Run by ``python -m benchmarks.soak``. Ctrl-C ends everything that it has started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.documents import (
    RESULTS,
    Document,
    Verdict,
    add_verdicts,
    command,
    start_document,
    verdict_rows,
    write_document,
)
from benchmarks.figures import markdown_table, mebibytes, milliseconds, percentile
from benchmarks.jobs import START_DEADLINE_S, RelightJob
from benchmarks.recovery.peers import JobFailed, tail
from benchmarks.soak_faults import WINDOW_STEPS, Item, draw_items, draw_recovery_faults, name_of
from benchmarks.soak_job import SharedBarrier
from relight.chaos.plan import describe_fault
from relight.core.account.report import JobReport
from relight.core.protocol.fault import Fault
from relight.server.records.journal import read_journal
from relight.sim.judge.journal import check_journal

FAULTS = 1000
RANKS = 4
STANDBYS = 8  # a new process takes seconds to be warm, and faults shall not wait for it
SEED = 1
MARK = "RELIGHT_SOAK"
WINDOW_DEADLINE_S = 240.0  # for every rank to be at the end of its window, whatever happened in it
STANDBY_DEADLINE_S = 15.0
FAULTS_IN_WINDOW = 1.24  # on average: some windows have two, and some recoveries one of their own
SAMPLE_S = 2.0
POLL_S = 0.004
GONE_S = 5.0  # for the last process to be out of the process table
SHARED_MEMORY = Path("/dev/shm")
# `relight run` takes three deaths of the agent within a minute for a defect, and ten of the controller.
AGENT_APART_S = 31.0
CONTROLLER_APART_S = 7.0
WITHIN_S = 10.0  # memory may be anything in the first seconds of a process
FLAGS = (
    *("--hang-timeout-seconds", "4", "--outside-hang-timeout-seconds", "90", "--stop-timeout-seconds", "10"),
    *("--restore-timeout-seconds", "10", "--max-failures-per-step", "50"),
)
_SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGABRT": signal.SIGABRT}


class Follower:
    """The journal so far: which process has which rank, and how far the newest recovery is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self.began = False
        self.generation = 1
        self.stops = 0
        self.said_again = 0  # that a process has started: by an agent that adopted it
        self.controllers = 0  # restarts
        self.pids: dict[str, int] = {}
        self.ranks: dict[int, str] = {}
        self.warm: dict[str, None] = {}
        self.struck: list[Fault] = []

    def poll(self) -> None:
        """Read what was appended."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                whole, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return
        self._read_bytes += len(whole) + len(end)
        for text in whole.splitlines():
            line = json.loads(text)
            found = line.get("event") or line.get("command")
            if found is not None:
                self._take(found)

    def _take(self, found: dict[str, Any]) -> None:
        match found["type"]:
            case "ProcessStarted":
                self.said_again += found["process"] in self.pids
                self.pids[found["process"]] = found["pid"]
            case "StandbyReady":
                self.warm[found["process"]] = None
            case "ProcessExited" | "ProcessSuspected" | "Kill":
                self.warm.pop(found["process"], None)
            case "Assign":
                self.warm.pop(found["process"], None)
                self.ranks[found["rank"]] = found["process"]
            case "FaultStruck":
                self.struck.append(msgspec.convert(found["fault"], Fault))
            case "Stop":
                self.stops += 1
                self.generation = found["generation"]
            case "ControllerRestarted":
                self.controllers += 1
            case "Begin":
                self.began = True


class Nemesis:
    """Goes through the windows of one job."""

    def __init__(self, directory: Path, items: list[Item], later: list[Fault], seed: int) -> None:
        self._items = items
        self._steps = len(items) * WINDOW_STEPS + WINDOW_STEPS
        self._draw = random.Random(f"nemesis {seed}")
        self._shared_barrier = SharedBarrier(directory / "board", RANKS, self._steps)
        planned = [item.planned for item in items if item.planned is not None]
        sentences = [describe_fault(fault) for fault in (*planned, *later)]
        self.directory = directory
        self.job = make_job(directory, self._steps, STANDBYS, sentences)
        self.follower = Follower(self.job.run_dir / "journal.jsonl")
        self.acts: Counter[str] = Counter()  # signals sent
        self.memory: list[dict[str, Any]] = []
        self.absences_s: list[float] = []  # without a controller
        self.started = time.monotonic()
        self._last = {"agent": 0.0, "controller": 0.0}
        self._sampled = 0.0
        self._window = 0

    @property
    def faults(self) -> int:
        """The number of faults of all kinds, so far."""
        return sum(self.acts.values()) + len(self.follower.struck)

    def run(self) -> None:
        """To the end of the job. Raises JobFailed if it does not get there."""
        self._shared_barrier.allow(WINDOW_STEPS)
        self.job.start()
        self._await(lambda: self._all_at(WINDOW_STEPS), START_DEADLINE_S, "the first window")
        for number in range(1, len(self._items)):
            self._window = number
            self._choose(number)
            item = self._items[number]
            if item.wait_for_standby:
                self._await_standbys(2 if len(item.ranks) > 1 else 1)
            goal = (number + 1) * WINDOW_STEPS
            self._shared_barrier.allow(goal)
            if item.planned is None:
                self._act(item)
            self._await(partial(self._all_at, goal), WINDOW_DEADLINE_S, f"the end of window {number}: {item}")
            self._tell(number)
        self._shared_barrier.allow(self._steps)
        self.job.await_end(WINDOW_DEADLINE_S)
        self.follower.poll()

    # --- waiting --------------------------------------------------------------------------------------------------
    def _all_at(self, step: int) -> bool:
        return all(arrived >= step for arrived in self._shared_barrier.arrived())

    def _look(self) -> None:
        self.follower.poll()
        self.job.supervise()
        if time.monotonic() - self._sampled > SAMPLE_S:
            self._sampled = time.monotonic()
            self._sample()

    def _await(self, ready: Callable[[], bool], deadline_s: float, what: str) -> None:
        end = time.monotonic() + deadline_s
        while not ready():
            self._look()
            if time.monotonic() > end:
                raise JobFailed(f"waited {deadline_s:.0f} s for {what}\n{tail(self.job.output)}")
            time.sleep(POLL_S)

    def _await_standbys(self, count: int) -> None:
        end = time.monotonic() + STANDBY_DEADLINE_S
        while time.monotonic() < end:
            self._look()
            if len(self.follower.warm) >= count:
                return
            time.sleep(POLL_S)

    # --- acts -----------------------------------------------------------------------------------------------------
    def _choose(self, number: int) -> None:
        """An act that must not come yet changes places with the next one that may."""
        if self._allowed(self._items[number]):
            return
        for other in range(number + 1, len(self._items)):
            item = self._items[other]
            if item.planned is None and self._allowed(item):
                self._items[number], self._items[other] = item, self._items[number]
                return
        while not self._allowed(self._items[number]):
            self._look()
            time.sleep(POLL_S)

    def _allowed(self, item: Item) -> bool:
        now = time.monotonic()
        if "agent" in item.what and now - self._last["agent"] < AGENT_APART_S:
            return False
        return "controller" not in item.what or now - self._last["controller"] >= CONTROLLER_APART_S

    def _act(self, item: Item) -> None:
        number = _SIGNALS[item.what.split()[0]]
        time.sleep(item.delay_s if "recovery" not in item.what else 0.0)
        if "standby" in item.what:
            self._strike_standby(item.what, number)
            return
        if "worker" in item.what:
            self._strike_ranks(item.what, item.ranks, number)
            return
        if "recovery" in item.what:
            stops = self.follower.stops
            self._strike_ranks("SIGKILL of a worker", item.ranks, signal.SIGKILL)
            self._await(lambda: self.follower.stops > stops, WINDOW_DEADLINE_S, "the order to stop")
            time.sleep(item.delay_s)
        if "agent" in item.what:
            self._strike_agent(item.what, number)
        if "controller" in item.what:
            self._strike_controller(item.what, number)

    def _strike_ranks(self, what: str, ranks: Iterable[int], number: signal.Signals) -> None:
        for rank in ranks:
            if _send(self.follower.pids.get(self.follower.ranks[rank], 0), number):
                self.acts[what] += 1

    def _strike_standby(self, what: str, number: signal.Signals) -> None:
        for name in list(self.follower.warm)[:1]:
            self.acts[what] += _send(self.follower.pids[name], number)
            self._await(partial(self._is_gone, name), WINDOW_DEADLINE_S, "the standby's end")

    def _is_gone(self, standby: str) -> bool:
        return standby not in self.follower.warm

    def _strike_agent(self, what: str, number: signal.Signals) -> None:
        self._last["agent"] = time.monotonic()
        agent = self._module("relight.agent")
        said_again = self.follower.said_again
        if agent is None or not _send(agent.pid, number):
            return
        self.acts[what] += 1
        if "controller" not in what:
            self._await(lambda: self.follower.said_again > said_again, WINDOW_DEADLINE_S, "another agent")

    def _strike_controller(self, what: str, number: signal.Signals) -> None:
        self._last["controller"] = time.monotonic()
        controller = self._module("relight.server")
        restarts = self.follower.controllers
        if controller is None or not _send(controller.pid, number):
            return
        struck = time.monotonic()
        self.acts[what] += 1
        self._await(lambda: self.follower.controllers > restarts, WINDOW_DEADLINE_S, "another controller")
        self.absences_s.append(time.monotonic() - struck)

    def _module(self, name: str) -> psutil.Process | None:
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.job.pid).children():
                with contextlib.suppress(psutil.Error):
                    if process.cmdline()[1:4] == ["-P", "-m", name] and process.status() != psutil.STATUS_ZOMBIE:
                        return process
        return None

    # --- what is seen ---------------------------------------------------------------------------------------------
    def _sample(self) -> None:
        found: dict[str, Any] = {"window": self._window, "s": round(time.monotonic() - self.started, 1)}
        for role, module in (("controller", "relight.server"), ("agent", "relight.agent")):
            process = self._module(module)
            with contextlib.suppress(psutil.Error):
                if process is not None and time.time() - process.create_time() > WITHIN_S / 5:
                    found[role] = process.memory_info().rss
                    found[f"{role}_files"] = process.num_fds()
                    found[f"{role}_threads"] = process.num_threads()
        with contextlib.suppress(psutil.Error):
            found["launcher"] = psutil.Process(self.job.pid).memory_info().rss
        self.memory.append(found)

    def _tell(self, number: int) -> None:
        if number % 10 and number + 1 < len(self._items):
            return
        spent = time.monotonic() - self.started
        left = spent / number * (len(self._items) - number)
        print(
            f"  window {number} of {len(self._items)}: {self.faults} faults, {self.follower.generation - 1} "
            f"recoveries begun; {spent / 60:.1f} min, about {left / 60:.1f} min left",
            flush=True,
        )

    def shared_barrier(self) -> SharedBarrier:
        """The witness."""
        return self._shared_barrier

    @property
    def steps(self) -> int:
        """That the job has to take."""
        return self._steps


def make_job(directory: Path, steps: int, standbys: int, sentences: Iterable[str]) -> RelightJob:
    """The job of the soak; `board` in its directory is made before."""
    flags = (*FLAGS, *(word for sentence in sentences for word in ("--chaos", sentence)))
    arguments = ("benchmarks.soak_job", "--steps", str(steps), "--board", str(directory / "board"))
    return RelightJob(directory, *arguments, world_size=RANKS, standbys=standbys, flags=flags)


def _send(pid: int, number: signal.Signals) -> int:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return 0
    return 1


def run_undisturbed(directory: Path, steps: int) -> SharedBarrier:
    """Run the training without any fault. Raises JobFailed."""
    directory.mkdir()
    shared_barrier = SharedBarrier(directory / "board", RANKS, steps)
    shared_barrier.allow(steps)
    job = make_job(directory, steps, 0, ())
    try:
        job.start()
        job.await_end(300.0 + steps * 0.2)
    finally:
        job.stop()
    return shared_barrier


def left_behind(mark: str, before: set[str], temporary: Path) -> dict[str, list[str]]:
    """Processes of the job, files in shared memory, private directories: once they had time to go."""
    end = time.monotonic() + GONE_S
    while True:
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == mark and process.pid != os.getpid():
                    processes.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        shared = sorted(set(os.listdir(SHARED_MEMORY)) - before) if SHARED_MEMORY.is_dir() else []
        private = [path.name for path in temporary.glob("relight-*")]
        if not (processes or shared or private) or time.monotonic() > end:
            return {"processes": processes, "shared_memory": shared, "private_directories": private}
        time.sleep(0.1)


# ---------------------------------------------------------------- judgement


def compare(shared_barrier: SharedBarrier, reference: SharedBarrier, steps: int) -> dict[str, Any]:
    """Findings of the witness: steps committed by no rank or twice, and losses and states with other bits."""
    twice = never = other = 0
    commits = [shared_barrier.commits(rank) for rank in range(RANKS)]
    for step in range(steps):
        counts = [ranks[step] for ranks in commits]
        twice += sum(count > 1 for count in counts)
        never += not any(counts)
    for rank in range(RANKS):
        mine, theirs = shared_barrier.losses(rank), reference.losses(rank)
        other += sum(
            commits[rank][step] > 0 and mine[8 * step : 8 * step + 8] != theirs[8 * step : 8 * step + 8]
            for step in range(steps)
        )
    return {
        "committed_twice": twice,
        "committed_by_nobody": never,
        "losses_with_other_bits": other,
        "states_with_other_bits": sum(
            mine != theirs for mine, theirs in zip(shared_barrier.digests(), reference.digests(), strict=True)
        ),
        "losses_compared": sum(count > 0 for ranks in commits for count in ranks),
    }


def recoveries_of(report: JobReport) -> dict[str, Any]:
    """Recovery times: of all, and of those that had a warm standby and one fault alone that struck at once."""
    groups: dict[str, list[float]] = {"all": []}
    kinds = {failure.number: failure.kind for failure in report.failures}
    for recovery in report.recoveries:
        total = recovery.stages.total_seconds
        groups["all"].append(total)
        first = kinds[recovery.failures[0]]
        if recovery.restarts or len(recovery.failures) > 1:
            name = "with a fault of its own, or of controller or agent"
        elif recovery.stages.replace_seconds > 0.5 or "fresh" in recovery.replacement_kind:
            name = "no standby was warm: a process had to be started"
        elif first in ("hang", "frozen", "communication"):
            name = f"one {first} (its time-out included)"
        else:
            name = "one death, a warm standby"
        groups.setdefault(name, []).append(total)
    return {
        name: {
            "samples": len(values),
            "median": statistics.median(values),
            "p99": percentile(values, 0.99),
            "max": max(values),
        }
        for name, values in sorted(groups.items(), key=lambda group: -len(group[1]))
        if values
    }


def memory_of(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the second and the last tenth: in the first one, allocators settle and standbys start."""
    tenth = max(1, len(samples) // 10)
    found = {}
    for name in ("controller", "agent", "launcher", "controller_files", "agent_files", "agent_threads"):
        first = [sample[name] for sample in samples[tenth : 2 * tenth] if name in sample]
        last = [sample[name] for sample in samples[-tenth:] if name in sample]
        every = [sample[name] for sample in samples if name in sample]
        if first and last:
            found[name] = {"first": statistics.median(first), "last": statistics.median(last), "max": max(every)}
    return found


def run(faults: int, seed: int, workdir: Path) -> Document:
    """One soak, and the same training undisturbed."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    shared_before = set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()
    document = start_document("soak", faults=faults, ranks=RANKS, standbys=STANDBYS, seed=seed, flags=list(FLAGS))
    items = draw_items(seed, 1 + round(faults / FAULTS_IN_WINDOW), RANKS)
    later = draw_recovery_faults(seed, faults, RANKS)
    directory = workdir / "disturbed"
    directory.mkdir()
    nemesis = Nemesis(directory, items, later, seed)
    ended = ""
    try:
        nemesis.run()
    except JobFailed as error:
        ended = str(error)
        print(f"LOST: {ended}", flush=True)
    finally:
        nemesis.job.stop()
    document["left_behind"] = left_behind(mark, shared_before, directory)
    document["seconds"] = round(time.monotonic() - nemesis.started, 1)
    document["ended"] = ended
    report = nemesis.job.report()
    kinds = Counter(name_of(fault) for fault in nemesis.follower.struck) + nemesis.acts
    document["by_kind"] = dict(sorted(kinds.items()))
    document["faults"] = sum(kinds.values())
    document["failures"] = dict(Counter(failure.kind for failure in report.failures))
    document["steps"], document["until"] = report.steps, nemesis.steps
    document["steps_repeated"] = report.steps_repeated
    document["controller_restarts"] = report.controller_restarts
    document["generations"] = nemesis.follower.generation
    document["moved_bytes"] = report.moved_bytes
    document["recoveries"] = recoveries_of(report)
    document["absences_s"] = [round(value, 3) for value in nemesis.absences_s]
    document["memory"] = memory_of(nemesis.memory)
    document["memory_samples"] = nemesis.memory
    journal = nemesis.job.run_dir / "journal.jsonl"
    document["journal_bytes"] = journal.stat().st_size
    document["violations"] = list(check_journal(read_journal(journal)[1], RANKS, ended=not ended))
    reference = run_undisturbed(workdir / "undisturbed", nemesis.steps)
    document["witness"] = compare(nemesis.shared_barrier(), reference, report.steps if ended else nemesis.steps)
    _judge(document)
    return document


def _judge(document: Document) -> None:
    witness, left = document["witness"], document["left_behind"]
    lost = witness["committed_twice"] + witness["committed_by_nobody"] + (document["until"] - document["steps"])
    diverged = witness["losses_with_other_bits"] + witness["states_with_other_bits"]
    document["headline"] = (
        f"{document['faults']} faults of {len(document['by_kind'])} kinds in one job of {document['steps']} steps and "
        f"{document['seconds'] / 60:.0f} minutes: {lost} steps lost, {diverged} losses or states with other bits."
    )
    growth = {
        role: max(0.0, (figures["last"] - figures["first"]) / 2**20)
        for role, figures in document["memory"].items()
        if role in ("controller", "agent", "launcher")
    }
    add_verdicts(
        document,
        [
            Verdict("1,000 over the faults in one soak", 1000 / max(1, document["faults"]), 1, "ratio"),
            Verdict("jobs lost in the soak", float(bool(document["ended"])), 0, ""),
            Verdict("steps lost in the soak", float(lost), 0, "", f"of {document['until']}"),
            Verdict(
                "losses and states with other bits", float(diverged), 0, "", f"of {witness['losses_compared']} losses"
            ),
            Verdict("broken invariants in its journal", float(len(document["violations"])), 0, ""),
            Verdict("processes, shared memory and directories left", float(sum(map(len, left.values()))), 0, ""),
            *(
                Verdict(f"memory of the {role} at the end over the start", value, 4.0, "MiB")
                for role, value in growth.items()
            ),
        ],
    )


def render(document: Document) -> str:
    """Markdown."""
    settings = document["settings"]
    times = [
        [name, str(figures["samples"]), *(milliseconds(figures[key]) for key in ("median", "p99", "max"))]
        for name, figures in document["recoveries"].items()
    ]
    absences = document["absences_s"]
    if absences:
        times.append(
            [
                "the controller's absence (to its successor's first line)",
                str(len(absences)),
                *(
                    milliseconds(value)
                    for value in (statistics.median(absences), percentile(absences, 0.99), max(absences))
                ),
            ]
        )
    memory = [
        [name.replace("_", ": "), *(_amount(name, figures[key]) for key in ("first", "last", "max"))]
        for name, figures in document["memory"].items()
    ]
    failures = ", ".join(
        f"{count} {kind}" for kind, count in sorted(document["failures"].items(), key=lambda one: -one[1])
    )
    parts = [
        f"One job, {settings['ranks']} ranks and {settings['standbys']} standbys on this machine, seed "
        f"{settings['seed']}, {document['steps']} of {document['until']} steps in {document['seconds'] / 60:.0f} "
        f"minutes; flags `{' '.join(settings['flags'])}`. It is one job from beginning to end: nothing in it was ever "
        "started again but by relight.",
        document["headline"],
        f"relight counted these failures: {failures}. {document['controller_restarts']} times the controller was "
        f"replaced. {document['steps_repeated']} steps in flight were repeated, {document['generations']} generations, "
        f"{document['moved_bytes'] / 2**20:.0f} MiB of state copied, {document['journal_bytes'] / 2**20:.1f} MiB of "
        "journal.",
        markdown_table(["recoveries", "", "median", "p99", "greatest"], times),
        markdown_table(["", "second tenth", "last tenth", "greatest"], memory),
        markdown_table(["fault", "struck"], [[kind, str(count)] for kind, count in document["by_kind"].items()]),
        markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)),
    ]
    parts += document.get("notes", [])
    parts += [f"Lost: {document['ended']}"] if document["ended"] else []
    parts += [f"Wrong: {sentence}" for sentence in document["violations"]]
    return "\n\n".join(parts)


def _amount(name: str, value: float) -> str:
    return mebibytes(value) if name in ("controller", "agent", "launcher") else f"{value:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="A thousand faults in one job of real processes")
    parser.add_argument("--faults", type=int, default=FAULTS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--keep", type=Path, help="leave the run directories here, a new folder")
    parser.add_argument("--output", type=Path, default=RESULTS / "soak.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as folder:
        if options.keep:
            options.keep.mkdir(parents=True)
        document = run(options.faults, options.seed, options.keep or Path(folder))
    write_document(document, render, options.output)


if __name__ == "__main__":
    command(main)
