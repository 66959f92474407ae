"""The number of this node, of how many, and the first one's address, by variables that clusters set. Pure.

Each fact may be known by several variables: those of torchrun, of Kubernetes and what runs on it, of SkyPilot, MPI,
Ray and Slurm. All that are set must agree; the first of them gives the value. A flag of the user's is not compared: a
fact that was given is not read.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from relight.cluster.node_list import expand
from relight.errors import UsageError

Environment = Mapping[str, str]
Expand = Callable[[str], Sequence[str]]
Value = TypeVar("Value", int, str)
_SLURM_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES")
_TASKS = re.compile(r"(\d+)(?:\(x\d+\))?")
# Processes that a launcher started on this node; relight starts the node's ranks by itself.
_TOGETHER = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


class Reading(NamedTuple, Generic[Value]):
    """A value, and the variable that it was read from."""

    value: Value
    variable: str


def read_nodes(environment: Environment) -> Reading[int] | None:
    """Return the number of nodes, spares included; None: no variable says it. Raises UsageError."""
    return _agreed(list(_nodes(environment)), environment)


def read_rank(environment: Environment) -> Reading[int] | None:
    """Return the number of this node, from 0; None: no variable says it. Raises UsageError."""
    return _agreed(list(_ranks(environment)), environment)


def read_head(environment: Environment, expand_list: Expand = expand) -> Reading[str] | None:
    """Return the name or address of node 0; None: no variable says it. Raises UsageError.

    A name and an address cannot be compared without asking the network, so they count as the same.
    """
    readings = list(_heads(environment, expand_list))
    for kind in (_is_address, lambda head: not _is_address(head)):
        alike = [reading for reading in readings if kind(reading.value)]
        for other in alike[1:]:
            if _short(other.value) != _short(alike[0].value):
                raise _contradiction(alike[0], other, environment)
    return readings[0] if readings else None


def read_port(environment: Environment) -> Reading[int] | None:
    """Return the port of node 0 at which the controller listens; None: no variable says it. Raises UsageError."""
    readings = [_whole(environment, name) for name in ("PET_MASTER_PORT", "MASTER_PORT") if environment.get(name)]
    endpoint = environment.get("PET_RDZV_ENDPOINT", "")
    port = endpoint.rpartition(":")[2] if ":" in endpoint else ""
    if port.isdecimal() and int(port):
        readings.insert(0, Reading(int(port), "PET_RDZV_ENDPOINT"))
    if not readings and environment.get("SLURM_JOB_ID", "").isdecimal():  # jobs may share a node
        return Reading(20000 + int(environment["SLURM_JOB_ID"]) % 10000, "SLURM_JOB_ID")
    found = readings[0] if readings else None
    if found is not None and not 1 <= found.value <= 65535:
        raise UsageError(f"{_quote(found.variable, environment)}: expected a port number")
    return found


# --- the variables of each fact, the ones that were set closest to this process first --------------------------------
def _nodes(environment: Environment) -> Iterator[Reading[int]]:
    if text := environment.get("PET_NNODES", ""):
        least, colon, most = text.partition(":")
        if colon and least != most:
            raise UsageError(f"PET_NNODES={text}: expected one number of nodes; a job's ranks neither grow nor shrink")
        yield _whole({"PET_NNODES": least}, "PET_NNODES")
    for name in ("LWS_GROUP_SIZE", "SKYPILOT_NUM_NODES", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if environment.get(name):
            yield _whole(environment, name)
    if not environment.get("SKYPILOT_NUM_NODES") and (hosts := environment.get("SKYPILOT_NODE_IPS", "").split()):
        yield Reading(len(hosts), "SKYPILOT_NODE_IPS")
    if all(environment.get(name) for name in ("NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")):
        _check_alone(environment, "LOCAL_WORLD_SIZE")
        yield _whole(environment, "WORLD_SIZE")  # Ray's, with one worker on each node
    yield from _slurm_nodes(environment)


def _slurm_nodes(environment: Environment) -> Iterator[Reading[int]]:
    in_step = _is_in_step(environment)
    names = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    name = next((name for name in names[0 if in_step else 1 :] if environment.get(name)), "")
    if name:
        yield _whole(environment, name)
    if (hosts := _slurm_list(environment)) and (not name or ("STEP" in name) == ("STEP" in hosts)):
        try:
            yield Reading(len(expand(environment[hosts])), hosts)
        except ValueError:
            return  # `scontrol` may understand it: see read_head


def _ranks(environment: Environment) -> Iterator[Reading[int]]:
    for name in _TOGETHER:
        _check_alone(environment, name)
    if environment.get("PET_NODE_RANK"):
        yield _whole(environment, "PET_NODE_RANK")
    if environment.get("JOB_COMPLETION_INDEX"):
        yield _kubernetes_rank(environment)
    for name in ("LWS_WORKER_INDEX", "SKYPILOT_NODE_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "NODE_RANK"):
        if environment.get(name):
            yield _whole(environment, name)
    if environment.get("SLURM_NODEID") and not _is_under_mpirun(environment):
        if _is_in_step(environment):
            _check_slurm_tasks(environment)
            yield _whole(environment, "SLURM_NODEID")
        elif _whole(environment, "SLURM_NODEID").value:
            yield _whole(environment, "SLURM_NODEID")
        # else it is the number of the host that runs the batch script, wherever relight was started from there


def _kubernetes_rank(environment: Environment) -> Reading[int]:
    """Return the number of a pod: in its Job, or that of its Job, if a JobSet has a Job for each node."""
    inner = _whole(environment, "JOB_COMPLETION_INDEX")
    if not (environment.get("JOBSET_NAME") and environment.get("JOB_INDEX")):
        return inner
    outer = _whole(environment, "JOB_INDEX")
    if inner.value and outer.value:
        raise UsageError(
            f"JOB_INDEX={outer.value} and JOB_COMPLETION_INDEX={inner.value}: of a JobSet with several Jobs of several "
            "pods the number of a node is not known; give --node-rank"
        )
    return outer if outer.value else inner


def _heads(environment: Environment, expand_list: Expand) -> Iterator[Reading[str]]:
    if endpoint := environment.get("PET_RDZV_ENDPOINT", ""):
        host = (endpoint.rpartition(":")[0] if ":" in endpoint else endpoint).removeprefix("[").removesuffix("]")
        if ":" in host and not _is_address(host):
            raise UsageError(f"{_quote('PET_RDZV_ENDPOINT', environment)}: expected HOST:PORT")
        yield Reading(host, "PET_RDZV_ENDPOINT")
    for name in ("PET_MASTER_ADDR", "MASTER_ADDR", "LWS_LEADER_ADDRESS"):
        if environment.get(name):
            yield Reading(environment[name], name)
    job_set, group = environment.get("JOBSET_NAME"), environment.get("REPLICATED_JOB_NAME")
    if job_set and group and environment.get("JOB_COMPLETION_INDEX"):
        yield Reading(f"{job_set}-{group}-0-0.{job_set}", "JOBSET_NAME")
    if hosts := environment.get("SKYPILOT_NODE_IPS", "").split():
        yield Reading(hosts[0], "SKYPILOT_NODE_IPS")
    if name := _slurm_list(environment):
        try:
            yield Reading(expand_list(environment[name])[0], name)
        except ValueError as error:
            raise UsageError(
                f"{_quote(name, environment)} is no list of hosts ({error}); give --rdzv-endpoint HOST:PORT"
            ) from None


# --- Slurm and MPI --------------------------------------------------------------------------------------------------
def _is_under_mpirun(environment: Environment) -> bool:
    """True if mpirun started this process: the step of Slurm, if there is one, is then that of mpirun's helpers."""
    return bool(environment.get("OMPI_COMM_WORLD_SIZE"))


def _is_in_step(environment: Environment) -> bool:
    """Return whether srun started this process, on each node of a step."""
    return any(environment.get(name) for name in _SLURM_STEP) and not _is_under_mpirun(environment)


def _slurm_list(environment: Environment) -> str:
    """Return the variable with the hosts, of which the first is node 0; empty: there is none."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return next((name for name in names[0 if _is_in_step(environment) else 1 :] if environment.get(name)), "")


def _check_slurm_tasks(environment: Environment) -> None:
    name = "SLURM_STEP_TASKS_PER_NODE"
    tasks = [_TASKS.fullmatch(part) for part in environment.get(name, "1").split(",")]
    if any(part is None or part[1] != "1" for part in tasks):
        raise UsageError(
            f"{_quote(name, environment)}: relight starts the ranks of a node by itself; give srun "
            "--ntasks-per-node=1, and relight --nproc-per-node"
        )


def _check_alone(environment: Environment, name: str) -> None:
    if environment.get(name) and _whole(environment, name).value != 1:
        raise UsageError(
            f"{_quote(name, environment)}: relight starts the ranks of a node by itself; start one `relight run` on "
            "each node, and give it --nproc-per-node"
        )


# --- values ---------------------------------------------------------------------------------------------------------
def _whole(environment: Environment, name: str) -> Reading[int]:
    text = environment[name].strip()
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UsageError(f"{_quote(name, environment)}: expected a whole number")
    return Reading(int(text), name)


def _agreed(readings: list[Reading[int]], environment: Environment) -> Reading[int] | None:
    for other in readings[1:]:
        if other.value != readings[0].value:
            raise _contradiction(readings[0], other, environment)
    return readings[0] if readings else None


def _contradiction(one: Reading[Value], other: Reading[Value], environment: Environment) -> UsageError:
    return UsageError(
        f"{_quote(one.variable, environment)} and {_quote(other.variable, environment)} contradict each other "
        f"({one.value} and {other.value}); say which is right with a flag: --nnodes, --node-rank, or --rdzv-endpoint"
    )


def _quote(name: str, environment: Environment) -> str:
    text = environment.get(name, "")
    return f"{name}={text if len(text) <= 60 else text[:57] + '...'}"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _short(host: str) -> str:
    """Return a name without its domain, an address as it is."""
    return host if _is_address(host) else host.partition(".")[0].lower()
