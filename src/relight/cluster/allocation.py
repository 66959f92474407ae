"""The nodes that a job of Slurm has at this moment, as Slurm says."""

import subprocess
from collections.abc import Mapping

from relight.cluster.node_list import expand

PATIENCE_SECONDS = 3.0


class SlurmError(OSError):
    """A command of Slurm did not do its work. The text has its own words."""


class NoSlurmError(SlurmError):
    """There is no such command, as in a container."""


def ask_slurm(*command: str, seconds: float = PATIENCE_SECONDS) -> str:
    """Run a command of Slurm; return its output. Raises SlurmError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except FileNotFoundError:
        raise NoSlurmError(f"there is no {command[0]} on the PATH") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not end within {seconds:g} s") from None
    if done.returncode:
        raise SlurmError(" ".join(done.stderr.split()) or f"{command[0]} ended with status {done.returncode}")
    return done.stdout.strip()


def nodes_now(job: str) -> tuple[str, ...]:
    """Return the nodes of a job, without those that Slurm has taken out of it; none if it is not running.

    Raises SlurmError.
    """
    listed = ask_slurm("squeue", "--noheader", f"--jobs={job}", "--states=RUNNING", "--format=%N")
    try:
        return expand(listed) if listed else ()
    except ValueError as error:
        raise SlurmError(f"squeue printed {listed[:60]!r}: {error}") from None


def doubt(environment: Mapping[str, str]) -> str:
    """Return why this node may not act for its job, by Slurm's word; empty if it may, or there is no Slurm."""
    job, node = environment.get("SLURM_JOB_ID", ""), environment.get("SLURMD_NODENAME", "")
    if not job or not node:
        return ""
    try:
        return "" if node in nodes_now(job) else f"Slurm has taken {node} out of the job"
    except NoSlurmError:
        return ""
    except SlurmError as error:
        return f"Slurm does not answer: {error}"
