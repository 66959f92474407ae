"""`python -m relight.launch.submit.slurm_end RUN_DIR STATUS [srun]`, in a batch script of Slurm.

On a node, after `relight run`: a batch script and its srun run on the first node of a job. If that node is lost, a job
with `--no-kill` stays in the queue as running, with nothing in it, until its time limit: so the first node that is left
has Slurm queue it again.

In the script itself, after srun: if that alone was killed, the nodes train on, and the script waits for them, since
Slurm ends them with it.
"""

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from relight.cluster.allocation import NoSlurmError, SlurmError, ask_slurm, nodes_now
from relight.cluster.scontrol import expand_list
from relight.server.records.earlier import has_ended, has_finished
from relight.wire.connection.address import read_address

LOOK_SECONDS = 2.0  # on the second node; later ones look less often, since only the first that is left acts
LONGEST_LOOK_SECONDS = 60.0
REQUEUE_SECONDS = 30.0
CONNECT_SECONDS = 5.0
KILLED = 128  # exit statuses above this one are of a signal
LAST_SECONDS = 60.0  # for what a node does after the end of the job


def main(arguments: list[str]) -> int:
    """Return the exit status of this node's part in the job: 0 if training has finished, else the one that is given.

    On a node that has outlived the one of the batch script, this returns only once Slurm ends it.
    """
    run_dir, status = Path(arguments[0]), int(arguments[1])
    environment = os.environ
    if arguments[2:]:
        if status > KILLED:
            _outlive_srun(run_dir, environment)
    elif environment.get("SLURM_NODEID", "0") != "0" and not _ended_on_first_node(run_dir, environment):
        while not _is_srun_there(environment):
            _end_if_first(environment)
            time.sleep(min(LOOK_SECONDS * int(environment["SLURM_NODEID"]), LONGEST_LOOK_SECONDS))
    return 0 if has_finished(run_dir) else status


def _outlive_srun(run_dir: Path, environment: Mapping[str, str]) -> None:
    """Wait for the nodes, which train on after srun was killed, as long as Slurm has their step."""
    step, ended_at = f"{environment.get('SLURM_JOB_ID', '')}.0", None
    if not _has_step(step):
        return
    _say(f"srun was killed: the nodes go on without it; what they print from now on is in {run_dir}/logs alone")
    while _has_step(step) and (ended_at is None or time.monotonic() < ended_at + LAST_SECONDS):
        if ended_at is None and has_ended(run_dir):
            ended_at = time.monotonic()
        time.sleep(LOOK_SECONDS)


def _has_step(step: str) -> bool:
    """Return whether Slurm still has this step; also if it does not answer, as it ends what is left in time."""
    try:
        return step in ask_slurm("squeue", "--noheader", f"--jobs={step.partition('.')[0]}", "--steps").split()
    except NoSlurmError:
        return False
    except SlurmError:
        return True


def _ended_on_first_node(run_dir: Path, environment: Mapping[str, str]) -> bool:
    """Return whether the controller has ended the job, on the node of the batch script."""
    address = read_address(run_dir)
    return address is not None and address[0] == _first_node(environment) and has_ended(run_dir)


def _is_srun_there(environment: Mapping[str, str]) -> bool:
    """Return whether srun, which the batch script has started, can be reached: then it ends the job."""
    try:
        port = int(environment.get("SLURM_SRUN_COMM_PORT", ""))
        socket.create_connection((environment.get("SLURM_SRUN_COMM_HOST", ""), port), CONNECT_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


def _end_if_first(environment: Mapping[str, str]) -> None:
    """Queue the job again, if Slurm has taken the batch script's node out of it, and this is the first one left."""
    job, lost = environment["SLURM_JOB_ID"], _first_node(environment)
    try:
        nodes = nodes_now(job)
    except SlurmError:
        return  # it is asked again soon
    if not nodes or nodes[0] != environment.get("SLURMD_NODENAME") or lost in nodes:
        return
    _say(f"the batch script is lost with its node, {lost}: Slurm is asked to queue the job again")
    try:
        ask_slurm("scontrol", "requeue", job, seconds=REQUEUE_SECONDS)
    except SlurmError as error:
        _say(f"Slurm does not queue it again ({error}), so it is cancelled: nothing is left in it")
        ask_slurm("scancel", job, seconds=REQUEUE_SECONDS)


def _first_node(environment: Mapping[str, str]) -> str:
    """Return the node of the batch script; empty if it is not known."""
    try:
        return expand_list(environment.get("SLURM_STEP_NODELIST", ""))[0]
    except ValueError:
        return ""


def _say(text: str) -> None:
    print(f"relight: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
