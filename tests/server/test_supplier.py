"""Commands that order hosts and cancel orders: real ones, which also hang, flood, fail and leave processes."""

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from relight.core.protocol.commands import CancelHost, OrderHost
from relight.core.protocol.events import HostCancelled, HostDraining, HostOrdered, HostRefused, HostWaits
from relight.server.supply.backend import CommandBackend, Job, read_identifier
from relight.server.supply.drain_watch import DrainWatch
from relight.server.supply.order_watch import OrderWatch
from relight.server.supply.slurm import SlurmBackend, read_draining
from relight.server.supply.supplier import Supplier
from tests.core.job.test_supplying import a_job
from tests.core.membership.test_hosts import lose

JOB = Job(name="gpt", run_dir="/data/runs/gpt", controller="n1:29400", token_file="/home/me/token")
ORDER = OrderHost(order="ordered-1", wanted=4, exclude=("n1", "n7"), why="")
Answer = HostOrdered | HostRefused | HostCancelled
PATIENCE_SECONDS = 30.0 * float(os.environ.get("RELIGHT_TEST_PATIENCE", "1"))


def answers(command: str, *orders: OrderHost | CancelHost, seconds: float = PATIENCE_SECONDS) -> list[Answer]:
    """Give orders one after another, and return what is reported once no command runs."""
    said: list[Answer] = []

    async def run() -> None:
        supplier = Supplier(CommandBackend(command, JOB), said.append, seconds)
        for order in orders:
            if isinstance(order, OrderHost):
                supplier.order(order)
            else:
                supplier.cancel(order)
        assert await supplier.finish(PATIENCE_SECONDS) == ()

    asyncio.run(run())
    return said


def test_a_command_prints_its_word_for_the_order() -> None:
    assert answers("echo '  vm 17 '", ORDER) == [HostOrdered(order="ordered-1", identifier="vm 17")]


def test_all_that_it_needs_is_in_its_environment(tmp_path: Path) -> None:
    names = "ACTION ORDER ORDER_ID EXCLUDE JOB RUN_DIR CONTROLLER TOKEN_FILE".split()
    line = " ".join(f'"$RELIGHT_{name}"' for name in names)
    cancel = CancelHost(order="ordered-1", why="")
    said = answers(f"printf '%s|' {line} >> {tmp_path}/said; echo >> {tmp_path}/said; echo 17", ORDER, cancel)
    assert said == [HostOrdered(order="ordered-1", identifier="17"), HostCancelled(order="ordered-1")]
    first, last = (tmp_path / "said").read_text().splitlines()
    assert first == "order|ordered-1||n1,n7|gpt|/data/runs/gpt|n1:29400|/home/me/token|"
    assert last.startswith("cancel|ordered-1|17||"), "the word for it was not known when it was cancelled"


def test_the_address_of_this_host_is_not_handed_to_an_ordered_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent would give it to workers, which cannot listen there."""
    monkeypatch.setenv("RELIGHT_HOST_ADDRESS", "10.0.0.1")
    assert answers('echo "address: $RELIGHT_HOST_ADDRESS"', ORDER) == [
        HostOrdered(order="ordered-1", identifier="address:")
    ]


@pytest.mark.parametrize(
    ("command", "reason", "uncertain"),
    [
        ("echo QOSMaxNode >&2; exit 3", "QOSMaxNode", False),
        ("echo to standard output; exit 3", "to standard output", False),
        ("exit 3", "it ended with status 3", False),
        ("kill -9 $$", "it ended with status -9", True),
        ("true", "it printed no identifier", True),
        ("echo one; echo two", "instead of one line with an identifier", True),
        ("printf '\\033[2J'", "instead of one line with an identifier", True),
        ("head -c 1000000 /dev/zero", "instead of one line with an identifier", True),
        ("/no/such/command", "not found", False),
    ],
)
def test_what_goes_wrong_is_said_in_its_words(command: str, reason: str, uncertain: bool) -> None:
    (said,) = answers(command, ORDER)
    assert isinstance(said, HostRefused)
    assert reason in said.reason
    assert said.uncertain is uncertain


def test_a_command_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    (said,) = answers(f"sleep 1000 & echo $! > {tmp_path}/pid; wait", ORDER, seconds=0.5)
    assert isinstance(said, HostRefused)
    assert (said.reason, said.uncertain) == ("it did not end within 0.5 s, and was killed", True)
    with contextlib.suppress(psutil.NoSuchProcess):  # or init has not asked for its status yet
        process = psutil.Process(int((tmp_path / "pid").read_text()))
        while process.status() != psutil.STATUS_ZOMBIE:  # the signal is on its way
            assert process.is_running()


def test_a_process_that_a_command_leaves_behind_keeps_nothing_waiting(tmp_path: Path) -> None:
    said = answers(f"sleep 1000 & echo $! | tee {tmp_path}/pid", ORDER)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert [type(answer) for answer in said] == [HostOrdered]


def test_an_order_that_cannot_be_cancelled_is_reported() -> None:
    (said,) = answers("echo no such vm >&2; exit 1", CancelHost(order="ordered-1", identifier="17", why=""))
    assert said == HostCancelled(order="ordered-1", error="no such vm")


def test_the_end_of_a_job_does_not_wait_for_ever() -> None:
    async def run() -> tuple[str, ...]:
        supplier = Supplier(CommandBackend("sleep 1000", JOB), lambda answer: None)
        supplier.order(ORDER)
        return await supplier.finish(0.2)

    assert asyncio.run(run()) == ("ordered-1",)


def test_an_identifier_is_one_line() -> None:
    assert read_identifier("17\n") == "17"
    with pytest.raises(ValueError, match="instead of one line"):
        read_identifier("x" * 201)


# --- Slurm ------------------------------------------------------------------------------------------------------------
OUTER = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_ACCOUNT": "physics",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_NODEID": "0",
    "SLURM_CONF": "/etc/slurm.conf",
    "HOME": "/home/me",
}


def test_slurm_is_asked_for_a_node_beside_those_of_the_job() -> None:
    call = SlurmBackend(JOB, OUTER).order(ORDER)
    command = list(call.command)
    assert command[4:7] == ["4711", "--parsable", "--job-name=relight-gpt-4711-ordered-1"]
    assert {"--exclusive", "--exclude=n1,n7", "--account=physics", "--partition=gpu"} <= set(command)
    assert command[-1].startswith("--wrap=exec ")
    assert command[-1].endswith("-m relight agent --quiet --controller n1:29400 --name ordered-1")
    assert "secret" not in str(call)
    # An order is no step of the job that it is for.
    assert {name for name, value in call.environment.items() if value is None} == OUTER.keys() - {"SLURM_CONF", "HOME"}


def test_slurm_s_orders_are_cancelled_by_number_or_by_name() -> None:
    backend = SlurmBackend(JOB, OUTER)
    assert backend.cancel(CancelHost(order="ordered-1", identifier="17;east", why="")).command == ("scancel", "17")
    named = backend.cancel(CancelHost(order="ordered-1", why="")).command
    assert named == ("scancel", "--name=relight-gpt-4711-ordered-1")


def test_slurm_outside_of_a_job() -> None:
    command = SlurmBackend(JOB, {}).order(ORDER).command
    assert "--job-name=relight-gpt-ordered-1" in command
    assert not [option for option in command if option.startswith(("--account", "--partition"))]


@pytest.mark.parametrize(("end", "limit"), [("2026-11-24T23:46:15", True), ("N/A", False), ("", False)])
def test_an_order_to_slurm_ends_with_its_job(tmp_path: Path, end: str, limit: bool) -> None:
    """The shell's part of it, with programs of that name that say what they were given."""
    for name, script in (("squeue", f"echo '{end}'"), ("sbatch", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    command = SlurmBackend(JOB, OUTER).order(ORDER).command
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=True).stdout
    assert ("--deadline=2026-11-24T23:46:15 --time-min=1" in said) is limit
    assert "--name ordered-1" in said


@pytest.mark.parametrize(
    ("printed", "reported"),
    [
        ("relight-gpt-4711-ordered-1|PENDING|QOSMaxNodePerUserLimit|17", "is PENDING (QOSMaxNodePerUserLimit)"),
        ("relight-gpt-4711-ordered-1|RUNNING|None|17", "is RUNNING"),
        ("relight-gpt-4711-ordered-1|FAILED|NonZeroExitCode|17", "has ended as FAILED (NonZeroExitCode)"),
        (
            "relight-gpt-4711-ordered-1|FAILED|x|16\nrelight-gpt-4711-ordered-1|PENDING|Resources|17",
            "is PENDING (Resources)",
        ),
        ("another|FAILED|NonZeroExitCode|17", ""),
        ("garbage", ""),
        ("", ""),
    ],
)
def test_slurm_says_why_no_host_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, reported: str
) -> None:
    """By a program of squeue's name."""
    (tmp_path / "squeue").write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    desk = a_job()
    lose(desk, "spare-2")
    said: list[HostWaits | HostRefused] = []
    watch = OrderWatch(desk.controller, SlurmBackend(JOB, OUTER), said.append)
    asyncio.run(watch.look())
    assert not said, "the order is not placed yet"
    desk.tell(HostOrdered(order="ordered-1", identifier="17"))
    asyncio.run(watch.look())
    reasons = [answer.reason.partition(";")[0] for answer in said]
    assert reasons == ([f"Slurm's job 17 {reported}"] if reported else [])
    for answer in said:
        assert desk.tell(answer), "it is told"


def test_a_slurm_that_does_not_answer_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And asked again: nodes that it drains then are left. By a program of sinfo's name."""
    sinfo = tmp_path / "sinfo"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    desk = a_job()
    said, fed = list[str](), list[HostDraining]()
    watch = DrainWatch(desk.controller, fed.append, said.append)
    for script in ("echo no route to slurmctld >&2; exit 1",) * 2 + ("echo 'node-1|draining|fan'",) * 2:
        sinfo.write_text(f"#!/bin/sh\n{script}\n")
        sinfo.chmod(0o755)
        asyncio.run(watch.look())
    assert said == ["nodes that Slurm drains are not noticed now: no route to slurmctld"]
    assert fed == [HostDraining(agent="node-1", reason="Slurm drains node-1: fan")]


def test_nodes_that_slurm_drains_are_found() -> None:
    said = "n1|mixed|none\nn2|draining|a new disk\nn3|drained*|fan|2\nn4|down*|Not responding\n"
    said += "n5|failing*|a fan is slow\n"
    assert read_draining(said) == {"n2": "a new disk", "n3": "fan|2", "n5": "a fan is slow"}
