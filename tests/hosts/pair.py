"""Two hosts on loopback: node 1 reaches the controller, which runs on node 0, through a proxy and not otherwise."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import psutil

from relight.core.account.report import JobReport, decode_report
from tests.hosts.proxy import Proxy
from tests.survival.harness import DEADLINE_SECONDS, PRELOADED, PROGRAMS, Outcome, Training, plain_environment

_MARK = "RELIGHT_TEST_JOB"


class Pair:
    """A job on two nodes. Use it as a context: nothing of it survives its end."""

    def __init__(self, directory: Path, training: Training, *flags: str) -> None:
        self.directory = directory
        self.run_dir = directory / "run"
        self._training = training
        self._final, self._hold = directory / "final", directory / "go"
        self._mark = uuid.uuid4().hex
        self._temporary = Path(tempfile.mkdtemp(prefix="rlp-", dir="/tmp"))
        token = directory / "token"
        token.write_text("a secret of this test's hosts")
        token.chmod(0o600)
        port = _free_port()
        self.proxy = Proxy(("127.0.0.1", port))
        self._launchers = [
            self._start(
                number,
                *("run", "--nnodes", "2", "--node-rank", str(number)),
                *("--rdzv-endpoint", f"127.0.0.1:{endpoint}", "--token-file", str(token)),
                *("--nproc-per-node", str(training.ranks // 2), "--standby", "2", "--run-dir", str(self.run_dir)),
                *("--oversubscribe", "--hang-timeout-seconds", "20", "--outside-hang-timeout-seconds", "60"),
                *PRELOADED,
                *flags,
                *(str(PROGRAMS / training.program), "--steps", str(training.steps), *training.arguments),
                *("--save", str(self._final), "--hold", str(self._hold)),
            )
            for number, endpoint in enumerate((port, self.proxy.port))
        ]

    def _start(self, number: int, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**plain_environment(), "TMPDIR": str(self._temporary), _MARK: f"{self._mark}-{number}"}
        with (self.directory / f"{number}.out").open("wb") as out, (self.directory / f"{number}.err").open("wb") as err:
            return subprocess.Popen(
                [sys.executable, "-m", "relight.cli", *arguments],
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    # --- while it runs ------------------------------------------------------------------------------------------
    def release(self) -> None:
        self._hold.touch()

    def worker(self, name: str) -> psutil.Process:
        for process in self._processes():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("RELIGHT_PROCESS") == name and os.getsid(process.pid) == process.pid:
                    return process
        raise AssertionError(f"there is no {name}\n{self.describe()}")

    def kill(self, name: str) -> None:
        self.worker(name).send_signal(signal.SIGKILL)

    def messages(self, number: int = 0) -> str:
        return (self.directory / f"{number}.err").read_text(errors="replace")

    def output(self) -> str:
        return "".join((self.directory / f"{number}.out").read_text(errors="replace") for number in (0, 1))

    def journal(self) -> str:
        path = self.run_dir / "journal.jsonl"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert self._launchers[0].poll() is None, f"the job ended before {what}\n{self.describe()}"
            assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS:g} s: {what}\n{self.describe()}"
            time.sleep(0.02)

    def wait_for_steps(self, more: int) -> None:
        def committed() -> int:
            return len(re.findall(r"committed \d+", self.output()))

        goal = committed() + more * self._training.ranks
        self.wait_until(lambda: committed() >= goal, f"{more} more steps are committed")

    def describe(self) -> str:
        return "\n".join([*(f"--- {n}\n{self.messages(n)[-2500:]}" for n in (0, 1)), self.journal()[-2500:]])

    # --- the end ------------------------------------------------------------------------------------------------
    def wait(self) -> Outcome:
        """The end of node 0; the other one ends too."""
        begun = time.monotonic()
        try:
            status, _ = (launcher.wait(DEADLINE_SECONDS) for launcher in self._launchers)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not end\n{self.describe()}") from None
        left = self._processes()
        assert not left, f"{[process.cmdline() for process in left]}\n{self.describe()}"
        report = self.run_dir / "report.json"
        found = {path.suffix[1:]: path for path in self.directory.glob(f"{self._final.name}.*")}
        return Outcome(
            command=("pair",),
            status=status,
            stdout=self.output(),
            stderr=self.messages(),
            run_dir=self.run_dir,
            seconds=time.monotonic() - begun,
            report=decode_report(report.read_bytes()) if report.exists() else JobReport(job="", error="no report"),
            finals={int(rank): json.loads(path.read_text()) for rank, path in sorted(found.items())},
        )

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(_MARK, "").startswith(self._mark):
                    found.append(process)
        return found

    def __enter__(self) -> "Pair":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while processes := self._processes():
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(processes, timeout=0.2)
        for launcher in self._launchers:
            launcher.wait()
        self.proxy.__exit__(None, None, None)
        shutil.rmtree(self._temporary, ignore_errors=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
