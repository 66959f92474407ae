"""Jobs on hosts of a placement group: their actors, from the start to the end."""

import contextlib
import datetime
import importlib.metadata
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from relight.core.account.report import JobReport
from relight.errors import UsageError
from relight.timeline.model.load import load_report
from relight.wire.connection.address import bracketed, read_address

VERSION = "2.60."
TOKEN_FILE = "RELIGHT_TOKEN_FILE"
POLL_SECONDS = 0.5
START_SECONDS = 120.0  # for an actor to answer for the first time
END_SECONDS = 30.0  # for a job to end in order
LEAVE_SECONDS = 10.0  # for the processes of the other hosts, once the job has ended
FAULT_STATUS = 75  # of a host that is left since its hardware has reported a fault
_KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True)
class Result:
    """The end of a job: the exit status of `relight`, the run directory, and the report, if there is one."""

    status: int
    run_dir: str
    report: JobReport | None


class RunFailed(Exception):
    """A job did not finish. Its text has the traceback of the script, if that was the cause."""

    def __init__(self, text: str, result: Result) -> None:
        super().__init__(text)
        self.result = result


@dataclass(frozen=True)
class Shape:
    """The hosts of a job, and what runs on each. `flags` are those of `relight run`."""

    nodes: int
    spare_nodes: int
    nproc_per_node: int
    num_cpus: float
    num_gpus: float
    flags: tuple[str, ...]

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one host."""
        asked = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return {name: amount for name, amount in asked.items() if amount}


def run(
    script: str,
    *arguments: str,
    nodes: int,
    spare_nodes: int = 0,
    nproc_per_node: int = 1,
    num_cpus: float = 1,
    num_gpus: float = 0,
    run_dir: str | None = None,
    flags: Sequence[str] = (),
    placement_seconds: float = 300.0,
) -> Result:
    """Train a script on a cluster of Ray, through failures, and return its result once it has finished.

    `nodes` hold ranks, and `spare_nodes` more wait for one of them to be lost; each is a node of Ray of its own, with
    `num_cpus` and `num_gpus`. `flags` are further ones of `relight run`. `run_dir` must lie on storage that all nodes
    share. Raises UsageError for what cannot be started, RunFailed for a job that does not finish.
    """
    ray = import_ray()
    if not ray.is_initialized():
        raise UsageError("Ray is not initialised: call ray.init(address='auto') first")
    if nodes < 1 or spare_nodes < 0 or nproc_per_node < 1 or num_cpus <= 0 or num_gpus < 0:
        raise UsageError("relight on Ray needs nodes >= 1, spare_nodes >= 0, nproc_per_node >= 1 and num_cpus > 0")
    if not Path(script).is_file():
        raise UsageError(f"there is no script {script} (at {Path(script).absolute()})")
    shape = Shape(nodes, spare_nodes, nproc_per_node, num_cpus, num_gpus, tuple(flags))
    directory = Path(run_dir or f"runs/{Path(script).stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}").absolute()
    token = _find_token()
    group = _place(ray, shape, placement_seconds)
    job = _Job(ray, group, shape, directory, token)
    try:
        return job.run((str(Path(script).absolute()), *arguments))
    finally:
        job.remove()


def _find_token() -> str:
    """Return the secret of the job's hosts: that of the driver's RELIGHT_TOKEN_FILE, or a new one. Raises UsageError.

    Who has the file can drain a host by hand.
    """
    path = os.environ.get(TOKEN_FILE, "")
    if not path:
        return secrets.token_hex(32)
    try:
        lines = Path(path).read_text().strip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{TOKEN_FILE}={path}: {error}") from error
    if len(lines) != 1:
        raise UsageError(f"{TOKEN_FILE}={path}: expected one line, such as head -c 32 /dev/urandom | base64 prints")
    return lines[0]


def import_ray() -> Any:
    """Return the module, if it is one that was tried, and this is no client of a cluster. Raises UsageError."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError("Ray is not installed: pip install 'relight[ray]'") from None
    if not version.startswith(VERSION):
        raise UsageError(f"relight was tried with Ray {VERSION}x, and this is {version}; pip install 'relight[ray]'")
    import ray
    from ray.util.client import ray as client

    if client.is_connected():
        raise UsageError(
            "this is a client of Ray (ray://): submit the script that calls relight with `ray job submit`, so that it "
            "runs inside the cluster"
        )
    return ray


def _place(ray: Any, shape: Shape, seconds: float) -> Any:
    """Return a placement group with a node for each host. Raises UsageError if there is none in time."""
    from ray.util import placement_group, remove_placement_group

    count = shape.nodes + shape.spare_nodes
    group = placement_group([shape.bundle] * count, strategy="STRICT_SPREAD")
    if group.wait(min(5.0, seconds)):
        return group
    wanted = f"{count} nodes with {shape.bundle} each"
    _say(f"waiting for Ray to have {wanted} free, at most {seconds:g} s")
    try:
        if group.wait(max(0.0, seconds - 5.0)):
            return group
    except BaseException:
        remove_placement_group(group)
        raise
    remove_placement_group(group)
    here = [{name: node["Resources"].get(name, 0) for name in shape.bundle} for node in ray.nodes() if node["Alive"]]
    raise UsageError(f"Ray did not have {wanted} free within {seconds:g} s; its nodes have, in use or free: {here}")


class Host:
    """An actor on one host, which has a process of `relight` or none."""

    def __init__(self, token: str, command: tuple[str, ...] | None = None, port: int = 0) -> None:
        """`command`: a controller, started at once, also if Ray starts this actor again. It listens at `port`."""
        self._token = token
        self._process: subprocess.Popen[bytes] | None = None
        if command is not None:
            self.start((*command, f"{bracketed(self.address())}:{port}"))

    def address(self) -> str:
        """Return the address at which the other hosts reach this one."""
        from ray.util import get_node_ip_address

        return str(get_node_ip_address())

    def free_port(self) -> int:
        """Return a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def start(self, command: tuple[str, ...], directory: str | None = None) -> None:
        """Start `relight` with these arguments. Its output goes where Ray shows that of the actor."""
        keeper = (sys.executable, "-P", "-m", "relight.integrations.ray.keeper")
        self._process = subprocess.Popen(
            (*keeper, sys.executable, "-m", "relight", *command),
            stdin=subprocess.PIPE,
            cwd=directory,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._token}\n".encode())
        self._process.stdin.flush()  # and never closed: its end says that this actor is gone

    def poll(self) -> tuple[bool, int | None, str]:
        """Return whether a process was started here, its exit status if it has ended, and Ray's number of the node."""
        from ray import get_runtime_context

        status = None if self._process is None else self._process.poll()
        return self._process is not None, status, get_runtime_context().get_node_id()

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


class _Job:
    """The actors of one job, from the start to the end."""

    def __init__(self, ray: Any, group: Any, shape: Shape, run_dir: Path, token: str) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self._group, self._shape, self._run_dir = ray, group, shape, run_dir
        self._token = token
        self._actor = ray.remote(Host)
        self._hosts = [
            self._actor.options(
                num_cpus=shape.num_cpus,
                num_gpus=shape.num_gpus,
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            ).remote(self._token)
            for index in range(shape.nodes + shape.spare_nodes)
        ]
        self._chief = self._hosts[0]  # the one with the controller
        self._endpoint = ("", 0)
        self._asked: dict[Any, Any] = {}  # actors, by what they were asked
        self._nodes: dict[Any, str] = {}  # Ray's numbers of the nodes, by actor
        self._avoided: set[str] = set()  # nodes whose hardware has reported a fault
        self._agents = 0

    def run(self, script: tuple[str, ...]) -> Result:
        """Start everything, and return the result of the job. Raises RunFailed."""
        try:
            self._start(script)
            status = self._follow()
        except self._ray.exceptions.RayActorError as error:
            raise self._failed(f"a host was lost while the job was started: {error}", 1) from error
        except self._ray.exceptions.GetTimeoutError as error:
            raise self._failed(f"the actors did not start within {START_SECONDS:g} s", 1) from error
        except KeyboardInterrupt:
            self._end()
            raise
        if status:
            raise self._failed(f"relight ended with status {status}", status)
        self._await_leaving()
        return Result(0, str(self._run_dir), _read_report(self._run_dir))

    def _start(self, script: tuple[str, ...]) -> None:
        get = self._ray.get
        address, port = get([self._chief.address.remote(), self._chief.free_port.remote()], timeout=START_SECONDS)
        self._endpoint = (address, port)
        shape = self._shape
        for rank, host in enumerate(self._hosts):
            place = (
                "--nnodes",
                str(len(self._hosts)),
                "--node-rank",
                str(rank),
                "--spare-nodes",
                str(shape.spare_nodes),
            )
            where = ("--rdzv-endpoint", f"{bracketed(address)}:{port}", "--run-dir", str(self._run_dir))
            size = ("--nproc-per-node", str(shape.nproc_per_node))
            ends = ("--controller-moves", "--fault-status", str(FAULT_STATUS))
            command = ("run", *place, *where, *size, *ends, *shape.flags, *script)
            get(host.start.remote(command, os.getcwd()), timeout=START_SECONDS)

    def _follow(self) -> int:
        """Wait for the end of the process with the controller, wherever that is; return its exit status."""
        while True:
            self._ask()
            ready, _ = self._ray.wait(list(self._asked), num_returns=len(self._asked), timeout=POLL_SECONDS)
            for ref in ready:
                status = self._take(self._asked.pop(ref), ref)
                if status is not None:
                    return status
            time.sleep(POLL_SECONDS if ready else 0.0)

    def _ask(self) -> None:
        actors = self._hosts if self._chief in self._hosts else [*self._hosts, self._chief]
        waiting = list(self._asked.values())
        self._asked.update({actor.poll.remote(): actor for actor in actors if actor not in waiting})

    def _take(self, actor: Any, ref: Any) -> int | None:
        """Act on the answer of an actor; return the exit status of the job, once it has one."""
        status: int | None
        try:
            started, status, self._nodes[actor] = self._ray.get(ref)
        except self._ray.exceptions.RayActorError:
            if actor is self._hosts[0] and actor is self._chief:
                self._move_controller()
            return None
        is_empty = not started or status == _KILLED  # Ray has started the actor again, or its process was killed
        if actor is self._chief:
            if not is_empty or (not started and actor not in self._hosts):
                return status
            self._move_controller()
        if is_empty and actor in self._hosts:
            self._start_agent(actor)
        elif status == FAULT_STATUS and actor in self._hosts:
            self._replace(actor)
        return None

    def _replace(self, actor: Any) -> None:
        """Give up a node whose hardware has reported a fault, and ask Ray for another one, which may have to come."""
        from ray.util.scheduling_strategies import NodeLabelSchedulingStrategy, NotIn

        self._avoided.add(self._nodes[actor])
        taken = {self._nodes[host] for host in self._hosts if host in self._nodes}
        where = NodeLabelSchedulingStrategy(hard={"ray.io/node-id": NotIn(*sorted(taken | self._avoided))})
        shape = self._shape
        options = self._actor.options(
            num_cpus=shape.num_cpus, num_gpus=shape.num_gpus, max_restarts=-1, scheduling_strategy=where
        )
        self._hosts[self._hosts.index(actor)] = options.remote(self._token)
        self._ray.kill(actor)

    def _start_agent(self, actor: Any) -> None:
        """Let a node join on which Ray has started a lost actor again, or on which all was killed."""
        self._agents += 1
        address, port = read_address(self._run_dir) or self._endpoint
        command = ("agent", "--controller", f"{bracketed(address)}:{port}", "--name", f"ray-{self._agents}")
        actor.start.remote(command, os.getcwd())

    def _move_controller(self) -> None:
        """Start an actor with the controller's successor, on any node. Ray restarts it if that is lost as well."""
        _say("the host with the controller is lost; another one takes over")
        command = ("controller", str(self._run_dir), "--take-over", "--listen")
        options = self._actor.options(num_cpus=0, max_restarts=-1, scheduling_strategy="SPREAD")
        self._chief = options.remote(self._token, command, self._endpoint[1])

    # --- the end --------------------------------------------------------------------------------------------------
    def _end(self) -> None:
        """End the job in order, if its controller still answers."""
        _say("ending the job")
        with contextlib.suppress(Exception):
            self._ray.get(self._chief.signal.remote(signal.SIGINT), timeout=END_SECONDS)
            self._await_leaving(END_SECONDS)

    def _await_leaving(self, seconds: float = LEAVE_SECONDS) -> None:
        """Wait for the processes on all hosts to end by themselves; what is left is killed with the actors."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            refs = [actor.poll.remote() for actor in self._hosts]
            ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=POLL_SECONDS)
            states = list[tuple[bool, int | None, str]]()
            for ref in ready:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    states.append(self._ray.get(ref))
            if all(status is not None or not started for started, status, _ in states):
                return
            time.sleep(POLL_SECONDS)

    def remove(self) -> None:
        """Give everything back to Ray. The processes of an actor end with it."""
        from ray.util import remove_placement_group

        with contextlib.suppress(self._ray.exceptions.RayError):
            for actor in {*self._hosts, self._chief}:
                self._ray.kill(actor)
            remove_placement_group(self._group)

    def _failed(self, text: str, status: int) -> RunFailed:
        report = _read_report(self._run_dir)
        why = report.error if report is not None and report.error else text
        details = _read_details(self._run_dir)
        told = "\n".join(filter(None, (why, details, f"run directory: {self._run_dir}")))
        return RunFailed(told, Result(status, str(self._run_dir), report))


def _read_report(run_dir: Path) -> JobReport | None:
    found = load_report(run_dir)
    return found if isinstance(found, JobReport) else None


def _read_details(run_dir: Path) -> str:
    """Return what the journal says about the end of the job: the traceback of a script that raised."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        for line in reversed((run_dir / "journal.jsonl").read_bytes().splitlines()):
            command = msgspec.json.decode(line).get("command") or {}
            if command.get("type") == "EndJob":
                return str(command.get("details", ""))
    return ""


def _say(text: str) -> None:
    print(f"relight: {text}", file=sys.stderr, flush=True)
