"""`relight weights gate` and `relight weights relay` as their user runs them, with a publisher and engines."""

import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import relight
from tests.cli.command import Result
from tests.cli.test_bad_input import check

Relight = Callable[..., Result]
SECONDS = 60.0


def start(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "relight.cli", "weights", *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def said(process: subprocess.Popen[str], what: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if what in line:
            return line
    raise AssertionError(f"it ended without saying {what!r}")


def test_engines_behind_a_relay_get_what_is_published(tmp_path: Path) -> None:
    near, far, token = tmp_path / "near", tmp_path / "far", tmp_path / "token"
    near.mkdir()
    endpoint = f"127.0.0.1:{free_port()}"
    tensors = {f"w{index}": torch.randn(300, 300) for index in range(5)}
    with relight.Publisher(near) as publisher:
        gate = start("gate", near, endpoint, "--token-file", token)
        relay = None
        try:
            said(gate, "Ctrl-C ends it")
            assert stat.S_IMODE(token.stat().st_mode) == 0o600
            publisher.begin(relight.TensorSource(tensors), version=7, hold=True)
            relay = start("relay", endpoint, far, "--token-file", token, "--name", "second host")
            blank = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            with relight.Receiver(far, model=blank) as engine:
                assert engine.wait_for(7, SECONDS)
                assert engine.digest() == relight.digest_weights(tensors)
            assert [engine.name for engine in publisher.engines()] == ["second host"]
            for process in (relay, gate):
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=SECONDS)
                assert process.returncode == 130
            assert list(far.iterdir()) == []
        finally:
            for process in filter(None, (relay, gate)):
                process.kill()
                process.communicate()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gate", "runs", "7100", "--token-file", "t"), "write a host and a port"),
        (("gate", "runs", "127.0.0.1:x", "--token-file", "t"), "write a host and a port"),
        (("relay", "127.0.0.1:70000", "runs", "--token-file", "t"), "write a host and a port"),
        (("relay", "127.0.0.1:7100", "runs", "--token-file", "nothing/here"), "copy it from the gate's host"),
        (("gate", "runs", "127.0.0.1:7100", "--token-file", "nothing/here"), "cannot be made"),
        (("relay", "127.0.0.1:7100", "runs", "--token-file", "short"), "at least 16"),
    ],
)
def test_mistakes(relight: Relight, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "short").write_text("x")
    result = relight("weights", *[str(tmp_path / "short") if word == "short" else word for word in words])
    check(result, message)


def test_an_address_of_another_host(relight: Relight, tmp_path: Path) -> None:
    token = str(tmp_path / "token")
    result = relight("weights", "gate", str(tmp_path), "192.0.2.1:7100", "--token-file", token)
    assert result.status == 1
    assert "cannot listen at 192.0.2.1, port 7100" in result.errors
