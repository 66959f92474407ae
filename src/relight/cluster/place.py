"""Completes the flags about nodes from the cluster's variables. Flags that were given win; nothing else is read."""

import argparse
from collections.abc import Mapping
from typing import TypeVar

from relight.cluster.environment import Expand, Reading, read_head, read_nodes, read_port, read_rank
from relight.cluster.node_list import expand
from relight.errors import UsageError

DEFAULT_PORT = 29400  # torchrun's, of its rendezvous
DEFAULT_ADDRESS = "127.0.0.1"  # of --master-addr
DEFAULT_MASTER_PORT = 29500
Known = TypeVar("Known", Reading[int], Reading[str])


def complete_flags(arguments: argparse.Namespace, environment: Mapping[str, str], expand_list: Expand = expand) -> str:
    """Fill `nnodes`, `node_rank`, `rdzv_endpoint` and `nproc_per_node` where they were not given.

    Returns one sentence about what was read, or an empty string. Raises UsageError for contradictions, and if the
    environment does not say what `--nnodes auto` or `--spare-nodes` needs.
    """
    if arguments.nproc_per_node is None:
        arguments.nproc_per_node = environment.get("PET_NPROC_PER_NODE") or "1"
    is_auto = arguments.nnodes == "auto" or (arguments.nnodes is None and bool(environment.get("PET_NNODES")))
    if not is_auto:
        arguments.nnodes = arguments.nnodes or "1"
        if not arguments.spare_nodes:
            return ""
    used: list[str] = []
    source = "--nnodes"
    if is_auto:
        nodes = _needed(read_nodes(environment), "how many nodes the job has", "--nnodes M")
        arguments.nnodes, source = str(nodes.value), nodes.variable
        used.append(nodes.variable)
    if arguments.nnodes == "1":
        return f"one node, as {source} says" if is_auto else ""
    if arguments.node_rank is None:
        rank = _needed(read_rank(environment), "which node this is", "--node-rank R, or start it with srun,")
        arguments.node_rank = rank.value
        used.insert(0, rank.variable)
        if arguments.nnodes.isdecimal() and rank.value >= int(arguments.nnodes):
            raise UsageError(
                f"{rank.variable}={rank.value} and {source}, {arguments.nnodes}, contradict each other: nodes are "
                f"numbered from 0 to {int(arguments.nnodes) - 1}; give --nnodes and --node-rank"
            )
    if arguments.rdzv_endpoint is None and arguments.master_address == DEFAULT_ADDRESS:
        arguments.rdzv_endpoint, variables = _find_endpoint(arguments, environment, expand_list, source)
        used += variables
    spares = f", the last {arguments.spare_nodes} of them spare" if arguments.spare_nodes else ""
    where = arguments.rdzv_endpoint or arguments.master_address
    read = f" (from {', '.join(dict.fromkeys(used))})" if used else ""
    return f"node {arguments.node_rank} of {arguments.nnodes}{spares}; the controller is at {where}{read}"


def _find_endpoint(
    arguments: argparse.Namespace, environment: Mapping[str, str], expand_list: Expand, source: str
) -> tuple[str, list[str]]:
    """Return HOST:PORT of node 0, and the variables that it was read from."""
    head = _needed(
        read_head(environment, expand_list), "where node 0 is reached", "--rdzv-endpoint HOST:PORT, or set MASTER_ADDR,"
    )
    if head.value == "localhost" or head.value.startswith("127.") or head.value == "::1":
        raise UsageError(
            f"{head.variable}={head.value} and {source}, {arguments.nnodes}, contradict each other: the other nodes "
            "cannot reach node 0 there; give --rdzv-endpoint HOST:PORT"
        )
    host = f"[{head.value}]" if ":" in head.value else head.value
    if arguments.master_port != DEFAULT_MASTER_PORT:
        return f"{host}:{arguments.master_port}", [head.variable]
    port = read_port(environment)
    if port is None:
        return f"{host}:{DEFAULT_PORT}", [head.variable]
    return f"{host}:{port.value}", [head.variable, port.variable]


def _needed(reading: Known | None, fact: str, remedy: str) -> Known:
    if reading is None:
        raise UsageError(
            f"no variable of the environment says {fact}; give {remedy} on every node. Those of Slurm (srun), torchrun "
            "(PET_*), Kubernetes, LeaderWorkerSet, SkyPilot, Ray and MPI are known"
        )
    return reading


def is_spare(arguments: argparse.Namespace) -> bool:
    """Return whether this is one of the last nodes, which the job does not start on."""
    first_spare = int(arguments.nnodes.partition(":")[0]) - int(arguments.spare_nodes)
    return bool(arguments.spare_nodes) and int(arguments.node_rank) >= first_spare
