"""An emulated Kubernetes: an emulated API server, and what controllers and kubelets do with a JobSet and its pods.

A node is a network namespace, a pod a process in it, a claim a directory. Pods are made as the manifest says: again by
`RestartJob` alone, on a node that is free. There is no container, no scheduler and no real clock of Kubernetes.
"""

import asyncio
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from relight.core.account.report import JobReport, decode_report
from tests.clusters.api_server import KUBELET, NAMESPACE, ApiServer, path_of
from tests.hosts.cluster import _MARK, Cluster, kill_at_once
from tests.survival.harness import DEADLINE_SECONDS, PROGRAMS, Outcome, Training, plain_environment

NAME = "relight"
SYNC_SECONDS = 0.1
LEASE_SECONDS = 9
# The files of a pod: temporary ones of its own, names of pods, and its service account.
_FILES = (
    'mount -t tmpfs none "$TMPDIR" && mount --bind "$HOSTS" /etc/hosts && mount -t tmpfs none /run && '
    'mkdir -p /run/secrets/kubernetes.io && cp -r "$ACCOUNT" /run/secrets/kubernetes.io/serviceaccount && exec "$@"'
)


@dataclass
class Job:
    """A Job of one pod, and what its controller knows."""

    group: dict[str, Any]
    number: int  # in the JobSet
    done: bool = False
    pod: str = ""
    made: int = 0
    told_at: float = 0.0  # when its pod got SIGTERM
    ends: list[int] = field(default_factory=list)  # statuses with which its pods ended


class Kubernetes(Cluster):
    """One JobSet on nodes that are namespaces. Use it as a context."""

    def __init__(self, directory: Path, training: Training, nodes: int, spares: int, idle: int) -> None:
        """`idle`: nodes of the cluster beyond those of the job, for pods that are made again."""
        super().__init__(directory, training, nodes, standbys=0, spare=spares + idle + 1)
        self._count = nodes + spares
        *self.nodes, api = self._names
        self.api = ApiServer(self._network.namespaces[api], self._network.addresses[api], directory / "api")
        self.jobs: list[Job] = []
        self.lost: set[str] = set()  # nodes without a kubelet
        self.full: set[str] = set()  # nodes on which no other pod is put
        self._variables: Mapping[int, Mapping[str, str]] = {}
        self.restarts = 0
        self._failure = ""
        self._hosts = directory / "hosts"
        self._account = directory / "account"

    def __enter__(self) -> Self:
        self.api.__enter__()
        for node in self.nodes:
            self.api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
        self._account.mkdir()
        (self._account / "token").write_text("the token of the pods")
        (self._account / "namespace").write_text(NAMESPACE)
        (self._account / "ca.crt").write_bytes(self.api.authority.read_bytes())
        self.api.emulator.tokens["the token of the pods"] = NAME
        self._hosts.write_text("127.0.0.1 localhost\n")
        return self

    def __exit__(self, *arguments: Any) -> None:
        self._stop_syncing()
        super().__exit__(*arguments)
        self.api.__exit__(*arguments)

    # --- the job ----------------------------------------------------------------------------------------------------
    def start(self, *more: str, variables: Mapping[int, Mapping[str, str]] = {}) -> None:
        """Print the manifest with `relight submit k8s`, and hand it to the API server. `variables`: of single nodes."""
        self._variables = variables
        self.manifest = self._submit(more)
        self.api.create(self.manifest)
        (self.job_set,) = self.api.emulator.all("JobSet")
        self.run_dir = self.directory / "runs" / f"{NAME}-{self.job_set['metadata']['uid']}"
        for group in self.job_set["spec"]["replicatedJobs"]:
            self.jobs += [Job(group, len(self.jobs) + index) for index in range(group["replicas"])]
        self._syncing = asyncio.run_coroutine_threadsafe(self._sync_for_ever(), self.api._loop)

    def _submit(self, flags: Sequence[str]) -> dict[str, Any]:
        training, spares = self.training, self._count - self._nodes
        options = (
            *("--nodes", str(self._count), "--spare-nodes", str(spares), "--image", "none"),
            *("--namespace", NAMESPACE, "--claim", f"runs:{self.directory}", "--grace-seconds", "60"),
        )
        run = (
            *("--nproc-per-node", str(training.ranks // self._nodes), "--lease-seconds", str(LEASE_SECONDS)),
            *("--oversubscribe", "--hang-timeout-seconds", "20", "--outside-hang-timeout-seconds", "60"),
            *("--agent-timeout-seconds", "4", *flags),
            *(str(PROGRAMS / training.program), "--steps", str(training.steps), *training.arguments),
            *("--save", str(self._final), "--hold", str(self._hold)),
        )
        command = [sys.executable, "-m", "relight", "submit", "k8s", *options, "--", *run]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        manifest: dict[str, Any] = json.loads(printed)
        return manifest

    # --- what happens -------------------------------------------------------------------------------------------------
    def delete_pod(self, number: int) -> None:
        """`kubectl delete pod`."""
        status, answer = self.api.ask("DELETE", path_of("Pod", self.jobs[number].pod))
        assert status == 200, answer

    def evict_pod(self, number: int) -> None:
        """As `kubectl drain` asks for it."""
        status, answer = self.api.ask("POST", path_of("Pod", self.jobs[number].pod) + "/eviction", {})
        assert status == 201, answer

    def lose_node(self, number: int) -> None:
        """Cut the power of the node on which this pod is."""
        node = self.node_of(number)
        self.lost.add(node)
        self.lose(self._names.index(node))

    def offer_no_device(self, number: int) -> None:
        """Put no other pod on the node of this one: what follows when a device plugin takes a device out of service."""
        self.full.add(self.node_of(number))

    def cordon(self, node: str) -> None:
        """`kubectl cordon`."""
        status, answer = self.api.ask("PATCH", path_of("Node", node), {"spec": {"unschedulable": True}})
        assert status == 200, answer

    def forget_node(self, node: str) -> None:
        """`kubectl delete node`, as the controller of a cloud does once the machine is gone."""
        status, answer = self.api.ask("DELETE", path_of("Node", node))
        assert status == 200, answer

    def node_of(self, number: int) -> str:
        """The node of a pod."""
        return str(self._pod(self.jobs[number])["spec"]["nodeName"])

    def processes_of(self, number: int) -> list[psutil.Process]:
        """The living processes of a pod."""
        return self.processes(self._names.index(self.node_of(number)))

    # --- controllers and kubelets -------------------------------------------------------------------------------------
    async def _sync_for_ever(self) -> None:
        try:
            while True:
                self._sync()
                await asyncio.sleep(SYNC_SECONDS)
        except Exception:
            self._failure = traceback.format_exc()

    def _stop_syncing(self) -> None:
        if hasattr(self, "_syncing"):
            self._syncing.cancel()

    def _sync(self) -> None:
        """Do what has to be done now, as Kubernetes would."""
        nodes = {node["metadata"]["name"] for node in self.api.emulator.all("Node")}
        for job in self.jobs:
            if job.done:
                continue
            if not job.pod:
                self._make_pod(job)
            pod = self._pod(job)
            node = pod["spec"].get("nodeName", "")
            if not node:
                self._schedule(job, sorted(nodes))
            elif node not in nodes:
                self._finish(job, 137)  # its node is gone, and so is what ran there
            elif node not in self.lost:
                self._attend(job, pod)

    def _pod(self, job: Job) -> dict[str, Any]:
        return next(pod for pod in self.api.emulator.all("Pod") if pod["metadata"]["name"] == job.pod)

    def _make_pod(self, job: Job) -> None:
        """Make the pod of a Job, as the controllers of JobSets and Jobs do."""
        index = job.number - next(j.number for j in self.jobs if j.group is job.group)
        job.made, job.told_at = job.made + 1, 0.0
        job.pod = f"{NAME}-{job.group['name']}-{index}-0-{job.made}"
        labels = {
            "jobset.sigs.k8s.io/job-global-index": str(job.number),
            "jobset.sigs.k8s.io/jobset-uid": self.job_set["metadata"]["uid"],
        }
        metadata = {"name": job.pod, "namespace": NAMESPACE, "labels": labels, "finalizers": [KUBELET]}
        spec = job.group["template"]["spec"]["template"]["spec"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": dict(spec)}
        self.api.emulator.add("Pod", pod)

    def _schedule(self, job: Job, nodes: Sequence[str]) -> None:
        taken = {self._pod(other)["spec"].get("nodeName") for other in self.jobs if other.pod and not other.done}
        marked = [node for node in self.api.emulator.all("Node") if node.get("spec", {}).get("unschedulable")]
        cordoned = {node["metadata"]["name"] for node in marked}
        free = [node for node in nodes if node not in taken | self.lost | self.full | cordoned]
        if not free:
            return
        address = self._network.addresses[free[0]]
        self.api.emulator.change("Pod", job.pod, {"spec": {"nodeName": free[0]}, "status": {"podIP": address}})
        known = [line for line in self._hosts.read_text().splitlines() if f" {job.pod[:-2]}." not in line]
        self._hosts.write_text("\n".join([*known, f"{address} {job.pod.rpartition('-')[0]}.{NAME}"]) + "\n")
        self._run(free[0], self._pod(job))

    def _run(self, node: str, pod: dict[str, Any]) -> None:
        (container,) = pod["spec"]["containers"]
        shell, flag, script = container["command"]
        variables = {
            variable["name"]: _field(pod, variable["valueFrom"]["fieldRef"]["fieldPath"])
            for variable in container["env"]
        }
        environment = {
            **plain_environment(),
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "TMPDIR": str(self._temporary),
            "HOSTS": str(self._hosts),
            "ACCOUNT": str(self._account),
            "KUBERNETES_SERVICE_HOST": self.api.address,
            "KUBERNETES_SERVICE_PORT": "6443",
            _MARK: self._mark,
            **variables,
            **self._variables.get(self._names.index(node), {}),
        }
        inside = ("ip", "netns", "exec", self._network.namespaces[node], "unshare", "--mount", "--uts", "sh", "-c")
        host = f'echo "{pod["metadata"]["name"]}" > /proc/sys/kernel/hostname && {_FILES}'
        with (self.directory / f"{node}.out").open("ab") as out, (self.directory / f"{node}.err").open("ab") as err:
            self.launchers[pod["metadata"]["name"]] = subprocess.Popen(
                [*inside, host, "sh", shell, flag, script.replace("/etc/relight/token", str(self._token))],
                cwd=container["workingDir"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def _attend(self, job: Job, pod: dict[str, Any]) -> None:
        """Do a kubelet's work: tell a pod that is deleted, kill it after its time, and report its end."""
        process = self.launchers[job.pod]
        status = process.poll()
        if status is not None:
            self._finish(job, status)
        elif pod["metadata"].get("deletionTimestamp") and not job.told_at:
            job.told_at = time.monotonic()
            process.terminate()
        elif job.told_at and time.monotonic() > job.told_at + pod["spec"]["terminationGracePeriodSeconds"]:
            self._kill(pod["spec"]["nodeName"])

    def _finish(self, job: Job, status: int) -> None:
        """End a pod; its Job fails with it, and the JobSet does what it says."""
        pod = self._pod(job)
        if pod["spec"]["nodeName"] not in self.lost:
            self._kill(pod["spec"]["nodeName"])  # the processes of a container end with it
        self.api.emulator.remove("Pod", job.pod)
        job.ends.append(status)
        if status == 0 and not pod["metadata"].get("deletionTimestamp"):
            job.done = True
            return
        rules = self.job_set["spec"]["failurePolicy"]["rules"]
        action = next(rule["action"] for rule in rules if job.group["name"] in rule["targetReplicatedJobs"])
        assert action == "RestartJob", action
        self.restarts += 1
        assert self.restarts <= self.job_set["spec"]["failurePolicy"]["maxRestarts"], "too many restarts"
        job.pod = ""

    def _kill(self, node: str) -> None:
        kill_at_once(self.processes(self._names.index(node)))

    # --- what can be seen -------------------------------------------------------------------------------------------
    @property
    def is_complete(self) -> bool:
        """True if the JobSet is, by its policy."""
        wanted = self.job_set["spec"]["successPolicy"]["targetReplicatedJobs"]
        return all(job.done for job in self.jobs if job.group["name"] in wanted)

    def messages(self, number: int | None = None) -> str:
        """Lines that relight has printed, on all nodes."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.directory.glob("h*.err")))

    def lease(self) -> dict[str, Any]:
        """The fields of the Lease now."""
        (found,) = self.api.emulator.all("Lease")
        return dict(found.get("spec") or {})

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Look again and again until the condition holds; the job must not end before."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert not self._failure, self._failure
            assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS:g} s: {what}\n{self.describe()}"
            time.sleep(0.05)

    def describe(self) -> str:
        ends = {job.pod or job.number: job.ends for job in self.jobs}
        return f"{ends}\n{self.lease()}\n{self.messages()[-7000:]}\n{self.output()[-1500:]}\n{self.journal()[-1500:]}"

    def wait(self) -> Outcome:
        """Wait until the JobSet is complete."""
        begun = time.monotonic()
        self.wait_until(lambda: self.is_complete, "the JobSet is complete")
        report = self.run_dir / "report.json"
        saved = {path.suffix[1:]: json.loads(path.read_text()) for path in self.directory.glob("final.*")}
        return Outcome(
            command=("kubernetes",),
            status=0,
            stdout=self.output(),
            stderr=self.messages(),
            run_dir=self.run_dir,
            seconds=time.monotonic() - begun,
            report=decode_report(report.read_bytes()) if report.exists() else JobReport(job="", error="no report"),
            finals={int(rank): saved[rank] for rank in sorted(saved) if rank.isdecimal()},
        )

    def check_nothing_is_left(self) -> None:
        """Neither a pod nor a process."""
        self.wait_until(lambda: not list(self.api.emulator.all("Pod")), "no pod is left")
        left = [process for node in self.nodes for process in self.processes(self._names.index(node))]
        _, alive = psutil.wait_procs(left, timeout=10.0)
        assert not alive, f"{[process.cmdline() for process in alive]}\n{self.describe()}"


def _field(pod: dict[str, Any], path: str) -> str:
    """A field of a pod, as the downward API reads it."""
    if path.startswith("metadata.labels["):
        return str(pod["metadata"]["labels"][path.split("'")[1]])
    return str({"status.podIP": pod.get("status", {}).get("podIP"), "spec.nodeName": pod["spec"]["nodeName"]}[path])
