"""The place of a node, by the variables of every known cluster: generated for many sizes, and alone or together."""

import itertools
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from relight.cluster.environment import read_head, read_nodes, read_port, read_rank
from relight.cluster.place import complete_flags, is_spare
from relight.cluster.scontrol import expand_list
from relight.errors import UsageError

Environment = dict[str, str]


def slurm(nodes: int, rank: int) -> Environment:
    """Variables of a task that srun started."""
    hosts = "n1" if nodes == 1 else f"n[1-{nodes}]"
    return {
        "SLURM_JOB_ID": "4242",
        "SLURM_NNODES": "9",  # of the job, of which this is a step
        "SLURM_JOB_NUM_NODES": "9",
        "SLURM_JOB_NODELIST": "login,n[1-8]",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NODELIST": hosts,
        "SLURM_STEP_TASKS_PER_NODE": "1" if nodes == 1 else f"1(x{nodes})",
        "SLURM_NODEID": str(rank),
    }


def torchrun(nodes: int, rank: int) -> Environment:
    return {"PET_NNODES": f"{nodes}:{nodes}", "PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "n1"}


def rendezvous(nodes: int, rank: int) -> Environment:
    return {"PET_NNODES": str(nodes), "PET_NODE_RANK": str(rank), "PET_RDZV_ENDPOINT": "n1:29400"}


def trainer(nodes: int, rank: int) -> Environment:
    """Variables of a pod of a TrainJob."""
    return {**torchrun(nodes, rank), "PET_MASTER_PORT": "29500", "JOB_COMPLETION_INDEX": str(rank)}


def leader_worker_set(nodes: int, rank: int) -> Environment:
    return {"LWS_GROUP_SIZE": str(nodes), "LWS_WORKER_INDEX": str(rank), "LWS_LEADER_ADDRESS": "n1.job.default"}


def skypilot(nodes: int, rank: int) -> Environment:
    hosts = "\n".join(f"10.0.0.{number + 1}" for number in range(nodes))
    return {"SKYPILOT_NODE_IPS": hosts, "SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NODE_RANK": str(rank)}


def open_mpi(nodes: int, rank: int) -> Environment:
    return {
        "OMPI_COMM_WORLD_SIZE": str(nodes),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "MASTER_ADDR": "n1",
    }


def mpich(nodes: int, rank: int) -> Environment:
    return {"PMI_SIZE": str(nodes), "PMI_RANK": str(rank), "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "n1"}


def ray(nodes: int, rank: int) -> Environment:
    size = {"WORLD_SIZE": str(nodes), "LOCAL_WORLD_SIZE": "1", "RANK": str(rank), "LOCAL_RANK": "0"}
    return {**size, "NODE_RANK": str(rank), "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "40001"}


def mpirun_in_slurm(nodes: int, rank: int) -> Environment:
    """mpirun starts its helpers by a step of its own, on all nodes but the first."""
    step = {**slurm(max(1, nodes - 1), max(0, rank - 1)), "SLURM_JOB_NUM_NODES": str(nodes)}
    step["SLURM_JOB_NODELIST"] = f"n[1-{nodes}]"
    return {**step, **open_mpi(nodes, rank)}


CLUSTERS: tuple[Callable[[int, int], Environment], ...] = (
    *(slurm, torchrun, rendezvous, trainer, leader_worker_set, skypilot, open_mpi, mpich, ray, mpirun_in_slurm),
)
SIZES = [(nodes, rank) for nodes in (1, 2, 3, 8) for rank in range(nodes)]


def given(**flags: object) -> Namespace:
    """Flags that a user gave, and the parser's defaults."""
    nothing = {"nproc_per_node": None, "nnodes": "auto", "node_rank": None, "rdzv_endpoint": None, "spare_nodes": 0}
    return Namespace(**{**nothing, "master_address": "127.0.0.1", "master_port": 29500, **flags})


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: cluster.__name__)
@pytest.mark.parametrize(("nodes", "rank"), SIZES)
def test_every_cluster_says_the_same_in_its_own_words(
    cluster: Callable[[int, int], Environment], nodes: int, rank: int
) -> None:
    environment = cluster(nodes, rank)
    number, place, head = read_nodes(environment), read_rank(environment), read_head(environment)
    assert number is not None
    assert place is not None
    assert head is not None
    assert (number.value, place.value) == (nodes, rank)
    assert head.value in ("n1", "n1.job.default", "10.0.0.1")
    assert {number.variable, place.variable, head.variable} <= environment.keys()


@pytest.mark.parametrize("spares", [0, 1, 2])
@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: cluster.__name__)
def test_one_line_on_every_node(cluster: Callable[[int, int], Environment], spares: int) -> None:
    """All nodes come to one head and one number, each to a rank of its own, and the last ones are spares."""
    nodes, places = 4, []
    for rank in range(nodes):
        arguments = given(spare_nodes=spares)
        said = complete_flags(arguments, cluster(nodes, rank))
        assert said.startswith(f"node {rank} of 4")
        assert f"the controller is at {arguments.rdzv_endpoint}" in said
        places.append((arguments.nnodes, arguments.rdzv_endpoint, arguments.node_rank, is_spare(arguments)))
    assert len({(number, endpoint) for number, endpoint, _, _ in places}) == 1
    assert [(rank, spare) for _, _, rank, spare in places] == [(rank, rank >= nodes - spares) for rank in range(nodes)]


# Those whose variables are found in one environment without one replacing the other's.
PAIRS = [
    pair
    for pair in itertools.combinations(CLUSTERS[:-1], 2)
    if pair != (slurm, open_mpi)  # mpirun_in_slurm
    and not (pair[0](3, 1).keys() - {"MASTER_ADDR"}) & pair[1](3, 1).keys()
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "+".join(cluster.__name__ for cluster in pair))
@pytest.mark.parametrize("change", ["none", "nodes", "rank"])
def test_two_clusters_must_agree(pair: tuple[Callable[[int, int], Environment], ...], change: str) -> None:
    """Facts that both clusters set are compared, and a contradiction names both variables."""
    other = pair[1](4 if change == "nodes" else 3, 2 if change == "rank" else 1)
    environment = {**pair[0](3, 1), **other}
    expected = {"none": (3, 1), "nodes": None, "rank": (3, None)}[change]
    if expected is None:
        with pytest.raises(UsageError, match="contradict each other"):
            read_nodes(environment)
        return
    nodes = read_nodes(environment)
    assert nodes is not None
    assert nodes.value == 3
    if change == "rank":
        with pytest.raises(UsageError) as caught:
            read_rank(environment)
        named = [name for name in environment if f"{name}=" in str(caught.value)]
        assert {environment[name] for name in named} == {"1", "2"}
    else:
        rank = read_rank(environment)
        assert rank is not None
        assert rank.value == 1


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: cluster.__name__)
def test_flags_win(cluster: Callable[[int, int], Environment]) -> None:
    """A fact that was given is not read, so it contradicts nothing."""
    arguments = given(nnodes="7", node_rank=6, rdzv_endpoint="elsewhere:1", spare_nodes=1)
    complete_flags(arguments, cluster(3, 1))
    assert (arguments.nnodes, arguments.node_rank, arguments.rdzv_endpoint) == ("7", 6, "elsewhere:1")
    arguments = given(node_rank=0)
    complete_flags(arguments, cluster(3, 1))
    assert (arguments.nnodes, arguments.node_rank) == ("3", 0)


def test_without_auto_nothing_is_read() -> None:
    arguments = given(nnodes=None)
    assert complete_flags(arguments, slurm(4, 2)) == ""
    assert (arguments.nnodes, arguments.node_rank, arguments.nproc_per_node) == ("1", None, "1")


def test_torchruns_variables_are_defaults_as_they_are_for_torchrun() -> None:
    arguments = given(nnodes=None)
    complete_flags(arguments, {**torchrun(2, 1), "PET_NPROC_PER_NODE": "8"})
    assert (arguments.nnodes, arguments.node_rank, arguments.nproc_per_node) == ("2", 1, "8")
    assert arguments.rdzv_endpoint == "n1:29400"
    arguments = given(nnodes="1", nproc_per_node="2")
    assert complete_flags(arguments, {**torchrun(2, 1), "PET_NPROC_PER_NODE": "8"}) == ""
    assert (arguments.nnodes, arguments.node_rank, arguments.nproc_per_node) == ("1", None, "2")


def test_the_rank_of_a_known_number_of_nodes_is_read_if_some_are_spare() -> None:
    arguments = given(nnodes="3", spare_nodes=1)
    complete_flags(arguments, {"JOB_COMPLETION_INDEX": "2", "MASTER_ADDR": "job-0.job"})
    assert arguments.node_rank == 2
    assert is_spare(arguments)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "how many nodes"),
        ({"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NODEID": "0"}, "start it with srun"),
        ({**slurm(3, 1), "SLURM_STEP_TASKS_PER_NODE": "8(x3)"}, "--ntasks-per-node=1"),
        ({**slurm(3, 1), "SLURM_STEP_TASKS_PER_NODE": "1(x2),2"}, "--ntasks-per-node=1"),
        ({**slurm(3, 1), "SLURM_STEP_NUM_NODES": "4"}, "SLURM_STEP_NUM_NODES=4 and SLURM_STEP_NODELIST=n[1-3]"),
        ({**slurm(3, 1), "SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST=n[1- is no list of hosts"),
        ({**slurm(3, 1), "SLURM_NODEID": "x"}, "SLURM_NODEID=x: expected a whole number"),
        ({**slurm(3, 1), "SLURM_NODEID": "3"}, "SLURM_NODEID=3 and SLURM_STEP_NUM_NODES, 3, contradict"),
        ({**slurm(3, 1), "MASTER_ADDR": "n7"}, "MASTER_ADDR=n7 and SLURM_STEP_NODELIST=n[1-3] contradict"),
        ({**slurm(3, 1), "MASTER_ADDR": "localhost"}, "MASTER_ADDR=localhost and SLURM_STEP_NODELIST"),
        ({**torchrun(3, 1), "PET_MASTER_ADDR": "127.0.0.1"}, "PET_MASTER_ADDR=127.0.0.1 and PET_NNODES, 3, contradict"),
        ({**torchrun(3, 1), "PET_NNODES": "1:3"}, "PET_NNODES=1:3: expected one number"),
        ({**torchrun(3, 1), "PET_MASTER_PORT": "70000"}, "PET_MASTER_PORT=70000: expected a port"),
        ({**open_mpi(3, 1), "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "one `relight run` on each node"),
        ({**mpich(3, 1), "MPI_LOCALNRANKS": "4"}, "one `relight run` on each node"),
        ({**ray(8, 1), "LOCAL_WORLD_SIZE": "4"}, "one `relight run` on each node"),
        ({**trainer(3, 1), "JOB_COMPLETION_INDEX": "2"}, "PET_NODE_RANK=1 and JOB_COMPLETION_INDEX=2 contradict"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "where node 0 is reached"),
    ],
)
def test_what_cannot_be_right_is_refused_with_both_names(environment: Environment, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        complete_flags(given(), environment)
    assert words in str(caught.value)


def test_a_name_and_an_address_are_not_compared() -> None:
    head = read_head({**slurm(3, 1), "MASTER_ADDR": "10.0.0.1"})
    assert head == ("10.0.0.1", "MASTER_ADDR")
    assert read_head({**slurm(3, 1), "MASTER_ADDR": "N1.cluster.local"}) == ("N1.cluster.local", "MASTER_ADDR")


def test_pods_of_a_job_set() -> None:
    names = {"JOBSET_NAME": "train", "REPLICATED_JOB_NAME": "node"}
    one_each = {**names, "JOB_INDEX": "2", "JOB_COMPLETION_INDEX": "0"}
    one_job = {**names, "JOB_INDEX": "0", "JOB_COMPLETION_INDEX": "2"}
    assert read_rank(one_each) == (2, "JOB_INDEX")
    assert read_rank(one_job) == (2, "JOB_COMPLETION_INDEX")
    assert read_head(one_each) == ("train-node-0-0.train", "JOBSET_NAME")
    with pytest.raises(UsageError, match="--node-rank"):
        read_rank({**names, "JOB_INDEX": "1", "JOB_COMPLETION_INDEX": "1"})


def test_ports() -> None:
    assert read_port({}) is None
    assert read_port({"SLURM_JOB_ID": "1234567"}) == (24567, "SLURM_JOB_ID")
    assert read_port({"SLURM_JOB_ID": "7", "MASTER_PORT": "29501"}) == (29501, "MASTER_PORT")
    assert read_port({"PET_RDZV_ENDPOINT": "n1:29402", "MASTER_PORT": "29501"}) == (29402, "PET_RDZV_ENDPOINT")
    for address, endpoint in (("fd00::1", "[fd00::1]:29400"), ("n1", "n1:29400")):
        arguments = given()
        complete_flags(arguments, {**torchrun(2, 1), "PET_MASTER_ADDR": address})
        assert arguments.rdzv_endpoint == endpoint
    with pytest.raises(UsageError, match="PET_RDZV_ENDPOINT=n1:1:2: expected HOST:PORT"):
        read_head({"PET_RDZV_ENDPOINT": "n1:1:2"})


def test_a_list_that_only_slurm_understands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="no scontrol on the PATH"):
        expand_list("bgq[000x111]")
    for answer, words in (
        ("echo a1; echo a2", ""),
        ("(echo 'Invalid'; echo hostlist) >&2; exit 1", "Invalid hostlist"),
    ):
        command = tmp_path / "scontrol"
        command.write_text(f"#!/bin/sh\n{answer}\n")
        command.chmod(0o755)
        if words:
            with pytest.raises(ValueError, match=words):
                expand_list("bgq[000x111]")
        else:
            assert expand_list("bgq[000x111]") == ("a1", "a2")
