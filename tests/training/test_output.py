"""Words of relight in a worker whose script has closed its standard streams, or put others in their place."""

import builtins
import io
import sys
from typing import Any

import pytest

from relight.training import output


class Logger:
    """A script's own, whose file is closed."""

    def write(self, text: str) -> None:
        raise ValueError(f"I/O operation on closed file: {text}")

    def flush(self) -> None:
        raise ValueError("I/O operation on closed file")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [closed(), Logger(), None, object()], ids=["closed", "own", "none", "no stream"])
def test_words_go_where_the_process_began(monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    first = io.StringIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr(sys, "__stderr__", first)
    output.tell("it ends")
    output.flush()
    assert first.getvalue() == "it ends\n"
    monkeypatch.setattr(sys, "__stderr__", None)
    output.tell("it ends")


def test_words_do_not_depend_on_print(monkeypatch: pytest.MonkeyPatch) -> None:
    own = io.StringIO()
    monkeypatch.setattr(sys, "stderr", own)
    monkeypatch.setattr(builtins, "print", lambda *_, **__: None)  # on ranks other than the first
    output.tell("it ends")
    assert own.getvalue() == "it ends\n"


def test_a_scripts_own_stream_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    own = io.StringIO()
    monkeypatch.setattr(sys, "stderr", own)
    output.tell("it ends")
    assert own.getvalue() == "it ends\n"
