"""A real Ray of several raylets on this machine, and jobs on it."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from relight.core.account.report import JobReport, decode_report
from tests.survival.harness import DEADLINE_SECONDS, PROGRAMS, Outcome, plain_environment

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

    def add(self, cpus: int = 1, variables: Mapping[str, str] = {}) -> None:
        """Add a node. `variables`: of all that runs there."""
        self.cluster.add_node(num_cpus=cpus, object_store_memory=STORE, env_vars=dict(variables))

    def clear(self) -> None:
        """Remove all nodes but the head."""
        for node in list(self.cluster.worker_nodes):
            self.cluster.remove_node(node)

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
