"""Hosts from Slurm: each order is a job of one node that runs `relight agent`. Pure."""

import shlex
import sys
from collections.abc import Collection, Mapping

from relight.core.protocol.commands import CancelHost, OrderHost
from relight.server.supply.backend import Call, Job

# Options that an order takes over from the job that it is for, by Slurm's variables of that job.
_SAME = (("SLURM_JOB_ACCOUNT", "--account"), ("SLURM_JOB_PARTITION", "--partition"), ("SLURM_JOB_QOS", "--qos"))
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")  # of Slurm's variables: the others are about the job that orders
# The order ends with the job that it is for, at the latest: of a job without a time limit Slurm says no date.
_SUBMIT = """\
job=$1; shift
end=$([ -z "$job" ] || squeue --noheader --jobs="$job" --format=%e 2>/dev/null)
case "$end" in [0-9]*) set -- --deadline="$end" --time-min=1 "$@" ;; esac
exec sbatch "$@"
"""


class SlurmBackend:
    """`sbatch` orders, `scancel` cancels."""

    def __init__(self, job: Job, environment: Mapping[str, str]) -> None:
        """`environment`: that of the controller, in a job of Slurm or outside."""
        self._job = job
        self._environment = environment
        self._slurm_job = environment.get("SLURM_JOB_ID", "")
        self._not_ours: dict[str, str | None] = {
            name: None for name in environment if name.startswith(("SLURM_", "SBATCH_")) and name not in _KEPT
        }

    def order(self, order: OrderHost) -> Call:
        """Return the `sbatch` that places an order. Its job is seen in `squeue` under the name of the order."""
        agent = (
            *(sys.executable, "-m", "relight", "agent", "--quiet"),
            *("--controller", self._job.controller, "--name", order.order),
        )
        options = (
            *("--parsable", f"--job-name={self.name(order.order)}", "--nodes=1", "--ntasks=1", "--exclusive"),
            *("--no-requeue", f"--output={self._job.run_dir}/logs/{order.order}.out"),
            *(f"{flag}={value}" for variable, flag in _SAME if (value := self._environment.get(variable))),
            *([f"--exclude={','.join(order.exclude)}"] if order.exclude else []),
            f"--wrap=exec {shlex.join(agent)}",
        )
        environment = {**self._not_ours, "RELIGHT_TOKEN_FILE": self._job.token_file}
        return Call(("/bin/sh", "-c", _SUBMIT, "sbatch", self._slurm_job, *options), environment)

    def cancel(self, order: CancelHost) -> Call:
        """Return the `scancel` of an order, by its name if its number is not known."""
        which = order.identifier.partition(";")[0] or f"--name={self.name(order.order)}"
        return Call(("scancel", which), self._not_ours)

    def look(self, orders: Collection[str]) -> Call:
        """Return the `squeue` that says what becomes of these orders, also of those whose jobs ended lately."""
        names = ",".join(self.name(order) for order in sorted(orders))
        return Call(("squeue", "--noheader", "--states=all", "--format=%j|%T|%r|%i", f"--name={names}"), self._not_ours)

    def name(self, order: str) -> str:
        """Say whose it is: relight's name for the job, the job of Slurm that it is for, and the order."""
        return "-".join(filter(None, ("relight", self._job.name, self._slurm_job, order)))


def read_jobs(output: str) -> dict[str, tuple[str, str, str]]:
    """Return state, reason and number of the newest job of each name."""
    found = dict[str, tuple[str, str, str]]()
    for line in output.splitlines():
        name, state, reason, number = ([part.strip() for part in line.split("|")] + ["", "", ""])[:4]
        if number.isdecimal() and (name not in found or int(number) > int(found[name][2])):
            found[name] = (state, reason, number)
    return found


def ask_for_draining(machines: Collection[str], environment: Mapping[str, str]) -> Call:
    """Return the `sinfo` that says which of these nodes are to be left."""
    ours = {name: None for name in environment if name.startswith(("SINFO_",))}
    return Call(("sinfo", "--noheader", "--Node", "--format=%N|%T|%E", f"--nodes={','.join(sorted(machines))}"), ours)


def read_draining(output: str) -> dict[str, str]:
    """Return the nodes that an administrator has marked for draining, or as about to fail, with the reason."""
    found = {}
    for line in output.splitlines():
        node, _, rest = line.partition("|")
        state, _, reason = rest.partition("|")
        if state.startswith(("drain", "fail")):
            found[node.strip()] = reason.strip()
    return found
