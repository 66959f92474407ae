"""Ctrl-C before there is anything to end: quiet, and the usual status."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

DEADLINE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """A shell that runs tests in its background ignores this signal, and what is started here would do so too."""
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


# A program that sends itself the signal while it executes a text, as `dataclass` does, in the import of one module.
INSIDE_EXEC = """
import importlib.abc, os, signal, sys

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == module:
            exec("os.kill(os.getpid(), signal.SIGINT)\\nfor _ in range(10**7): pass")

module = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupting())
import relight.__main__
sys.exit(relight.__main__.main())
"""


@pytest.mark.parametrize("module", ["relight.wire.settings", "relight.launch.commands"])
def test_while_a_text_is_executed(tmp_path: Path, module: str) -> None:
    """Python would end by the signal, though the KeyboardInterrupt is caught: seen under load, one time in many."""
    script = tmp_path / "train.py"
    script.touch()
    (tmp_path / "interrupted.py").write_text(INSIDE_EXEC)
    result = subprocess.run(
        [sys.executable, "-m", "interrupted", module, "run", str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


# A program that forks for each line that `main` executes (from the second on: the first is `try`), and sends itself the
# signal before that line; prints the forks that did not end with 130, and the number of lines.
AT_EACH_LINE = """
import itertools, os, signal, sys
import relight.__main__, relight.cli

FILES = {relight.__main__.__file__, signal.__file__}

def trace(frame, event, arg):
    if frame.f_code.co_filename not in FILES:
        return None
    if event == "line":
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        if len(lines) == number:
            os.kill(os.getpid(), signal.SIGINT)
    return trace

for number in itertools.count(2):
    child = os.fork()
    if not child:
        lines = []
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.settrace(trace)
        try:
            relight.__main__.main()
        finally:
            sys.settrace(None)
            if len(lines) < number:
                os._exit(7)
        os._exit(8)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 7:
        break
    if status != 130:
        print(number, status)
print("lines", number)
"""


def test_before_each_line_of_main(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", AT_EACH_LINE, "status", str(tmp_path / "none")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    *failures, lines = result.stdout.splitlines()
    assert failures == []
    assert int(lines.split()[1]) > 10, result.stderr


def test_while_modules_are_imported_for_all_workers(tmp_path: Path) -> None:
    """The agent has not joined yet: it is told to end by a signal, and does not wait for the import."""
    (tmp_path / "slow.py").write_text("import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(600)\n")
    (tmp_path / "train.py").touch()
    process = subprocess.Popen(
        [sys.executable, "-m", "relight", "run", "--preload", "slow", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "never retrieved" not in errors
    assert "relight: stopped: SIGINT" in errors
