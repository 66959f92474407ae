"""The command `relight prove`: its flags, and what it prints. No torch."""

import argparse
import datetime
import sys
from pathlib import Path
from typing import Any

import msgspec

from relight.errors import UsageError
from relight.flags import add_run_flags, add_setting, add_waiting_flags

STEPS = 20
ROUNDS = 2
LEAST_STEPS = 4
_DESCRIPTION = """\
Test before a long run whether a script keeps its bits through failures.

The script runs for a few steps without a failure, and then again, in rounds, with faults: ranks are killed, frozen or
cut off at random points of steps, in forward, backward, at the barrier, in the optimizer and between steps, so that
steps are repeated and replacements take ranks. After each step every rank records digests of all that training changes,
tensor by tensor, and of the script's own variables. The first step that differs from the undisturbed run is named with
its tensors, the variables that differ, and the line where the difference begins.

The script's own files are written again in each attempt; its checkpoints (training.checkpoint) go to the proof's run
directory, its loggers (training.log_to) get nothing, and code after the loop does not run.
"""
_EPILOG = """\
exit status: 0 equal, 1 something differs (or an attempt failed), 2 wrong command line

examples:
  relight prove --nproc-per-node 4 train.py --lr 0.1
  relight prove --nproc-per-node 2 --steps 50 --rounds 5 --seed 7 train.py
"""


def add_command(choices: "argparse._SubParsersAction[Any]") -> None:
    """Add `relight prove`."""
    prove = choices.add_parser(
        "prove",
        help="test whether a script keeps its bits through failures",
        usage="relight prove [flags] SCRIPT [the script's own arguments]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    launch = add_launch_flags(prove, "workers to start; default 2")
    launch.add_argument(
        "--standby", dest="standbys", type=int, default=1, metavar="N", help="warm processes in reserve; default 1"
    )
    proof = prove.add_argument_group("the proof")
    proof.add_argument("--steps", type=int, default=STEPS, metavar="K", help=f"steps of each attempt; default {STEPS}")
    proof.add_argument(
        "--rounds", type=int, default=ROUNDS, metavar="R", help=f"attempts with failures; default {ROUNDS}"
    )
    proof.add_argument(
        "--seed", dest="faults_seed", type=int, default=0, metavar="SEED", help="of the failures; default 0"
    )
    proof.add_argument(
        "--run-dir", metavar="DIR", help="where the files of all attempts go; default runs/prove-SCRIPT-DATE-TIME"
    )
    proof.add_argument("--json", action="store_true", help="print what was found as JSON instead")
    add_waiting_flags(prove.add_argument_group("noticing failures"))
    prove.set_defaults(call=_prove)


def add_launch_flags(parser: argparse.ArgumentParser, workers_help: str) -> "argparse._ArgumentGroup":
    """Add the script with its arguments, and the flags that say how it is started; returns their group."""
    parser.add_argument("script_and_arguments", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help=argparse.SUPPRESS)
    launch = parser.add_argument_group("launch, as with relight run")
    launch.add_argument(*("--nproc-per-node", "--nproc_per_node"), default="2", metavar="N", help=workers_help)
    launch.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    launch.add_argument(
        *("--no-python", "--no_python"), action="store_true", help="SCRIPT is a program that becomes Python"
    )
    launch.add_argument("--oversubscribe", action="store_true", help="allow more than 16 processes for each core")
    add_setting(launch, "preload")
    return launch


def _prove(arguments: argparse.Namespace) -> int:
    from relight.config import build_settings
    from relight.flags import hint_at_misplaced_flags
    from relight.prove.faults import plan_rounds
    from relight.prove.result import EQUAL, explain_proof
    from relight.prove.rounds import Prover

    for value, lowest, flag in ((arguments.steps, LEAST_STEPS, "--steps"), (arguments.rounds, 1, "--rounds")):
        if value < lowest:
            raise UsageError(f"{flag} {value}: expected {lowest} or more")
    hint_at_misplaced_flags(arguments.script_and_arguments)
    settings = build_settings(as_for_run(arguments), datetime.datetime.now())
    base = Path(settings.run_dir)
    if settings.world_size < 2:
        raise UsageError(
            "a proof needs two ranks or more (--nproc-per-node): with one, there is no rank to recover from"
        )
    if (base / "undisturbed").exists():
        raise UsageError(f"--run-dir {base} holds an earlier proof; choose another")
    plans = plan_rounds(arguments.faults_seed, arguments.rounds, arguments.steps, settings.world_size)
    proof = Prover(settings, base, arguments.steps, tell, show).prove(plans, arguments.faults_seed)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(proof), indent=2).decode())
    else:
        print(*explain_proof(proof), f"Seed {proof.seed}; files in {base}", sep="\n")
    return 0 if proof.verdict == EQUAL else 1


def as_for_run(arguments: argparse.Namespace) -> argparse.Namespace:
    """The flags of `relight run` that this command does not have are at their defaults."""
    parser = argparse.ArgumentParser()
    add_run_flags(parser)
    complete = parser.parse_args([])
    given = {name: value for name, value in vars(arguments).items() if hasattr(complete, name)}
    vars(complete).update(given)
    if complete.run_dir is None and complete.script_and_arguments:
        stem = Path(complete.script_and_arguments[0]).stem
        complete.run_dir = f"runs/prove-{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    return complete


def tell(text: str) -> None:
    """Print a line for people."""
    print(f"relight: {text}", file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Renew the line of progress; on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
