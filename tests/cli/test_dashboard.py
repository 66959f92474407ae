"""`relight run --dashboard` and `relight dashboard`: beside the job, never in its way."""

import http.client
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import Command
from tests.cli.conftest import Relight

Begin = Callable[..., Command]


def url_of(command: Command, path: Path) -> tuple[str, int]:
    """Host and port of the page, once its URL was printed."""
    command.wait_for(lambda: "dashboard at http://" in path.read_text(), "the URL was printed")
    found = re.search(r"dashboard at http://([\w.]+):(\d+)/", path.read_text())
    assert found is not None, path.read_text()
    return found[1], int(found[2])


def status_of(host: str, port: int, path: str) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def test_the_page_comes_and_goes_with_the_job(begin: Begin, script: Path) -> None:
    job = begin("run", "--dashboard-address", "127.0.0.1:0", "--run-dir", "run", str(script))
    host, port = url_of(job, job.errors_path)
    job.wait_for_output("up as rank 0")
    assert status_of(host, port, "/") == 200
    assert status_of(host, port, "/api/log?rank=0") == 200
    job.process.send_signal(signal.SIGTERM)
    assert job.finish().status == 143
    with pytest.raises(ConnectionRefusedError):
        status_of(host, port, "/")


def test_its_death_is_told_and_harms_nobody(begin: Begin, script: Path) -> None:
    job = begin("run", "--dashboard-address", ":0", "--run-dir", "run", str(script))
    url_of(job, job.errors_path)
    job.wait_for_output("up as rank 0")
    (pid,) = job.children("relight.dashboard")
    os.kill(pid, signal.SIGKILL)
    job.wait_for(lambda: "the dashboard died of SIGKILL" in job.errors_path.read_text(), "its death was told")
    assert job.children("relight.server")
    assert job.children("relight.agent")
    job.process.send_signal(signal.SIGTERM)
    assert "relight dashboard" in job.finish().errors  # how to get it back


def test_without_being_asked_for_there_is_none(begin: Begin, script: Path) -> None:
    job = begin("run", "--run-dir", "run", str(script))
    job.wait_for_output("up as rank 0")
    assert job.children("relight.dashboard") == []
    job.process.send_signal(signal.SIGTERM)
    job.finish()


def test_a_run_that_is_over_is_shown_until_ctrl_c(begin: Begin, tmp_path: Path) -> None:
    (tmp_path / "over").mkdir()
    page = begin("dashboard", "over", "--address", "127.0.0.1:0")
    host, port = url_of(page, page.output_path)
    assert status_of(host, port, "/") == 200
    page.process.send_signal(signal.SIGINT)
    assert page.finish().status == 0


@pytest.mark.parametrize("address", ["here:there", "127.0.0.1:99999", ":-1"])
def test_an_address_that_is_none_is_refused_before_anything_starts(
    relight: Relight, script: Path, tmp_path: Path, address: str
) -> None:
    result = relight("run", f"--dashboard-address={address}", "--run-dir", "run", str(script))
    assert result.status == 2
    assert "expected HOST:PORT" in result.errors
    assert not (tmp_path / "run").exists()


def test_a_port_that_is_taken_does_not_stop_the_job(begin: Begin, script: Path) -> None:
    first = begin("run", "--dashboard-address", "127.0.0.1:0", "--run-dir", "one", str(script))
    _, port = url_of(first, first.errors_path)
    second = begin("run", "--dashboard-address", f"127.0.0.1:{port}", "--run-dir", "two", str(script))
    second.wait_for_output("up as rank 0")
    second.wait_for(lambda: "the dashboard ended with status 1" in second.errors_path.read_text(), "it was told")
    for job in (first, second):
        job.process.send_signal(signal.SIGTERM)
        job.finish()


def test_a_run_directory_that_is_not_there(relight: Relight) -> None:
    result = relight("dashboard", "nowhere")
    assert result.status == 2
    assert "no run directory nowhere" in result.errors


def test_a_token_that_stays_the_same(begin: Begin, relight: Relight, tmp_path: Path) -> None:
    """Prometheus can be told it once, where others can reach the page."""
    (tmp_path / "run").mkdir()
    token = tmp_path / "token"
    token.write_text("0123456789abcdef+/\n")
    token.chmod(0o600)
    page = begin("dashboard", "run", "--address", "0.0.0.0:0", "--token-file", str(token))
    _, port = url_of(page, page.output_path)
    assert page.output_path.read_text().strip().endswith("#token=0123456789abcdef%2B%2F")
    assert status_of("127.0.0.1", port, "/metrics") == 401
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics", headers={"Authorization": "Bearer 0123456789abcdef+/"})
    assert connection.getresponse().status in (200, 503)
    connection.close()
    page.process.send_signal(signal.SIGINT)
    page.finish()
    token.write_text("not for an address: a b c\n")
    result = relight("dashboard", "run", "--address", "0.0.0.0:0", "--token-file", str(token))
    assert result.status == 2
    assert "letters, digits" in result.errors
