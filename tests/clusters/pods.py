"""An emulated Kubernetes: the pods of a JobSet as processes, each in a network namespace. There is no control plane.

What is taken from the manifest is what a pod runs and gets, and what becomes of a Job that fails.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.hosts.cluster import _MARK, _OWN_FILES, Cluster
from tests.survival.harness import PROGRAMS, plain_environment

NAME = "relight"


class Pods(Cluster):
    """The pods of one JobSet. Pod 0 is the head; the last ones are spares."""

    def start(self, *more: str) -> None:
        """Print the manifest with `relight submit k8s`, and start its pods."""
        self.manifest = self._submit(more)
        for number in range(len(self._names)):
            self.make(number)

    def _submit(self, flags: Sequence[str]) -> dict[str, Any]:
        training, spares = self.training, len(self._names) - self._nodes
        options = ("--nodes", str(len(self._names)), "--spare-nodes", str(spares), "--image", "none")
        run = (
            *("--nproc-per-node", str(training.ranks // self._nodes), "--run-dir", str(self.run_dir)),
            *("--oversubscribe", "--hang-timeout-seconds", "20", "--outside-hang-timeout-seconds", "60"),
            *("--agent-timeout-seconds", "2", *flags),
            *(str(PROGRAMS / training.program), "--steps", str(training.steps), *training.arguments),
            *("--save", str(self._final), "--hold", str(self._hold)),
        )
        command = [sys.executable, "-m", "relight", "submit", "k8s", *options, "--", *run]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        manifest: dict[str, Any] = json.loads(printed)
        return manifest

    def make(self, number: int) -> None:
        """Start a pod: names are addresses here, and the Secret lies elsewhere."""
        head, node = self.manifest["spec"]["replicatedJobs"]
        group = node if number else head
        (container,) = group["template"]["spec"]["template"]["spec"]["containers"]
        shell, flag, script = container["command"]
        script = script.replace(f"{NAME}-head-0-0.{NAME}", self.address(0)).replace("/etc/relight/token", self.token)
        name = self._names[number]
        environment = {
            **plain_environment(),
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "TMPDIR": str(self._temporary),
            _MARK: self._mark,
            "NODE_RANK": str(number),
            "POD_IP": self.address(number),
            "RELIGHT_MACHINE": name,
        }
        inside = ("ip", "netns", "exec", self._network.namespaces[name], "unshare", "--mount", "sh", "-c", _OWN_FILES)
        with (self.directory / f"{name}.out").open("ab") as out, (self.directory / f"{name}.err").open("ab") as err:
            self.launchers[name] = subprocess.Popen(
                [*inside, "sh", shell, flag, script],
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def token(self) -> str:
        """Where the Secret lies."""
        return str(self._token)

    def make_again(self, number: int, seconds: float) -> int:
        """Wait for the end of a pod, and do what the manifest says; return the status with which the pod ended."""
        status = self.launchers[self._names[number]].wait(seconds)
        rules = {
            rule["targetReplicatedJobs"][0]: rule["action"] for rule in self.manifest["spec"]["failurePolicy"]["rules"]
        }
        if status and rules["node"] == "RestartJob":
            self.make(number)
        return status
