"""A real Slurm on one machine: its controller and each of its nodes in a network namespace with an address.

Needs root, iproute2, and Debian's slurmctld, slurmd, slurm-client and munge. Nothing of it survives its end.
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

import psutil

from benchmarks.namespaces import Network, missing
from tests.hosts.cluster import kill_at_once
from tests.survival.harness import DEADLINE_SECONDS, plain_environment

COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "ip", "nsenter", "unshare")
NODES = ("n1", "n2", "n3", "n4", "n5")
HEAD = "ctl"
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")  # states of a job that is over
# A program reports its host's name to Slurm's controller, which calls back under that name.
_OWN_VIEW = (
    'echo "$NODE" > /proc/sys/kernel/hostname && mount --bind "$HOSTS" /etc/hosts && '
    'mount -t tmpfs none "$TMPDIR" && exec "$@"'
)
_CONFIGURATION = """\
ClusterName=relight
SlurmctldHost={host}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmctldPort=17002
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd-%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout=10
KillWait=10
SchedulerParameters=sched_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Return why there can be no Slurm here, or an empty string."""
    absent = [command for command in COMMANDS if shutil.which(command) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (slurmctld slurmd slurm-client munge iproute2)"
    return missing()


class Slurm:
    """Five nodes. Use it as a context."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="rls-", dir="/tmp"))
        self._temporary = self.base / "tmp"
        self.network = Network([HEAD, *NODES])
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._lost: set[str] = set()
        self._write_configuration()

    def _write_configuration(self) -> None:
        for name in ("state", "spool", "munge", "tmp"):
            (self.base / name).mkdir(mode=0o700)
        (self.base / "munge" / "key").write_bytes(os.urandom(1024))
        (self.base / "munge" / "key").chmod(0o600)
        addresses = self.network.addresses
        lines = [
            f"NodeName={n} NodeHostname={n} NodeAddr={addresses[n]} Port=17003 CPUs=1 State=UNKNOWN" for n in NODES
        ]
        text = _CONFIGURATION.format(
            host=HEAD,
            address=addresses[HEAD],
            base=self.base,
            nodes="\n".join(lines),
            names=",".join(NODES),
        )
        (self.base / "slurm.conf").write_text(text)
        (self.base / "hosts").write_text(
            "".join(f"{a} {n}\n" for n, a in (("localhost", "127.0.0.1"), *addresses.items()))
        )

    @property
    def environment(self) -> dict[str, str]:
        """The variables of its commands and daemons."""
        return {
            **plain_environment(),
            "SLURM_CONF": str(self.base / "slurm.conf"),
            "HOSTS": str(self.base / "hosts"),
            "TMPDIR": str(self._temporary),
        }

    def _inside(self, node: str, *command: str) -> list[str]:
        """Return a command that runs on a node: with its network, its names of hosts, and temporary files of its own.

        Not `ip netns exec`, which hides the control groups that slurmd needs.
        """
        namespace = f"--net=/run/netns/{self.network.namespaces[node]}"
        return [
            "nsenter",
            namespace,
            "unshare",
            "--mount",
            "--uts",
            "env",
            f"NODE={node}",
            "sh",
            "-c",
            _OWN_VIEW,
            "sh",
            *command,
        ]

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self.base / f"{name}.out").open("wb") as out:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def __enter__(self) -> "Slurm":
        munge, conf = self.base / "munge", str(self.base / "slurm.conf")
        files = [f"--{kind}={munge / name}" for kind, name in (("socket", "socket"), ("key-file", "key"))]
        files += [f"--{kind}-file={munge / kind}" for kind in ("pid", "log", "seed")]
        self._start("munged", ["munged", "--foreground", "--force", *files])
        self.wait_until((munge / "socket").exists, "munged answers")
        self._start("slurmctld", self._inside(HEAD, "slurmctld", "-D", "-f", conf))
        for node in NODES:
            (self.base / "spool" / node).mkdir()
            self._start_node(node)
        self.wait_until(lambda: set(self.states().values()) == {"idle"}, "all nodes are idle")
        return self

    def _start_node(self, node: str) -> None:
        self._start(node, self._inside(node, "slurmd", "-D", "-N", node, "-f", str(self.base / "slurm.conf")))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.network.close()  # with all processes in it
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait(10.0)
        shutil.rmtree(self.base, ignore_errors=True)

    # --- commands -------------------------------------------------------------------------------------------------
    def ask(self, *command: str, stdin: str = "", directory: Path | None = None, **variables: str) -> str:
        """Run a command of Slurm on its head; return what it printed."""
        done = subprocess.run(
            self._inside(HEAD, *command),
            env={**self.environment, **variables},
            cwd=directory,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not done.returncode, f"{command}: {done.stderr}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """The state of each node; empty while the controller does not answer."""
        try:
            lines = self.ask("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
        except AssertionError:
            return {}
        return dict(line.split() for line in lines)

    def job_state(self, number: str) -> str:
        """The state of a job, such as RUNNING."""
        found = re.search(r"JobState=(\w+)", self.ask("scontrol", "show", "job", number))
        return found.group(1) if found else ""

    def queue(self) -> str:
        """All jobs that are not over, by name and state."""
        return self.ask("squeue", "-h", "-o", "%j %T %R")

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> float:
        """Look again and again until the condition holds; return the seconds that it took."""
        begun = time.monotonic()
        while not condition():
            assert time.monotonic() - begun < seconds, f"not within {seconds:g} s: {what}"
            time.sleep(0.1)
        return time.monotonic() - begun

    # --- what happens to nodes --------------------------------------------------------------------------------------
    def lose(self, node: str, *, dies: bool = False) -> None:
        """Cut a node off, and kill its slurmd, or all that runs there if it `dies`. It still reaches the storage."""
        self._lost.add(node)
        self._link(node, "down")
        kill_at_once(p for p in self.processes(node) if dies or _name(p) == "slurmd")

    def bring_back(self, node: str) -> None:
        """Start a lost node anew, as a machine is: nothing runs on it but its slurmd."""
        kill_at_once(self.processes(node))
        self._daemons[node].wait(10.0)
        self._link(node, "up")
        self._start_node(node)
        self.wait_until(lambda: self.states().get(node) == "idle", f"{node} is back")
        others = [other for other in NODES if other not in self._lost]
        for ends in [(node, other) for other in others] + [(other, node) for other in others]:
            self.wait_until(partial(self._reaches, *ends), f"{ends[0]} reaches {ends[1]}")
        self._lost.discard(node)

    def complaints(self) -> str:
        """The newest lines of its daemons' logs, without those that only inform, and the neighbours of each node."""
        found = []
        for log in sorted(self.base.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-200:]
            found += [f"{log.stem}: {line}" for line in lines if re.search(r"error|fatal|warning", line)][-15:]
        for node in NODES:
            command = ("ip", "-n", self.network.namespaces[node], "neighbour")
            said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            found.append(f"{node}: {'; '.join(said.splitlines())}")
        return "\n".join(found)

    def clear(self) -> None:
        """Make it as new after a test that failed: no job is left, and every node takes one."""
        self.ask("scontrol", "update", "partitionname=all", "state=up")
        for number in self.ask("squeue", "-h", "-o", "%A").split():
            self.ask("scancel", number)
        for node in sorted(self._lost):
            self.bring_back(node)
        for node, state in self.states().items():
            if state.startswith(("drain", "fail")):
                self.ask("scontrol", "update", f"nodename={node}", "state=resume")
        self.wait_until(lambda: not self.queue(), "no job is left")
        self.wait_until(lambda: set(self.states().values()) == {"idle"}, "all nodes are idle")

    def _link(self, node: str, state: str) -> None:
        port = f"port{[HEAD, *NODES].index(node)}"
        subprocess.run(["ip", "-n", self.network._switch, "link", "set", port, state], check=True, capture_output=True)

    def _reaches(self, node: str, other: str) -> bool:
        """Return whether the slurmd of another node can be reached from a node."""
        connect = f"exec 3<>/dev/tcp/{self.network.addresses[other]}/17003"
        command = [
            "nsenter",
            f"--net=/run/netns/{self.network.namespaces[node]}",
            "timeout",
            "3",
            "bash",
            "-c",
            connect,
        ]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def processes(self, node: str) -> list[psutil.Process]:
        """The living processes of a node."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.network.namespaces[node]], check=True, capture_output=True, text=True
        )
        found = []
        for pid in listed.stdout.split():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def launchers(self, node: str) -> list[psutil.Process]:
        """The `relight run` and `relight agent` of a node."""
        found = []
        for process in self.processes(node):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[1:3] == ["-m", "relight"]:
                    found.append(process)
        return found

    def kill_relight(self, node: str) -> None:
        """Kill all on a node that is not Slurm's."""
        kill_at_once(process for process in self.processes(node) if not _name(process).startswith("slurm"))

    def left_on(self, node: str) -> list[str]:
        """Processes of a node that are not Slurm's own daemon."""
        found = []
        for process in self.processes(node):
            with contextlib.suppress(psutil.Error):
                if process.name() != "slurmd" and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()) or process.name())
        return found


def _name(process: psutil.Process) -> str:
    """The name of a process; empty if it has ended."""
    try:
        return str(process.name())
    except psutil.Error:
        return ""
