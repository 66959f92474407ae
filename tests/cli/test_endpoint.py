"""The address of the controller, by flags that launch lines for torchrun have."""

from argparse import Namespace

import pytest

from relight.config import find_endpoint
from relight.flags import hint_at_misplaced_flags


def asked(endpoint: str, token_file: str | None = None) -> Namespace:
    return Namespace(rdzv_endpoint=endpoint, token_file=token_file, master_address="127.0.0.1", master_port=29500)


def test_one_node_needs_no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELIGHT_TOKEN_FILE", raising=False)
    assert find_endpoint(asked("localhost:29577"), 1) is None
    assert find_endpoint(asked("localhost:0"), 1) is None  # torchrun: any free port
    assert find_endpoint(asked("localhost:29577"), 2) == ("localhost", 29577)


def test_one_node_that_others_may_join_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_endpoint(asked("10.0.0.1:29577", "token"), 1) == ("10.0.0.1", 29577)
    monkeypatch.setenv("RELIGHT_TOKEN_FILE", "token")
    assert find_endpoint(asked("10.0.0.1:29577"), 1) == ("10.0.0.1", 29577)


def test_flags_behind_the_script_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    hint_at_misplaced_flags(["train.py", "--lr", "0.1"])
    assert not capsys.readouterr().err
    hint_at_misplaced_flags(["train.py", "--nproc-per-node=2"])
    assert "--nproc-per-node comes after the script's name" in capsys.readouterr().err
