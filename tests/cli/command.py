"""Runs the `relight` command as its user does, and looks for processes that it left running."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relight.wire.template import SHARED_VARIABLE
from tests.survival.harness import template_socket

DEADLINE_SECONDS = 60.0
_MARK = "RELIGHT_TEST_MARK"


@dataclass
class Result:
    status: int
    output: str
    errors: str


class Command:
    """One `relight ...`, marked through its environment, which every process of the job inherits."""

    def __init__(
        self, *arguments: str, cwd: Path, file_bytes: int = 0, output: int | None = None, errors: int | None = None
    ) -> None:
        """`file_bytes` bounds the size of every file that it writes; `output` and `errors` take what it prints."""
        self._mark = secrets.token_hex(8)
        self._temporary = tempfile.TemporaryDirectory(prefix="relight-test-")  # for private directories
        self.output_path = Path(self._temporary.name) / "output.txt"
        self.errors_path = Path(self._temporary.name) / "errors.txt"
        with self.output_path.open("wb") as output_file, self.errors_path.open("wb") as errors_file:
            self.process = subprocess.Popen(
                [*_limited(file_bytes), sys.executable, "-m", "relight.cli", *arguments],
                cwd=cwd,
                env={
                    **os.environ,
                    _MARK: self._mark,
                    "TMPDIR": self._temporary.name,
                    **({SHARED_VARIABLE: template_socket()} if "--preload" in arguments else {}),
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                },
                stdin=subprocess.DEVNULL,
                stdout=output_file if output is None else output,
                stderr=errors_file if errors is None else errors,
            )

    def finish(self, deadline_seconds: float = DEADLINE_SECONDS) -> Result:
        """Wait for its end; nothing of it may be left then."""
        try:
            self.process.wait(deadline_seconds)
        except subprocess.TimeoutExpired:
            said = f"{self.output_path.read_text()[-3000:]}\n{self.errors_path.read_text()[-3000:]}"
            raise AssertionError(f"it did not end within {deadline_seconds:g} s:\n{said}") from None
        result = Result(self.process.returncode, self.output_path.read_text(), self.errors_path.read_text())
        assert self.processes() == [], f"left running by status {result.status}: {result.errors}"
        assert self.private_dirs() == []
        return result

    def processes(self) -> list[int]:
        """Live processes of this command, itself included."""
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit() and _is_marked(path, self._mark):
                found.append(int(path.name))
        return sorted(found)

    def children(self, module: str) -> list[int]:
        """Its processes that run this module."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    def private_dirs(self) -> list[Path]:
        return sorted(Path(self._temporary.name).glob("relight-*"))

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS:g} s: {what}"
            assert self.process.poll() is None, f"ended before {what}: {self.errors_path.read_text()}"
            time.sleep(0.01)

    def wait_for_output(self, text: str) -> None:
        self.wait_for(lambda: text in self.output_path.read_text(), f"it printed {text!r}")

    def close(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._temporary.cleanup()


def _limited(file_bytes: int) -> list[str]:
    """Words to put before a command so that no file that it writes can grow beyond this."""
    if not file_bytes:
        return []
    code = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2); "
        "os.execv(sys.argv[2], sys.argv[2:])"
    )
    return [sys.executable, "-c", code, str(file_bytes)]


def _is_marked(process: Path, mark: str) -> bool:
    try:
        if (process / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
            return False
        return f"{_MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
