"""The command `relight doctor`: its flags, its one short job, and what it prints. No torch."""

import argparse
import datetime
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from relight.errors import UsageError
from relight.flags import add_settings, add_waiting_flags
from relight.prove.command import add_launch_flags, as_for_run, show, tell
from relight.wire.settings import VERIFICATION, JobSettings

if TYPE_CHECKING:
    from relight.prove.doctor.diagnosis import Diagnosis

STEPS = 6
LEAST_STEPS = 4  # what a script carries is compared in its first three
_DESCRIPTION = """\
Say before a job waits in a queue what relight would protect, what it cannot see, and what to change.

The script runs for a few steps, without a failure, on this host. relight compares its ranks, computes the second step
twice, and compares the variables that the script carries from step to step, as in any job. Everything that
it would refuse or warn of is printed with its line, if that is known. A script that does not use relight is not run.

The script's own files are written as in any run. Checkpoints (training.checkpoint) are neither read nor left, loggers
(training.log_to) get nothing, code after the loop does not run, and nothing of the job is left without --run-dir.
"""
_EPILOG = """\
exit status: 0 nothing to change, 1 something to change, 2 refused, the script failed by itself, or wrong command line

examples:
  relight doctor train.py --lr 0.1
  relight doctor --nproc-per-node 4 --steps 20 train.py
  relight doctor --json train.py
"""


def add_command(choices: "argparse._SubParsersAction[Any]") -> None:
    """Add `relight doctor`."""
    doctor = choices.add_parser(
        "doctor",
        help="say what relight would protect of a script, and what to change",
        usage="relight doctor [flags] SCRIPT [the script's own arguments]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add_launch_flags(doctor, "workers to start; default 2, since much shows only where ranks are compared")
    own = doctor.add_argument_group("the examination")
    own.add_argument("--steps", type=int, default=STEPS, metavar="K", help=f"steps to compute; default {STEPS}")
    own.add_argument("--run-dir", metavar="DIR", help="keep the files of the job there; default: they are removed")
    own.add_argument("--json", action="store_true", help="print what was found as JSON instead")
    add_settings(doctor.add_argument_group(VERIFICATION), VERIFICATION)
    add_waiting_flags(doctor.add_argument_group("noticing failures"))
    doctor.set_defaults(call=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from relight.config import build_settings, check_script, count_workers
    from relight.flags import hint_at_misplaced_flags
    from relight.prove.doctor.diagnosis import STATUSES, explain_diagnosis, without_relight
    from relight.prove.doctor.source import trains_without_relight

    if arguments.steps < LEAST_STEPS:
        raise UsageError(f"--steps {arguments.steps}: expected {LEAST_STEPS} or more")
    hint_at_misplaced_flags(arguments.script_and_arguments)
    script = arguments.script_and_arguments[0] if arguments.script_and_arguments else ""
    check_script(script, module=arguments.module, no_python=arguments.no_python)
    if not (arguments.module or arguments.no_python) and trains_without_relight(Path(script)):
        found = without_relight(script, count_workers(arguments.nproc_per_node))
    else:
        run_dir = arguments.run_dir or tempfile.mkdtemp(prefix="relight-doctor-")
        try:
            arguments.run_dir, kept = run_dir, arguments.run_dir
            found = _examine(build_settings(as_for_run(arguments), datetime.datetime.now()), arguments.steps)
        finally:
            if not kept:
                shutil.rmtree(run_dir, ignore_errors=True)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        print(*explain_diagnosis(found), sep="\n")
    return STATUSES[found.verdict]


def _examine(settings: JobSettings, steps: int) -> "Diagnosis":
    """Run the job, and read what it left."""
    from relight.prove.attempt import newest_lines, run_attempt
    from relight.prove.doctor.diagnosis import diagnose
    from relight.server.records.journal import read_journal
    from relight.wire.records.examined import read_examined
    from relight.words import count

    settings = msgspec.structs.replace(settings, stop_after=steps, examined=True, max_failures=0)
    run_dir, started = Path(settings.run_dir), time.monotonic()
    ranks = count(settings.world_size, "rank")
    tell(f"{count(steps, 'step')} of {settings.script} on {ranks}, without a failure")
    report = run_attempt(settings, lambda: show(f"{time.monotonic() - started:.0f} s"))
    show("")
    try:
        events = [line.event for line in read_journal(run_dir / "journal.jsonl")[1] if line.event is not None]
    except OSError:
        events = []
    printed = newest_lines(run_dir / "logs")
    return diagnose(settings.script, settings.world_size, report, events, read_examined(run_dir), printed)
