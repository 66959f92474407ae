"""A real Ray of several raylets on this machine: lost nodes, the end by Ctrl-C, and what is refused."""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from relight.core.account.report import JobReport, decode_report
from tests.survival.harness import DEADLINE_SECONDS, PROGRAMS, Bench, Outcome, Training, plain_environment

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray"),
    pytest.mark.timeout(600),
]
STEPS = 305
PAUSED = ("--pause", "0.2", "--tell", "--hold-at", str(STEPS - 5))
STORE = 100 * 2**20  # bytes of Ray's object store
DRIVER = Path(__file__).parent / "drive_ray.py"


class Nodes:
    """Ray's head, which runs nothing, and four nodes with a processor each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE}
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(4):
            self.add()

    def add(self) -> None:
        """Add a node."""
        self.cluster.add_node(num_cpus=1, object_store_memory=STORE)

    def fill(self) -> None:
        """Have four nodes again."""
        while len(self.cluster.worker_nodes) < 4:
            self.add()

    def lose(self, process: psutil.Process) -> None:
        """Kill the node whose raylet is an ancestor of this process."""
        ancestors = {parent.pid for parent in process.parents()}
        (node,) = [
            node
            for node in self.cluster.worker_nodes
            if ancestors & {info.process.pid for info in node.all_processes["raylet"]}
        ]
        self.cluster.remove_node(node, allow_graceful=False)


class RayJob:
    """A driver as a process, and all that it has started."""

    def __init__(
        self,
        nodes: Nodes,
        directory: Path,
        *script: str,
        cpus: str = "1",
        seconds: str = "60",
        variables: Mapping[str, str] = {},
    ) -> None:
        """`variables`: added to those of the driver."""
        self.run_dir, self._output, self._hold = directory / "run", directory / "out", directory / "go"
        self._final = directory / "final"
        program = script or (
            *(str(PROGRAMS / "train.py"), "--steps", str(STEPS), *PAUSED),
            *("--save", str(self._final), "--hold", str(self._hold)),
        )
        address = nodes.cluster.address
        with self._output.open("wb") as out:
            self.driver = subprocess.Popen(
                [sys.executable, str(DRIVER), address, str(self.run_dir), cpus, seconds, *program],
                env={**plain_environment(), "RAY_DEDUP_LOGS": "0", **variables},
                stdout=out,
                stderr=out,
            )

    def output(self) -> str:
        """All that the driver and, through Ray, relight and the workers have printed."""
        return self._output.read_text(errors="replace")

    def journal(self) -> str:
        """The journal so far."""
        path = self.run_dir / "journal.jsonl"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_until(self, condition: Callable[[], bool], what: str, *, running: bool = True) -> float:
        """Look again and again; return the seconds that it took. The driver must not end before."""
        begun = time.monotonic()
        while not condition():
            is_late = time.monotonic() - begun > DEADLINE_SECONDS
            if is_late or (running and self.driver.poll() is not None):
                raise AssertionError(f"{what}\n{self.output()[-6000:]}")
            time.sleep(0.05)
        return time.monotonic() - begun

    def until_it_trains(self) -> None:
        """Wait for the third step and the warm standby."""
        self.wait_until(lambda: "committed 3" in self.output(), "training has begun")
        self.wait_until(lambda: '"StandbyReady"' in self.journal(), "the standby is warm")

    def keepers(self) -> dict[str, psutil.Process]:
        """The living process between an actor and `relight`, by the number of the node or the command."""
        found = dict[str, psutil.Process]()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if "relight.integrations.ray.keeper" in line and str(self.run_dir) in " ".join(line):
                    found.setdefault(line[line.index("--node-rank") + 1] if "--node-rank" in line else "", process)
        return found

    def processes(self) -> list[psutil.Process]:
        """All living processes that have to do with this job's run directory, or come from those that do."""
        roots = list(self.keepers().values())
        return [child for root in roots for child in (root, *root.children(recursive=True))]

    def finish(self, reference: Outcome) -> JobReport:
        """Let the job end; it must have the bits of an undisturbed run, and leave nothing."""
        self._hold.touch()
        left = self.processes()
        assert self.driver.wait(DEADLINE_SECONDS) == 0, self.output()[-6000:]
        assert "finished with status 0" in self.output()
        self.check_nothing_is_left(left)
        finals = {
            int(path.suffix[1:]): json.loads(path.read_text()) for path in self._final.parent.glob("final.[0-9]*")
        }
        assert finals == reference.finals
        report = decode_report((self.run_dir / "report.json").read_bytes())
        assert report.final_state_digest == reference.report.final_state_digest
        return report

    def check_nothing_is_left(self, processes: list[psutil.Process]) -> None:
        """Neither a process nor a private directory."""
        _, alive = psutil.wait_procs(processes, timeout=20.0)
        assert not alive, alive
        self.wait_until(lambda: not list(Path("/tmp").glob("rlray-*")), "no private directory", running=False)

    def end(self) -> None:
        """End the driver, whatever it does; Ray then ends its actors."""
        if self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait(10.0)


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
