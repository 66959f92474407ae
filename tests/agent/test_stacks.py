"""Real processes are asked what they are doing: busy, waiting, stopped, not ready, and none of them is harmed."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relight.agent.processes.stacks import MAX_FILE_BYTES, NoStack, take_stack
from relight.core.detection.stack import describe_place, main_frames
from relight.wire.stacks import ALL_STACKS, MAIN_STACK, stack_path

PATIENCE_SECONDS = 30.0
READY = "import sys; from pathlib import Path; from relight.training.process.stacks import answer_for_stacks\n"
ANSWERS = READY + "answer_for_stacks(Path(sys.argv[1]), 'w0')\n"
SAYS = "print('here', flush=True)\n"
BUSY = "def busy():\n    print('here', flush=True)\n    while True: pass\n"

Run = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Start a script, and wait until it says that it is there."""
    started: list[subprocess.Popen[str]] = []

    def begin(script: str) -> subprocess.Popen[str]:
        path = tmp_path / "script.py"
        path.write_text(script)
        process = subprocess.Popen(
            [sys.executable, str(path), str(tmp_path)],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        return process

    try:
        yield begin
    finally:
        for process in started:
            process.kill()
            process.communicate()


def ask(process: subprocess.Popen[str], directory: Path, number: int = MAIN_STACK, seconds: float = 30.0) -> str:
    pidfd = os.pidfd_open(process.pid)
    try:
        return asyncio.run(take_stack(process.pid, pidfd, "w0", directory, number, seconds))
    finally:
        os.close(pidfd)


def test_a_loop_that_holds_the_interpreter_answers(run: Run, tmp_path: Path) -> None:
    process = run(ANSWERS + BUSY + "busy()\n")
    text = ask(process, tmp_path)
    assert text.startswith("Stack (most recent call first):")
    assert [frame.function for frame in main_frames(text)] == ["busy", "<module>"]
    assert describe_place(text).startswith("script.py, line ")
    assert process.poll() is None


def test_all_threads_answer_and_the_main_one_can_be_told(run: Run, tmp_path: Path) -> None:
    waits = "import threading; threading.Thread(target=busy, daemon=True).start()\n"
    process = run(ANSWERS + BUSY + waits + "sys.stdin.read()\n")
    text = ask(process, tmp_path, ALL_STACKS)
    assert "busy" in text
    assert main_frames(text)[-1].function == "<module>"
    assert "busy" not in [frame.function for frame in main_frames(text)]


ANSWERS_LATE = f"""
import os, signal, sys
from pathlib import Path
path = Path(sys.argv[1]) / "stack-w0.txt"
path.touch()

def answer(*_):
    os.write(1, b"taken\\n")  # print may be in the middle of "here"
    path.write_text(sys.stdin.readline())

signal.signal({MAIN_STACK}, answer)
os.write(1, b"here\\n")
while True:
    signal.pause()
"""


def test_an_answer_is_waited_for_that_begins_after_the_signal_was_taken(run: Run, tmp_path: Path) -> None:
    """Between the two the kernel shows neither a signal that waits nor a handler that runs."""
    process = run(ANSWERS_LATE)
    assert process.stdin is not None
    assert process.stdout is not None
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, process, tmp_path)
        assert process.stdout.readline() == "taken\n"
        process.stdin.write("Stack\n")
        process.stdin.flush()
        assert asked.result(PATIENCE_SECONDS) == "Stack"


def test_who_dies_while_it_is_asked_is_not_waited_for(run: Run, tmp_path: Path) -> None:
    process = run(ANSWERS_LATE)
    assert process.stdout is not None
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, process, tmp_path, seconds=2 * PATIENCE_SECONDS)
        assert process.stdout.readline() == "taken\n"
        process.kill()
        process.wait()
        with pytest.raises(NoStack, match="it is gone"):
            asked.result(PATIENCE_SECONDS)


def test_a_wait_that_is_interrupted_goes_on(run: Run, tmp_path: Path) -> None:
    """A system call is started again, also one that no Python code waits in: the script notices nothing."""
    process = run(ANSWERS + SAYS + "import os\ndata = os.read(0, 9)\nprint('read', data, flush=True)\n")
    for _ in range(20):
        assert "script.py" in ask(process, tmp_path)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("a\n")
    process.stdin.flush()
    assert process.stdout.readline() == "read b'a\\n'\n"
    assert process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.parametrize("number", [MAIN_STACK, ALL_STACKS])
def test_a_question_that_comes_too_late_ends_no_process(run: Run, number: int) -> None:
    """The asking process has looked for the handler; Python has taken it away meanwhile, as it does when it ends."""
    script = f"import faulthandler, os\nfaulthandler.unregister({number})\nos.kill(os.getpid(), {number})\n"
    process = run(ANSWERS + SAYS + script)
    assert process.wait(PATIENCE_SECONDS) == 0


def test_a_hundred_questions_change_nothing_in_a_computation(run: Run, tmp_path: Path) -> None:
    script = ANSWERS + SAYS + "n = 0\nfor i in range(3_000_000): n = (n * 31 + i) % 1_000_003\nprint(n, flush=True)\n"
    process = run(script)
    asked = 0
    with contextlib.suppress(NoStack):  # it has ended
        for _ in range(100):
            ask(process, tmp_path, (MAIN_STACK, ALL_STACKS)[asked % 2])
            asked += 1
    n = 0
    for i in range(3_000_000):
        n = (n * 31 + i) % 1_000_003
    assert process.communicate(timeout=PATIENCE_SECONDS)[0] == f"{n}\n"
    assert process.returncode == 0
    assert asked > 0


def test_a_stopped_process_is_not_asked(run: Run, tmp_path: Path) -> None:
    process = run(ANSWERS + BUSY + "busy()\n")
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    with pytest.raises(NoStack, match="stopped"):
        ask(process, tmp_path)
    os.kill(process.pid, signal.SIGCONT)
    os.waitid(os.P_PID, process.pid, os.WCONTINUED)
    assert "busy" in ask(process, tmp_path)


def test_a_process_without_a_handler_is_not_killed(run: Run, tmp_path: Path) -> None:
    process = run(READY + BUSY + "busy()\n")
    with pytest.raises(NoStack, match="cannot be asked"):
        ask(process, tmp_path)
    assert process.poll() is None


def test_a_process_that_takes_no_signal_is_not_waited_for_for_ever(run: Run, tmp_path: Path) -> None:
    deaf = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
    process = run(ANSWERS + deaf + SAYS + "sys.stdin.read()\n")
    with pytest.raises(NoStack, match=r"no answer within 0\.1 s"):
        ask(process, tmp_path, seconds=0.1)
    assert process.poll() is None


def test_a_dead_process_is_said_to_be_gone(run: Run, tmp_path: Path) -> None:
    process = run(ANSWERS + SAYS)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(NoStack, match=r"cannot be asked|gone"):
        ask(process, tmp_path)


def test_the_file_does_not_grow_for_ever(run: Run, tmp_path: Path) -> None:
    process = run(ANSWERS + BUSY + "busy()\n")
    path = stack_path(tmp_path, "w0")
    os.truncate(path, MAX_FILE_BYTES)
    assert "busy" in ask(process, tmp_path)
    assert path.stat().st_size < 10_000
    assert path.stat().st_mode & 0o777 == 0o600
