"""A job whose control plane speaks TLS survives what every job survives, with the same bits."""

import signal
import socket
from pathlib import Path

import pytest

from relight.wire.connection.address import read_address
from relight.wire.connection.framing import decode, make_decoder
from relight.wire.connection.streams import receive_payload
from relight.wire.messages import StartTls
from tests.certificates import Authority, flags
from tests.survival.harness import Bench, Job, Training, send
from tests.survival.judge import check_survived

SHORT = Training(steps=9)
IDLE = Training(steps=105, arguments=("--pause", "0.02", "--tell", "--hold-at", "100"))


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return flags(Authority(tmp_path_factory.mktemp("ca")).issue("host", "127.0.0.1"))


def test_a_rank_is_killed(bench: Bench, tls: tuple[str, ...]) -> None:
    with bench.start(SHORT, faults=["kill rank 1 in BACKWARD of step 3"], flags=tls) as job:
        job.wait_until(lambda: address(job) is not None, "the controller listens")
        assert isinstance(first_word(job), StartTls)
        outcome = job.wait()
    check_survived(outcome, bench.reference(SHORT))
    assert [failure.rank for failure in outcome.report.failures] == [1], outcome.describe()


@pytest.mark.all
@pytest.mark.parametrize("module", ["relight.server", "relight.agent"])
def test_what_watches_is_killed_and_the_next_one_has_a_certificate_too(
    bench: Bench, tls: tuple[str, ...], module: str
) -> None:
    with bench.start(IDLE, flags=(*tls, "--outside-hang-timeout-seconds", "600")) as job:
        job.wait_until(lambda: "committed 5" in job.output() and len(job.workers()) == 4, "training has begun")
        before = job.module(module)
        assert before is not None
        send(before, signal.SIGKILL)
        job.wait_until(lambda: job.module(module) not in (None, before), "another one is there")
        send(job.workers()["w0"], signal.SIGKILL)
        job.wait_until(lambda: "recovered in" in job.messages(), "the job trains on")
        job.release()
        outcome = job.wait()
    check_survived(outcome, bench.reference(IDLE))


def test_a_certificate_for_another_host_is_refused_before_anything_starts(bench: Bench, tmp_path: Path) -> None:
    wrong = flags(Authority(tmp_path / "ca").issue("host", "10.0.0.7"))
    outcome = bench.run(SHORT, flags=wrong)
    assert outcome.status == 2
    assert "certificate is not valid for '127.0.0.1'" in outcome.stderr
    assert not outcome.run_dir.exists()


def address(job: Job) -> tuple[str, int] | None:
    """The address of the controller."""
    return next((found for path in job.temporary.glob("relight-*") if (found := read_address(path)) is not None), None)


def first_word(job: Job) -> object:
    """The first message of the controller to a new connection."""
    found = address(job)
    assert found is not None
    with socket.create_connection(found, timeout=20.0) as stranger:
        payload = receive_payload(stranger)
    assert payload is not None
    return decode(make_decoder(StartTls), payload)
