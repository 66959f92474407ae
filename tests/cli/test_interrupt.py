"""Ctrl-C before there is anything to end: quiet, and the usual status."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

DEADLINE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Who runs tests in a shell's background ignores this signal, and what is started here would do so too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("module", ["relight.errors", "relight.wire.settings", "relight.watch.command", "relight.cli"])
def test_while_the_command_is_imported(tmp_path: Path, module: str) -> None:
    """Python itself tells, on standard error, when each import is over."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "relight", "events", "--follow", str(tmp_path / "run")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("import time:") and line.split("|")[-1].strip() == module:
                break
        else:
            raise AssertionError(f"{module} is never imported")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        process.kill()
        process.wait()
    said = [line for line in errors.splitlines() if not line.startswith("import time:")]
    assert (process.returncode, output, said) == (130, "", [])
