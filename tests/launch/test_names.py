"""The name of the first host, which a cluster may know late or not at all."""

import socket
from pathlib import Path
from typing import Any

import pytest

from relight.cli import main
from relight.launch import commands


def test_a_name_that_is_not_known_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "NAME_SECONDS", 1.5)  # two tries
    (tmp_path / "train.py").touch()
    token = tmp_path / "token"
    token.write_text("a secret of this test's hosts")
    token.chmod(0o600)
    asked = ("run", "--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "n1.invalid:29400")
    where = ("--token-file", str(token), "--run-dir", str(tmp_path / "run"), str(tmp_path / "train.py"))
    assert main([*asked, *where]) == 1
    said = capfd.readouterr().err
    assert "n1.invalid, cannot be resolved here" in said
    assert "--rdzv-endpoint ADDRESS:PORT" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_a_name_that_is_known_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a pod, which Kubernetes publishes some time after it has started the pod."""
    right: Any = socket.getaddrinfo
    asked: list[str] = []

    def known_at_the_second_try(name: str, *more: Any, **others: Any) -> Any:
        asked.append(name)
        if len(asked) < 2:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return right("127.0.0.1", *more, **others)

    monkeypatch.setattr(socket, "getaddrinfo", known_at_the_second_try)
    assert commands._resolve_own("n1.invalid") == "127.0.0.1"
    assert asked == ["n1.invalid"] * 2
