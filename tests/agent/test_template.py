import asyncio
import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from relight.agent.processes.process import Launch, Process, spawn, template_environment
from relight.agent.processes.readings.page import Pages
from relight.agent.processes.readings.probes import MemoryKills, environment
from relight.agent.processes.template import COMMAND, Template
from relight.wire.settings import JobSettings, encode_settings
from relight.wire.template import ROOM_VARIABLE, SHARED_VARIABLE, Forked
from tests.survival.harness import DEADLINE_SECONDS


@pytest.fixture
def here(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def launch(directory: Path, code: str) -> Launch:
    script = directory / "script.py"
    script.write_text(code)
    settings = JobSettings(job="job-1", script=str(script), world_size=4, preload="json")
    (directory / "settings.json").write_bytes(encode_settings(settings))
    return Launch(settings=settings, private_dir=directory, socket_path=directory / "agent.sock")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Template]:
    """One that is ready, for all tests that leave it as it is: importing takes seconds."""
    template = Template("json,numpy,random", template_environment(launch(tmp_path_factory.mktemp("template"), "")))
    try:
        assert asyncio.run(template.ready()) == ""
        yield template
    finally:
        template.close()


@contextlib.contextmanager
def forked(template: Template, directory: Path, code: str, name: str = "w1") -> Iterator[Process]:
    with contextlib.closing(Pages.create()) as pages:
        process = spawn(launch(directory, code), name, 1, 1, pages, template=template)
        yield process
        for descriptor in process.outputs:
            os.close(descriptor)
        process.page.close()


def wait(process: Process) -> None:
    assert select.select([process.pidfd], [], [], DEADLINE_SECONDS)[0], "the process does not end"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -6),
        ("import os; os._exit(3)", 3),
        ("raise SystemExit(4)", 4),
        ("pass", 0),
    ],
)
def test_the_status_of_a_forked_worker(template: Template, here: Path, code: str, status: int) -> None:
    with forked(template, here, code) as process:
        wait(process)
        assert process.reap(MemoryKills(())).status == status


def test_a_forked_worker_is_what_a_new_process_would_be(template: Template, here: Path) -> None:
    code = """
import os, sys
assert os.getsid(0) == os.getpid() == os.getpgid(0)
assert os.read(0, 1) == b""
os.pwrite(int(os.environ["RELIGHT_PAGE_FD"]), b"\\x07", 0)
for number, own in zip(os.environ["RELIGHT_OUTPUT_FDS"].split(","), (1, 2)):
    assert os.fstat(int(number)).st_ino == os.fstat(own).st_ino
kinds = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
assert not any("socket" in kind for kind in kinds), kinds
assert "RELIGHT_TEMPLATE_ROOM" not in os.environ
assert os.popen("echo $RANK $RELIGHT_PROCESS").read() == "1 w1\\n"
assert __name__ == "__main__" and sys.argv == [__file__]
print(os.environ["RANK"], end="", flush=True)
os.write(2, b"err")
"""
    with forked(template, here, code) as process:
        wait(process)
        out, err = (os.read(descriptor, 1000) for descriptor in process.outputs)
        assert (out, err) == (b"1", b"err")
        assert process.reap(MemoryKills(())).status == 0


def test_the_kernel_shows_the_environment_of_a_forked_worker(template: Template, here: Path) -> None:
    """A successor of the agent, and tools such as ps, find out there who it is."""
    with forked(template, here, "import os, time; os.write(1, b'up'); time.sleep(1000)") as process:
        assert os.read(process.outputs[0], 10) == b"up"
        shown = environment(process.pid)
        assert (shown["RELIGHT_PROCESS"], shown["RANK"]) == ("w1", "1")
        assert shown["RELIGHT_PRIVATE_DIR"] == str(here)
        assert shown["PATH"] == os.environ["PATH"]
        process.kill("enough")
        wait(process)
        assert process.reap(MemoryKills(())).evidence == "was killed by SIGKILL, as ordered: enough"


def test_random_numbers_that_nobody_seeded_differ(template: Template, here: Path) -> None:
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    drawn = set()
    for name in ("w1", "w2"):
        with forked(template, here, code, name) as process:
            wait(process)
            drawn |= set(os.read(process.outputs[0], 1000).split())
            process.reap(MemoryKills(()))
    assert len(drawn) == 4


@pytest.mark.parametrize(
    ("module", "text", "reason"),
    [
        ("missing_module", None, "missing_module cannot be imported: ModuleNotFoundError"),
        ("broken", "1 / 0", "broken cannot be imported: ZeroDivisionError"),
        (
            "threaded",
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "threaded started 1 thread(s)",
        ),
        ("leaving", "import os; os._exit(5)", "the template process has ended"),
    ],
)
def test_modules_of_which_no_worker_can_be_forked(here: Path, module: str, text: str | None, reason: str) -> None:
    if text is not None:
        (here / f"{module}.py").write_text(text)
    how = {**template_environment(launch(here, "")), "PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}"}
    template = Template(module, how)
    try:
        assert reason in asyncio.run(template.ready())
    finally:
        template.close()


def test_a_template_process_that_was_killed_forks_nothing(here: Path) -> None:
    how = launch(here, "pass")
    template = Template("json", template_environment(how))
    try:
        assert asyncio.run(template.ready()) == ""
        before = os.listdir("/proc/self/fd")
        os.kill(template.pid, signal.SIGKILL)
        with contextlib.closing(Pages.create()) as pages, pytest.raises(OSError, match="has ended"):
            spawn(how, "w1", 1, 1, pages, template=template)
        assert os.listdir("/proc/self/fd") == before
    finally:
        template.close()


def test_a_template_process_that_jobs_share(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = launch(here, "import os; os.write(1, os.getcwd().encode()); os._exit(7)")
    path = here / "template"
    shared = subprocess.Popen(
        (*COMMAND, str(path), "json"), env={**template_environment(how), ROOM_VARIABLE: "0" * 9999}
    )
    try:
        until = time.monotonic() + DEADLINE_SECONDS
        while not path.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        monkeypatch.setenv(SHARED_VARIABLE, str(path))
        monkeypatch.chdir(here)
        for name in ("w1", "w2"):
            template = Template("json", {})
            assert asyncio.run(template.ready()) == ""
            with contextlib.closing(Pages.create()) as pages:
                process = spawn(how, name, 1, 1, pages, template=template)
                wait(process)
                assert os.read(process.outputs[0], 1000) == os.fsencode(here)
                assert process.reap(MemoryKills(())).status == 7
                for descriptor in process.outputs:
                    os.close(descriptor)
                process.page.close()
            template.close()
    finally:
        shared.kill()
        shared.wait()


def test_a_fork_that_comes_too_late_is_no_worker(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent has started another process in its place by then, with the same name, page and output."""
    ran = here / "ran"
    how = launch(here, f"open({str(ran)!r}, 'w')")
    monkeypatch.setattr("relight.agent.processes.template._ANSWER_SECONDS", 0.2)
    template = Template("json", template_environment(how))
    try:
        assert asyncio.run(template.ready()) == ""
        os.kill(template.pid, signal.SIGSTOP)
        with contextlib.closing(Pages.create()) as pages, pytest.raises(TimeoutError):
            spawn(how, "w1", 1, 1, pages, template=template)
        answers = template._socket
        answers.settimeout(DEADLINE_SECONDS)
        os.kill(template.pid, signal.SIGCONT)
        pid = msgspec.json.decode(answers.recv(1000), type=Forked).pid
        assert select.select([os.pidfd_open(pid)], [], [], DEADLINE_SECONDS)[0], "it lives"
        assert not ran.exists()
    finally:
        template.close()
