"""`relight submit`: a job as a cluster manager wants it, printed or submitted. Here: the batch script for Slurm."""

import argparse
import re
import shlex
import subprocess
import sys
from typing import Any

from relight.errors import UsageError
from relight.launch.submit import jobset
from relight.launch.submit.arguments import flags_and_script

WARNING_SECONDS = 120  # before the time limit, for a last step and a checkpoint
MAX_WARNING_SECONDS = 65535  # as Slurm has it
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|infinite|unlimited", re.IGNORECASE)
# Options of sbatch that the script sets, and on which it depends.
_OWN = ("--nodes", "--ntasks", "--ntasks-per-node", "--job-name", "--signal", "--requeue", "--no-requeue", "--no-kill")
_SHORT = ("-N", "-n", "-J", "-k")

_SLURM = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{warning}
{options}
# The secret that the hosts of the job share: head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE
export RELIGHT_TOKEN_FILE=${{RELIGHT_TOKEN_FILE:-$HOME/.relight-token}}

# Before the time limit: a last step and a checkpoint, then the same job again, which goes on from there.
again=
trap 'again=yes; {relight} end "runs/$SLURM_JOB_ID" &' USR1
# The part of each node. If the node of this script is lost, Slurm leaves the job alone, even once nothing is left in
# it: so another node then has it queued again. SIGTERM (scancel) is left to relight, which cancels its orders.
on_node() {{
    trap : TERM
    {command}
    {ending} "runs/$SLURM_JOB_ID" "$?"
}}
export -f on_node
# Run a command to its end, though signals are handled meanwhile.
through() {{
    "$@" &
    local child=$!
    wait "$child"; status=$?
    while kill -0 "$child" 2>/dev/null; do wait "$child"; status=$?; done
}}
through srun --no-kill --kill-on-bad-exit=0 --wait=0 bash -c on_node
through {ending} "runs/$SLURM_JOB_ID" "$status" srun
[ -z "$again" ] || [ "$status" -eq 0 ] || scontrol requeue "$SLURM_JOB_ID"
exit "$status"
"""


def add_command(choices: "argparse._SubParsersAction[Any]") -> None:
    """Add `relight submit`."""
    submit = choices.add_parser(
        "submit",
        help="write a job for Slurm or Kubernetes, or submit it",
        description="Write a job as a cluster manager wants it, or submit it.",
    )
    managers = submit.add_subparsers(dest="manager", required=True, metavar="MANAGER")
    slurm = managers.add_parser(
        "slurm",
        help="a script for sbatch",
        usage="relight submit slurm --nodes M [--spare-nodes K] [options] -- [flags of relight run] SCRIPT ...",
        description="Print the batch script of a job for Slurm; with --now, submit it. The job survives the loss of "
        "nodes, and orders others in their place. Before its time limit it makes a last step and a checkpoint, and is "
        "queued again, to go on from there: that needs training.checkpoint(...) in the script. The run directory is "
        "runs/NUMBER, with the number of the job.",
        epilog="example: relight submit slurm --nodes 4 --spare-nodes 1 --time 24:00:00 --option=--gpus-per-node=8 "
        "-- --nproc-per-node 8 train.py --lr 0.1 | sbatch",
    )
    slurm.add_argument("--nodes", type=int, required=True, metavar="M", help="number of nodes, spares included")
    slurm.add_argument("--spare-nodes", type=int, default=0, metavar="K", help="the last K of them are spares")
    slurm.add_argument("--time", default="", metavar="LIMIT", help="time limit, as for sbatch")
    slurm.add_argument("--job-name", default="relight", metavar="NAME", help="the job's name; default relight")
    slurm.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="--OPTION=VALUE",
        help="an option of sbatch, such as --option=--partition=gpu; may be repeated",
    )
    slurm.add_argument(
        "--warning-seconds",
        type=int,
        default=WARNING_SECONDS,
        metavar="SECONDS",
        help=f"how long before the time limit the last checkpoint begins; default {WARNING_SECONDS}",
    )
    slurm.add_argument(
        "--fixed-controller",
        action="store_true",
        help="keep the controller on the first node, as is needed if runs/ is not on storage that all nodes share; if "
        "that node is lost, the job is queued again",
    )
    slurm.add_argument("--no-orders", action="store_true", help="do not order other nodes for lost ones")
    slurm.add_argument("--now", action="store_true", help="submit the script with sbatch, and print the job's number")
    slurm.add_argument("run_arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    slurm.set_defaults(call=_submit, run=choices.choices["run"])
    jobset.add_manager(managers, choices.choices["run"])


def slurm_script(arguments: argparse.Namespace) -> str:
    """Return the batch script. Raises UsageError."""
    own = ("run_dir", "lease", *(() if arguments.no_orders else ("supplier",)))
    given = flags_and_script(arguments, "relight submit slurm --nodes 4 -- --nproc-per-node 8 train.py", own)
    _check(arguments)
    lines = [f"#SBATCH --time={arguments.time}"] if arguments.time else []
    lines += [f"#SBATCH {option}" for option in arguments.option]
    flags = ["--nnodes", "auto", "--spare-nodes", str(arguments.spare_nodes)]
    flags += [] if arguments.no_orders else ["--supplier", "slurm"]
    flags += ["--lease", "file"] if arguments.nodes > 1 and not arguments.fixed_controller else []
    relight = shlex.join([sys.executable, "-m", "relight"])
    return _SLURM.format(
        name=shlex.quote(arguments.job_name),
        nodes=arguments.nodes,
        warning=arguments.warning_seconds,
        options="\n".join(lines),
        relight=relight,
        ending=shlex.join([sys.executable, "-m", "relight.launch.submit.slurm_end"]),
        command=f'{relight} run {shlex.join(flags)} --run-dir "runs/$SLURM_JOB_ID" {shlex.join(given)}',
    )


def _check(arguments: argparse.Namespace) -> None:
    if arguments.time and not _TIME.fullmatch(arguments.time):
        raise UsageError(f"--time {arguments.time}: expected a time limit of Slurm, such as 90, 24:00:00 or 2-0")
    if not arguments.job_name.strip() or not arguments.job_name.isprintable():
        raise UsageError(f"--job-name {arguments.job_name!r}: expected a name of one line")
    if not 0 < arguments.warning_seconds <= MAX_WARNING_SECONDS:
        raise UsageError(f"--warning-seconds {arguments.warning_seconds}: expected 1 to {MAX_WARNING_SECONDS}")
    for option in arguments.option:
        if not option.startswith("-") or not option.isprintable():
            raise UsageError(f"--option {option}: expected an option of sbatch, such as --option=--partition=gpu")
        if option.startswith(_SHORT) or option.partition("=")[0] in _OWN:
            raise UsageError(f"--option {option}: the script has its own; see `relight submit slurm --help`")


def _submit(arguments: argparse.Namespace) -> int:
    script = slurm_script(arguments)
    if not arguments.now:
        print(script, end="")
        return 0
    try:
        return subprocess.run(["sbatch", "--parsable"], input=script, text=True, check=False).returncode
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"sbatch cannot be run: {reason}; without --now the script is printed") from error
