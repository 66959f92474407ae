"""Breaks a training run in every way it can be broken, then shows that nothing of it is left in the result.

    make demo

A small GPT is trained twice by four processes: once while a plan kills, freezes and crashes them in every part of a
step, and even during recoveries; and once in peace. Both runs must end with the same bits in every parameter and every
number of the optimizer. The exit status is 0 only if they do, and if everything that was planned really struck.
"""

import argparse
import datetime
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from relight.chaos.plan import describe_fault
from relight.core.account.report import FailureReport, JobReport, decode_report
from relight.core.protocol.fault import Action, Fault, Point
from relight.timeline.draw.terminal import duration

SCRIPT = Path(os.path.relpath(Path(__file__).resolve().parent / "gpt" / "train.py"))
WORKERS = 4
STANDBYS = 2
FIRST_FAULT_STEP = 8
STEPS_BETWEEN_FAULTS = 12  # time for a new standby to start, so that most recoveries find one waiting
EVALUATIONS = 4
# A terminal's Ctrl-C reaches relight too, so it is given time to end by itself before it is asked, then made to.
PATIENCE_SECONDS = (3.0, 30.0)

ACTIONS = {
    Action.KILL: "killed (SIGKILL)",
    Action.FREEZE: "frozen (SIGSTOP)",
    Action.SEGFAULT: "crashed (SIGSEGV)",
    Action.RAISE: "raises",
    Action.EXIT: "exits too early",
}
POINTS = {
    Point.FORWARD: "forward",
    Point.BACKWARD: "backward",
    Point.BARRIER: "barrier",
    Point.OPTIMIZER: "optimizer",
    Point.BETWEEN_STEPS: "between steps",
}
# How the report names what was planned: the kind of failure with a part of its evidence, and the phase.
KINDS = {
    Action.KILL: ("killed", "SIGKILL"),
    Action.FREEZE: ("frozen", "process state T"),
    Action.SEGFAULT: ("killed", "SIGSEGV"),
    Action.RAISE: ("exception", "planned fault"),
    Action.EXIT: ("exited", "code 0"),
}
PHASES = {
    Point.FORWARD: "FORWARD",
    Point.BACKWARD: "BACKWARD",
    Point.BARRIER: "BARRIER",
    Point.OPTIMIZER: "OPTIMIZER",
    Point.BETWEEN_STEPS: "OUTSIDE",
}

console = Console(highlight=False)


def main() -> int:
    """Train twice, compare; returns the exit status."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    plan = make_plan()
    steps = FIRST_FAULT_STEP + STEPS_BETWEEN_FAULTS * len(ACTIONS) * len(POINTS)
    runs = Path("runs") / f"demo-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    try:
        say("1. Training, disturbed")
        console.print(f"{WORKERS} workers train a small GPT for {steps} steps; {STANDBYS} standbys wait.")
        console.print("The workers are lost in turn, in every way and in every part of a step:\n")
        console.print(draw_grid(plan, lambda fault: f"step {fault.step}"))
        console.print("\nAnd while relight is still recovering from one of these failures:")
        for fault in in_recoveries(plan):
            console.print(f"  {describe_fault(fault)}")
        disturbed = train(Path(f"{runs}-disturbed"), steps, plan)
        say("2. The same training, undisturbed")
        undisturbed = train(Path(f"{runs}-undisturbed"), steps, ())
    except KeyboardInterrupt:
        console.print("\nInterrupted; nothing was left running.")
        return 130
    except (OSError, msgspec.DecodeError, subprocess.SubprocessError) as error:
        console.print(f"\n[bold red]The demo could not be completed:[/] {error}")
        return 1
    say("3. The comparison")
    status = compare(plan, disturbed, undisturbed)
    say_more(Path(f"{runs}-disturbed"))
    return status


def say_more(run_dir: Path) -> None:
    """Name the files to look at now."""
    console.print("\nThe disturbed run, to look at:")
    for command, what in (
        ("explain", "in sentences: what failed, and where the time went"),
        ("timeline", "who did what when; --html FILE writes a page"),
        ("dashboard", "the page that a running job has"),
    ):
        console.print(f"  relight {command} {run_dir}  # {what}", markup=False, soft_wrap=True)
    console.print("`relight` lies in .venv/bin: source .venv/bin/activate", style="dim")


def say(heading: str) -> None:
    console.print()
    console.rule(f"[bold]{heading}[/]", align="left")
    console.print()


# --- the plan -----------------------------------------------------------------------------------------------------
def make_plan() -> tuple[Fault, ...]:
    """Every action at every point, one after the other, and in the first two of these recoveries one fault more.

    Recoveries are counted by the failures that they answer, so the third of the plan answers the second failure
    inside a step: the first one takes two.
    """
    actions, points = list(ACTIONS), list(POINTS)
    faults = [
        Fault(
            action=actions[index % len(actions)],
            point=points[(index + index // len(actions)) % len(points)],
            rank=index % WORKERS,
            step=FIRST_FAULT_STEP + STEPS_BETWEEN_FAULTS * index,
        )
        for index in range(len(actions) * len(points))
    ]
    faults.insert(1, Fault(action=Action.KILL, point=Point.PROMOTED, recovery=1))
    faults.insert(3, Fault(action=Action.KILL, point=Point.RESTORE_SEND, recovery=3))
    return tuple(faults)


def in_recoveries(plan: Sequence[Fault]) -> list[Fault]:
    """The faults that strike during the recovery from another."""
    return [fault for fault in plan if fault.recovery is not None]


def find_failure(fault: Fault, report: JobReport) -> FailureReport | None:
    """The failure by which `fault` shows in the report, or None if it did not strike."""
    kind, evidence = KINDS[fault.action]
    candidates = [f for f in report.failures if f.kind == kind and evidence in f.evidence]
    if fault.recovery is None:
        at = (fault.rank, fault.step, PHASES[fault.point])
        return next((f for f in candidates if (f.rank, f.step, f.phase) == at), None)
    for recovery in report.recoveries:
        if fault.recovery in recovery.failures:
            later = [f for f in candidates if f.number in recovery.failures and f.number > fault.recovery]
            return next(iter(later), None)
    return None


# --- the runs -----------------------------------------------------------------------------------------------------
def train(run_dir: Path, steps: int, plan: Sequence[Fault]) -> JobReport:
    """Run the example under `relight run`, its output in sight, and read the report. Raises what `subprocess` does."""
    run = ["run", "--nproc-per-node", str(WORKERS), "--standby", str(STANDBYS), "--run-dir", str(run_dir)]
    faults = [argument for fault in plan for argument in ("--chaos", describe_fault(fault))]
    script = [str(SCRIPT), "--steps", str(steps), "--evaluate-every", str(steps // EVALUATIONS)]
    shown = [*run, *faults[:2], *(["..."] if faults else []), *script]
    console.print(f"\n$ relight {shlex.join(shown)}\n", style="dim", markup=False, soft_wrap=True)
    process = subprocess.Popen([sys.executable, "-m", "relight.cli", *run, *faults, *script])
    try:
        status = process.wait()
    finally:
        end(process)
    if status:
        raise subprocess.CalledProcessError(status, "relight run")
    return decode_report((run_dir / "report.json").read_bytes())


def end(process: subprocess.Popen[bytes]) -> None:
    """See that relight, which ends its own workers, has ended: by itself, asked, or forced."""
    if process.poll() is not None:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for patience, ask in zip(PATIENCE_SECONDS, (process.terminate, process.kill), strict=True):
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            ask()
    process.wait()


# --- the comparison -----------------------------------------------------------------------------------------------
def compare(plan: Sequence[Fault], disturbed: JobReport, undisturbed: JobReport) -> int:
    """Say what the disturbed run went through, and whether it shows in the result; returns the exit status."""
    console.print("For so long training stood still after each failure, until all ranks went on:\n")
    console.print(draw_grid(plan, lambda fault: describe_outcome(fault, disturbed)))
    console.print("\nWith the failures that struck during the recovery from another:")
    for fault in in_recoveries(plan):
        console.print(f"  {describe_fault(fault)}: {describe_outcome(fault, disturbed)}")
    console.print()
    console.print(draw_comparison(disturbed, undisturbed))
    console.print()
    problems = find_problems(plan, disturbed, undisturbed)
    for problem in problems:
        console.print(f"[bold red]{problem}[/]")
    if not problems:
        console.print(
            f"[bold green]Equal.[/] All {len(plan)} failures struck; model and optimizer are bit for bit what they are "
            "without them."
        )
    return 1 if problems else 0


def find_problems(plan: Sequence[Fault], disturbed: JobReport, undisturbed: JobReport) -> list[str]:
    """Everything that speaks against the claim that the plan struck and left no trace."""
    problems = [f"planned, but did not strike: {describe_fault(f)}" for f in plan if find_failure(f, disturbed) is None]
    if undisturbed.failures:
        problems.append(f"something failed in the undisturbed run too: {undisturbed.failures[0].evidence}")
    if disturbed.steps != undisturbed.steps:
        problems.append(f"{disturbed.steps} steps in one run, {undisturbed.steps} in the other")
    if not disturbed.final_state_digest or disturbed.final_state_digest != undisturbed.final_state_digest:
        problems.append("DIFFERENT: the final states are not the same")
    if not disturbed.final_lineage or disturbed.final_lineage != undisturbed.final_lineage:
        problems.append("DIFFERENT: the final states came about by different steps")
    return problems


def describe_outcome(fault: Fault, report: JobReport) -> str:
    """Say how the failure ended, in a few words."""
    failure = find_failure(fault, report)
    if failure is None:
        return "missing"
    recovery = next((r for r in report.recoveries if failure.number in r.failures), None)
    if recovery is None:
        return "not survived"
    return duration(recovery.stages.total_seconds)


def draw_grid(plan: Sequence[Fault], cell: Callable[[Fault], str]) -> Table:
    """The failures inside and between steps: a row for each way to fail, a column for each place."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("a worker")
    for words in POINTS.values():
        table.add_column(words, no_wrap=True)
    cells = {(fault.action, fault.point): cell(fault) for fault in plan if fault.recovery is None}
    for action, words in ACTIONS.items():
        table.add_row(words, *(cells[action, point] for point in POINTS))
    return table


def draw_comparison(disturbed: JobReport, undisturbed: JobReport) -> Table:
    """The two reports side by side."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for title in ("", "disturbed", "undisturbed"):
        table.add_column(title, no_wrap=True)
    rows: dict[str, Callable[[JobReport], str]] = {
        "steps": lambda report: str(report.steps),
        "failures survived": lambda report: str(len(report.failures)),
        "steps repeated": lambda report: str(report.steps_repeated),
        "time lost": lambda report: duration(report.time_lost_seconds),
        "wall time": lambda report: duration(report.wall_seconds),
        "final state": lambda report: report.final_state_digest,
        "lineage": lambda report: report.final_lineage,
    }
    for name, value in rows.items():
        table.add_row(name, value(disturbed), value(undisturbed))
    return table


if __name__ == "__main__":
    sys.exit(main())
