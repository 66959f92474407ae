"""One job of `relight prove` or `relight doctor`, as a process of its own that Ctrl-C ends in order."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec

from relight.core.account.report import JobReport, decode_report
from relight.wire.settings import JobSettings, encode_settings

LOOK_SECONDS = 0.5
OUTPUT = "terminal.txt"
_MOST_LINES = 40
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_attempt(settings: JobSettings, look: Callable[[], None]) -> JobReport:
    """Run a job to its end; return its report. Its run directory holds what it printed.

    `look` is called twice a second meanwhile. Raises KeyboardInterrupt once the job has ended, if asked to.
    """
    run_dir = Path(settings.run_dir)
    path = run_dir / "settings.json"
    path.write_bytes(encode_settings(settings))
    with _Interrupts() as interrupts:
        with (run_dir / OUTPUT).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "relight.prove", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C ends it in order, from here
                env={"PYTHONHASHSEED": "0", **os.environ},
            )
        interrupts.pass_to(process)
        while process.poll() is None:
            look()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_SECONDS)
    return _report(run_dir, process.returncode)


def newest_lines(logs: Path) -> dict[int, str]:
    """Return the last lines that each rank printed, from the directory of the job's logs."""
    found = {}
    for path in sorted(logs.glob("rank-*.log")):
        lines = path.read_text(errors="replace").rstrip().splitlines()[-_MOST_LINES:]
        found[int(path.stem.removeprefix("rank-"))] = "\n".join(lines)
    return found


def _report(run_dir: Path, status: int) -> JobReport:
    try:
        report = decode_report((run_dir / "report.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        report = JobReport(job=run_dir.name)
    if status and not report.error:
        error = f"status {status}; what it printed is in {run_dir / OUTPUT}"
        return msgspec.structs.replace(report, error=error)
    return report


class _Interrupts:
    """Ctrl-C, or SIGTERM, during an attempt ends the attempt in order, and then raises KeyboardInterrupt.

    Not at once: an exception that is raised just anywhere can be lost, in a callback of the garbage collector for one.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._interrupted = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._before[number] = signal.getsignal(number)
            if self._before[number] is not signal.SIG_IGN:  # as in a shell's background
                signal.signal(number, self._note)
        return self

    def pass_to(self, process: "subprocess.Popen[bytes]") -> None:
        """Name the process that gets the signal, also if it came before."""
        self._process = process
        if self._interrupted:
            process.send_signal(signal.SIGINT)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None and self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._interrupted and kind is None:
            raise KeyboardInterrupt

    def _note(self, *_: object) -> None:
        self._interrupted = True
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
