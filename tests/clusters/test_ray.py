"""A real Ray of several raylets on this machine: lost nodes, the end by Ctrl-C, and what is refused."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from relight.core.account.report import decode_report
from tests.clusters.quick_start import quick_start
from tests.clusters.ray_jobs import STEPS, Nodes, RayJob
from tests.device.driver import Driver, why_not
from tests.survival.harness import DEADLINE_SECONDS, PROGRAMS, Bench, Outcome, Training, plain_environment

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.cluster.shutdown()


@pytest.fixture
def nodes(cluster: Nodes) -> Nodes:
    cluster.fill()
    return cluster


@pytest.fixture
def start(nodes: Nodes) -> Iterator[Callable[..., RayJob]]:
    jobs: list[RayJob] = []

    def begin(*arguments: Any, **more: Any) -> RayJob:
        jobs.append(RayJob(nodes, *arguments, **more))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """This training on one host, undisturbed."""
    directories = iter([tmp_path_factory.mktemp("reference")])
    return Bench(lambda: next(directories)).reference(Training(ranks=3, steps=STEPS, arguments=("--tell",)))


def test_the_quick_start(nodes: Nodes, tmp_path: Path) -> None:
    """As it stands in the documentation, but for a script that is there, and GPUs, which are not."""
    driver = tmp_path / "driver.py"
    driver.write_text(
        quick_start(
            "Ray",
            "python",
            {
                '"train.py", "--lr", "0.1"': f'"{PROGRAMS}/train.py", "--steps", "20"',
                "nproc_per_node=8, num_gpus=8": 'flags=("--oversubscribe",)',
                '"/shared/runs/mine"': f'"{tmp_path}/run"',
            },
        )
    )
    environment = {**plain_environment(), "RAY_ADDRESS": nodes.cluster.address}
    done = subprocess.run(
        [sys.executable, str(driver)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert f"0 {tmp_path}/run 20" in done.stdout.splitlines(), done.stdout  # among what Ray shows


def test_a_worker_of_ray_train_is_told_what_to_do_instead(nodes: Nodes, tmp_path: Path) -> None:
    pytest.importorskip("ray.train", exc_type=ImportError)
    command = (str(Path(__file__).parent / "drive_ray_train.py"), nodes.cluster.address, str(tmp_path))
    done = subprocess.run(
        [sys.executable, *command],
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    words = "Instead of TorchTrainer(...).fit(), call relight.integrations.ray.run('train.py', nodes=...) in the driver"
    assert f"trainer: {words}" in done.stdout, done.stdout + done.stderr[-6000:]
    assert f"actor: {words}" in done.stdout, done.stdout + done.stderr[-6000:]


@pytest.mark.parametrize("rank", [1, 0], ids=["a rank", "the controller and a rank"])
def test_a_node_is_lost_and_another_one_joins(
    start: Callable[..., RayJob], nodes: Nodes, tmp_path: Path, reference: Outcome, rank: int
) -> None:
    """The spare takes the rank. Ray starts the actor again on a node that is added, which joins as a spare."""
    job = start(tmp_path)
    job.until_it_trains()
    victim = job.keepers()[str(rank)]
    processes = [victim, *victim.children(recursive=True)]
    began = time.monotonic()
    nodes.lose(victim)
    job.wait_until(lambda: "recovered in" in job.output(), "the job trains on")
    print(f"rank {rank}: training again after {time.monotonic() - began:.1f} s, load {os.getloadavg()[0]:.1f}")
    nodes.add()
    seconds = job.wait_until(lambda: "ray-1 joined" in job.output(), "the node that was added has joined")
    print(f"rank {rank}: joined {seconds:.1f} s after a node was added")
    assert not psutil.wait_procs(processes, timeout=10.0)[1]
    report = job.finish(reference)
    assert [failure.rank for failure in report.failures if failure.rank >= 0] == [rank]
    assert report.controller_restarts == int(rank == 0)


@pytest.mark.parametrize("way", ["relight drain", "SIGTERM"])
def test_a_host_is_drained_and_no_step_is_repeated(
    start: Callable[..., RayJob], tmp_path: Path, reference: Outcome, way: str
) -> None:
    """By hand, with the token that the driver was given, or by a signal to `relight run` on that host."""
    token = tmp_path / "token"
    token.write_text("a secret of this test's hosts")
    token.chmod(0o600)
    job = start(tmp_path, variables={"RELIGHT_TOKEN_FILE": str(token)})
    job.until_it_trains()
    keeper = job.keepers()["1"]
    left = keeper.children(recursive=True)
    began = time.monotonic()
    if way == "SIGTERM":
        keeper.terminate()
    else:
        command = ("drain", str(job.run_dir), "node-1", "--token-file", str(token))
        subprocess.run([sys.executable, "-m", "relight", *command], check=True, timeout=DEADLINE_SECONDS)
    job.wait_until(lambda: "node-1 is given back" in job.output(), "the host is given back")
    print(f"drained by {way}: after {time.monotonic() - began:.1f} s, load {os.getloadavg()[0]:.1f}")
    assert not psutil.wait_procs(left, timeout=20.0)[1]
    report = job.finish(reference)
    assert [(failure.rank, failure.kind) for failure in report.failures] == [(1, "drained")]
    (recovery,) = report.recoveries
    assert (recovery.steps_repeated, recovery.steps_undone) == (0, 0)


@pytest.fixture
def drivers(nodes: Nodes, tmp_path: Path) -> Iterator[dict[str, Driver]]:
    """Four nodes with a GPU each and room for two hosts; their drivers by machine."""
    found = {f"rack-{number}": Driver(tmp_path / f"driver-{number}", devices=1) for number in range(4)}
    nodes.clear()
    for machine, driver in found.items():
        device = {"CUDA_VISIBLE_DEVICES": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        nodes.add(2, {**driver.variables, **device, "RELIGHT_MACHINE": machine})
    yield found
    nodes.clear()


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_node_whose_gpu_reports_a_fault_is_left_for_another_one(
    nodes: Nodes, drivers: dict[str, Driver], start: Callable[..., RayJob], tmp_path: Path, reference: Outcome
) -> None:
    """Not for the room that is left on it or on nodes of the job: an actor waits until Ray has one more node."""
    job = start(tmp_path)
    job.until_it_trains()
    machine = job.keepers()["1"].environ()["RELIGHT_MACHINE"]
    drivers[machine].say("xid 0 95")
    job.wait_until(lambda: "node-1 is given back: GPU 0: XID 95" in job.output(), "the host is given back")
    nodes.add(variables={"RELIGHT_MACHINE": "rack-4"})
    seconds = job.wait_until(lambda: "ray-1 joined" in job.output(), "the node that was added has joined")
    print(f"fault: joined {seconds:.1f} s after a node was added, load {os.getloadavg()[0]:.1f}")
    (joined,) = [line for line in job.journal().splitlines() if '"AgentJoined"' in line and '"ray-1"' in line]
    assert '"rack-4"' in joined
    report = job.finish(reference)
    assert [(failure.rank, failure.kind) for failure in report.failures] == [(1, "drained")]
    (recovery,) = report.recoveries
    assert (recovery.steps_repeated, recovery.steps_undone) == (0, 0)
    assert any(machine in text and "XID 95" in text for text in report.notices)


def test_a_keeper_that_is_killed_does_not_end_the_job(
    start: Callable[..., RayJob], tmp_path: Path, reference: Outcome
) -> None:
    """All that was started on the node with the controller is gone, and the actor lives."""
    job = start(tmp_path)
    job.until_it_trains()
    children = job.keepers()["0"].children()
    (keeper,) = [child for child in children if "integrations.ray.keeper" in " ".join(child.cmdline())]
    began = time.monotonic()
    keeper.kill()
    job.wait_until(lambda: "recovered in" in job.output(), "the job trains on")
    print(f"keeper killed: training again after {time.monotonic() - began:.1f} s, load {os.getloadavg()[0]:.1f}")
    job.wait_until(lambda: "ray-1 joined" in job.output(), "the node has joined again")
    report = job.finish(reference)
    assert report.controller_restarts == 1
    assert [failure.rank for failure in report.failures if failure.rank >= 0] == [0]


def test_ctrl_c_leaves_nothing(start: Callable[..., RayJob], tmp_path: Path) -> None:
    job = start(tmp_path)
    job.until_it_trains()
    processes = job.processes()
    assert len(processes) > 8
    job.driver.send_signal(signal.SIGINT)
    assert job.driver.wait(DEADLINE_SECONDS) != 0
    assert "KeyboardInterrupt" in job.output()
    assert "stopped" in decode_report((job.run_dir / "report.json").read_bytes()).error
    job.check_nothing_is_left(processes)


def test_a_driver_that_is_killed_leaves_nothing(start: Callable[..., RayJob], tmp_path: Path) -> None:
    job = start(tmp_path)
    job.until_it_trains()
    processes = job.processes()
    job.driver.kill()
    job.check_nothing_is_left(processes)


def test_a_host_is_ordered_of_ray_and_given_back(nodes: Nodes, tmp_path: Path) -> None:
    """The job runs beside Ray; its machine has a name of its own, since here all nodes of Ray are one machine."""
    token, hold, errors = tmp_path / "token", tmp_path / "go", tmp_path / "err"
    token.write_text("a secret of this test's hosts")
    token.chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = ("--rdzv-endpoint", endpoint, "--token-file", str(token), "--run-dir", str(tmp_path / "run"))
    supply = ("--supplier", "ray", "--supply-spares", "1", "--standby", "1", "--oversubscribe", "--preload", "torch")
    program = (str(PROGRAMS / "train.py"), "--steps", "20", "--hold-at", "10", "--hold", str(hold))
    environment = {**plain_environment(), "RAY_ADDRESS": nodes.cluster.address, "RELIGHT_MACHINE": "beside-ray"}
    with errors.open("wb") as out:
        job = subprocess.Popen(
            [sys.executable, "-m", "relight", "run", "--nnodes", "1", *flags, *supply, *program],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=out,
        )
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while "ordered-1 joined" not in errors.read_text():
            assert job.poll() is None, errors.read_text()
            assert time.monotonic() < deadline, errors.read_text()
            time.sleep(0.1)
        hold.touch()
        assert job.wait(DEADLINE_SECONDS) == 0, errors.read_text()
    finally:
        job.kill()
        job.wait(10.0)
    look = (
        "import ray\nray.init(address='auto', log_to_driver=False)\n"
        "print(*(actor['name'] for actor in ray.util.list_named_actors(all_namespaces=True)))"
    )
    left = subprocess.run([sys.executable, "-c", look], env=environment, capture_output=True, text=True, check=True)
    assert "relight-run-ordered" not in left.stdout


def test_a_script_that_raises_is_told(start: Callable[..., RayJob], tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text("import relight\njob = relight.init()\nraise ValueError('the data is gone')\n")
    job = start(tmp_path, str(script))
    assert job.driver.wait(DEADLINE_SECONDS) == 3, job.output()
    failure = job.output()[job.output().index("RunFailed") :]
    assert "ValueError: the data is gone" in failure
    assert "Traceback" in failure
    assert f"run directory: {job.run_dir}" in failure


def test_nodes_that_ray_does_not_have_are_named(start: Callable[..., RayJob], tmp_path: Path) -> None:
    job = start(tmp_path, cpus="2", seconds="8")
    assert job.driver.wait(DEADLINE_SECONDS) == 1
    assert "waiting for Ray to have 4 nodes with {'CPU': 2.0} each free, at most 8 s" in job.output()
    assert "did not have 4 nodes with {'CPU': 2.0} each free within 8 s" in job.output()


def test_what_is_wrong_is_said_before_anything_is_started(tmp_path: Path) -> None:
    from relight.errors import UsageError
    from relight.integrations.ray import jobs as integration

    script = str(PROGRAMS / "train.py")
    with pytest.raises(UsageError, match="Ray is not initialised"):
        integration.run(script, nodes=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration, "VERSION", "1.0.")
        with pytest.raises(UsageError, match=r"tried with Ray 1.0.x, and this is 2.60.0"):
            integration.run(script, nodes=2)
    for content, words in ((None, "No such file"), ("two\nlines\n", "expected one line"), ("", "expected one line")):
        token = tmp_path / "token"
        if content is not None:
            token.write_text(content)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RELIGHT_TOKEN_FILE", str(token))
            with pytest.raises(UsageError, match=words):
                integration._find_token()
