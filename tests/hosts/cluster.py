"""Jobs on several hosts: network namespaces on one switch, each with its own address and temporary files.

A host can be lost (its line is cut, then all its processes are killed), cut off for a while, or cut off from the
controller alone. Pathname sockets would reach across namespaces, so each host also has its own view of the directory
for temporary files: what is not on the network is not there.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from benchmarks.namespaces import Network
from relight.core.account.report import JobReport, decode_report
from relight.wire.template import SHARED_VARIABLE
from tests.certificates import Authority, flags
from tests.survival.harness import (
    DEADLINE_SECONDS,
    GONE_SECONDS,
    PRELOADED,
    PROGRAMS,
    Outcome,
    Training,
    plain_environment,
    template_socket,
)

PORT = 29400
REACH_SECONDS = 2  # then a host is given up
_MARK = "RELIGHT_TEST_JOB"
_OWN_FILES = 'mount -t tmpfs none "$TMPDIR" && exec "$@"'


def kill_at_once(processes: Iterable[psutil.Process]) -> None:
    """End processes as a host that loses power does: none of them hears, or writes down, that another one is gone."""
    listed = list(processes)
    for strike in (signal.SIGSTOP, signal.SIGKILL):
        for process in listed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(strike)


class Cluster:
    """Hosts and the job on them. Use it as a context: nothing of either survives its end."""

    def __init__(
        self,
        directory: Path,
        training: Training,
        hosts: int,
        *,
        standbys: int,
        spare: int = 0,
        tls: bool = False,
        own_run_dirs: bool = False,
    ) -> None:
        """`hosts` share the ranks; `spare` more have an address, and join when they are told to.

        `own_run_dirs`: what is in the run directory on the first host is not seen on the others.
        """
        self._own_run_dirs = own_run_dirs
        self.training = training
        self.directory = directory
        self.run_dir = directory / "run"
        self._names = [f"h{number}" for number in range(hosts + spare)]
        self._nodes = hosts
        self._standbys = standbys
        self._network = Network(self._names)
        self._mark = uuid.uuid4().hex
        self._final = directory / "final"
        self._hold = directory / "go"
        self._temporary = Path(tempfile.mkdtemp(prefix="rlh-", dir="/tmp"))
        self._token = directory / "token"
        directory.mkdir(parents=True, exist_ok=True)
        self._token.write_text("a secret of this test's hosts")
        self._token.chmod(0o600)
        authority = Authority(directory / "tls") if tls else None
        self._certificates = {
            name: () if authority is None else flags(authority.issue(name, address))
            for name, address in self._network.addresses.items()
        }
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}
        self.chief = "h0"  # what runs the job's controller

    @property
    def endpoint(self) -> str:
        """The address at which the controller listens."""
        return f"{self._network.addresses[self._names[0]]}:{PORT}"

    # --- the job ----------------------------------------------------------------------------------------------------
    def start(self, *more: str, variables: Mapping[int, Mapping[str, str]] = {}) -> None:
        """`relight run` on every host that shares the ranks, as a user would start it. `variables`: of single hosts."""
        for number in range(self._nodes):
            where = ("--nnodes", str(self._nodes), "--node-rank", str(number), "--rdzv-endpoint", self.endpoint)
            flags = (*where, "--standby", str(self._standbys), *more)
            self._start_on(number, *flags, variables=variables.get(number, {}))

    def start_by_variables(self, number: int, variables: Mapping[str, str]) -> None:
        """Run the line that is the same on every node of a cluster: all that differs is in the environment."""
        spares = len(self._names) - self._nodes
        self._start_on(number, "--nnodes", "auto", "--spare-nodes", str(spares), variables=variables)

    def address(self, number: int) -> str:
        """The address of a host."""
        return self._network.addresses[self._names[number]]

    def _start_on(self, number: int, *flags: str, variables: Mapping[str, str] = {}) -> None:
        self.run_on(
            number,
            *("run", "--nproc-per-node", str(self.training.ranks // self._nodes)),
            *("--run-dir", str(self.run_dir), "--token-file", str(self._token), "--oversubscribe"),
            *("--hang-timeout-seconds", "20", "--outside-hang-timeout-seconds", "60"),
            *("--agent-timeout-seconds", str(REACH_SECONDS), *flags),
            *PRELOADED,
            *self._certificates[self._names[number]],
            *(str(PROGRAMS / self.training.program), "--steps", str(self.training.steps)),
            *self.training.arguments,
            *("--save", str(self._final), "--hold", str(self._hold)),
            variables=variables,
        )

    def join(self, number: int) -> None:
        """`relight agent` on a spare host."""
        self.run_on(
            number,
            *("agent", "--controller", self.endpoint, "--name", f"spare-{number}", "--token-file", str(self._token)),
            *self._certificates[self._names[number]],
        )

    def ordering(self, number: int) -> str:
        """A command for `--supplier` that has `relight agent` run on this host, and ends it to cancel."""
        namespace = self._network.namespaces[self._names[number]]
        script = self.directory / "order.sh"
        agent = f'{sys.executable} -m relight.cli agent --controller "$RELIGHT_CONTROLLER" --name "$RELIGHT_ORDER"'
        script.write_text(
            f'echo "$RELIGHT_ACTION $RELIGHT_ORDER $RELIGHT_ORDER_ID" >> {self.directory}/orders\n'
            f'if [ "$RELIGHT_ACTION" = cancel ]; then kill "$RELIGHT_ORDER_ID" || true; exit 0; fi\n'
            f"ip netns exec {namespace} unshare --mount sh -c '{_OWN_FILES}' sh {agent} "
            f"> {self.directory}/h{number}.out 2> {self.directory}/h{number}.err &\n"
            "echo $!\n"
        )
        return f"sh {script}"

    def go_on(self, number: int, *flags: str) -> None:
        """`relight controller` on this host, by hand, because that of the first one is gone or frozen."""
        self.chief = f"h{number}-controller"
        listen = f"{self._network.addresses[self._names[number]]}:{PORT}"
        arguments = ("controller", str(self.run_dir), "--listen", listen, "--token-file", str(self._token))
        self.run_on(number, *arguments, *flags, label="-controller")

    def run_on(self, number: int, *arguments: str, label: str = "", variables: Mapping[str, str] = {}) -> None:
        """Run `relight` on this host. `variables`: added to its environment."""
        name = self._names[number]
        hidden = ""
        if number and self._own_run_dirs:
            self.run_dir.mkdir(exist_ok=True)
            hidden = f"mount -t tmpfs none {self.run_dir} && "
        command = [
            *(
                "ip",
                "netns",
                "exec",
                self._network.namespaces[name],
                "unshare",
                "--mount",
                "sh",
                "-c",
                hidden + _OWN_FILES,
                "sh",
            ),
            *(sys.executable, "-m", "relight.cli", *arguments),
        ]
        shared = {SHARED_VARIABLE: template_socket()} if PRELOADED else {}
        environment = {**plain_environment(), **shared, "TMPDIR": str(self._temporary), _MARK: self._mark, **variables}
        name += label
        with (self.directory / f"{name}.out").open("ab") as out, (self.directory / f"{name}.err").open("ab") as err:
            self.launchers[name] = subprocess.Popen(
                command,
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def release(self) -> None:
        """Let the program go on that waits because of --hold-at, and without pauses."""
        self._hold.touch()

    # --- what happens to hosts ----------------------------------------------------------------------------------------
    def lose(self, number: int) -> None:
        """Power off: silence on the line first, so that not even the ends of its connections are heard."""
        self.cut(number)
        kill_at_once(self.processes(number))

    def cut(self, number: int) -> None:
        """Unplug the host; everything on it runs on."""
        self._switch("link", "set", f"port{number}", "down")

    def heal(self, number: int) -> None:
        self._switch("link", "set", f"port{number}", "up")

    def cut_controller(self, number: int) -> None:
        """This host and the controller's no longer hear each other on the controller's port; workers still do."""
        rules = (
            "add table inet cut; add chain inet cut out { type filter hook output priority 0; }; "
            "add chain inet cut in { type filter hook input priority 0; }; "
            f"add rule inet cut out tcp dport {PORT} drop; add rule inet cut in tcp sport {PORT} drop"
        )
        self._on(number, "nft", rules)

    def cut_one_way(self, number: int, hook: str) -> None:
        """Lose all that this host sends ("output") or that is sent to it ("input"); the other way all arrives."""
        rules = (
            f"add table inet cut; add chain inet cut way {{ type filter hook {hook} priority 0; }}; "
            "add rule inet cut way meta l4proto tcp ip daddr != 127.0.0.0/8 drop"
        )
        self._on(number, "nft", rules)

    def heal_controller(self, number: int) -> None:
        """Also undoes `cut_one_way`."""
        self._on(number, "nft", "delete table inet cut")

    def _switch(self, *arguments: str) -> None:
        subprocess.run(["ip", "-n", self._network._switch, *arguments], check=True, capture_output=True)

    def _on(self, number: int, *command: str) -> None:
        namespace = self._network.namespaces[self._names[number]]
        subprocess.run(["ip", "netns", "exec", namespace, *command], check=True, capture_output=True)

    # --- what can be seen -------------------------------------------------------------------------------------------
    def processes(self, number: int) -> list[psutil.Process]:
        """The living processes of one host."""
        namespace = self._network.namespaces[self._names[number]]
        pids = subprocess.run(["ip", "netns", "pids", namespace], check=True, capture_output=True, text=True).stdout
        found = []
        for pid in pids.split():
            try:
                found.append(psutil.Process(int(pid)))
            except psutil.NoSuchProcess:
                continue
        return found

    def workers(self, number: int) -> dict[str, psutil.Process]:
        """Workers and standbys of one host by name."""
        found = {}
        for process in self.processes(number):
            try:
                name = process.environ().get("RELIGHT_PROCESS")
                if name is not None and os.getsid(process.pid) == process.pid:
                    found[name] = process
            except (psutil.Error, OSError):
                continue
        return found

    def messages(self, number: int | None = None) -> str:
        """Lines that relight has printed on a host; None: where the controller is."""
        name = self.chief if number is None else f"h{number}"
        return (self.directory / f"{name}.err").read_text(errors="replace")

    def output(self) -> str:
        """Lines that all workers have printed, wherever they ran."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.directory.glob("h*.out")))

    def journal(self) -> str:
        path = self.run_dir / "journal.jsonl"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Look again and again until the condition holds; the job must not end before."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert self.launchers[self.chief].poll() is None, f"the job ended before {what}\n{self.describe()}"
            assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS:g} s: {what}\n{self.describe()}"
            time.sleep(0.02)

    def wait_for_steps(self, more: int) -> None:
        """Until the ranks have told of so many more steps."""
        goal = self._committed() + more * self.training.ranks
        self.wait_until(lambda: self._committed() >= goal, f"{more} more steps are committed")

    def _committed(self) -> int:
        return len(re.findall(r"committed \d+", self.output()))

    def describe(self) -> str:
        said = {name: (self.directory / f"{name}.err").read_text(errors="replace") for name in self.launchers}
        parts = [f"--- {name}\n{text[-2500:]}" for name, text in said.items()]
        return "\n".join([*parts, self.output()[-1500:], self.journal()[-2500:]])

    # --- the end ----------------------------------------------------------------------------------------------------
    def wait(self) -> Outcome:
        """Wait for the end of the job; no process of it may be left on any host that is there."""
        begun = time.monotonic()
        try:
            status = self.launchers[self.chief].wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end within {DEADLINE_SECONDS:g} s\n{self.describe()}") from None
        report = self.run_dir / "report.json"
        found = {path.suffix[1:]: path for path in self.directory.glob(f"{self._final.name}.*")}
        saved = {int(rank): json.loads(path.read_text()) for rank, path in sorted(found.items()) if rank.isdecimal()}
        return Outcome(
            command=("cluster",),
            status=status,
            stdout=self.output(),
            stderr=self.messages(),
            run_dir=self.run_dir,
            seconds=time.monotonic() - begun,
            report=decode_report(report.read_bytes()) if report.exists() else JobReport(job="", error="no report"),
            finals=saved,
        )

    def check_nothing_is_left(self) -> None:
        """Every host's part ends by itself when the job has."""
        for name, launcher in self.launchers.items():
            try:
                launcher.wait(30.0)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"relight on {name} does not end\n{self.describe()}") from None
        left = self._all_processes()
        assert not any(map(self._is_marked, left)), f"{[process.cmdline() for process in left]}\n{self.describe()}"
        # Forks of the tests' own template process, which end as soon as they hear that their agent has.
        _, left = psutil.wait_procs(left, GONE_SECONDS)
        assert not left, f"{[process.cmdline() for process in left]}\n{self.describe()}"

    def _all_processes(self) -> list[psutil.Process]:
        return [process for number in range(len(self._names)) for process in self.processes(number)]

    def _is_marked(self, process: psutil.Process) -> bool:
        """Tell whether a living process was started by this job."""
        with contextlib.suppress(psutil.Error, OSError):
            return bool(process.environ().get(_MARK) == self._mark)
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in range(len(self._names)):
            for process in self.processes(number):
                try:
                    process.send_signal(signal.SIGKILL)
                except psutil.Error:
                    continue
        for launcher in self.launchers.values():
            launcher.wait(10.0)
        self._network.close()
        shutil.rmtree(self._temporary, ignore_errors=True)
