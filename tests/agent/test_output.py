import os
import threading
from pathlib import Path

import pytest

from relight.agent.processes.output import FILE_ONLY, LineSplitter, LogFile, Spool

DEADLINE_SECONDS = 10.0


class Collector:
    """The target of a Spool in these tests; `gate` holds it up like a terminal that does not read."""

    def __init__(self) -> None:
        self.data = b""
        self.gate = threading.Event()
        self.gate.set()

    def write(self, data: bytes) -> None:
        assert self.gate.wait(DEADLINE_SECONDS)
        self.data += data


def test_lines_are_put_together_from_any_pieces() -> None:
    text = b"one\ntwo\r\nthree\rfour\n\nlast"
    for size in range(1, len(text) + 1):
        splitter = LineSplitter()
        lines = [line for begin in range(0, len(text), size) for line in splitter.feed(text[begin : begin + size])]
        assert lines + splitter.flush() == [b"one", b"two", b"three", b"four", b"", b"last"]
        assert splitter.flush() == []


def test_a_huge_line_is_shown_in_pieces_and_never_held_whole() -> None:
    splitter = LineSplitter(limit=100)
    lines = [line for _ in range(50) for line in splitter.feed(b"x" * 33)] + splitter.feed(b"\n")
    assert b"".join(lines) == b"x" * 1650
    assert {len(line) for line in lines[:-1]} == {100}


def test_a_huge_line_is_not_cut_inside_a_character() -> None:
    text = "é€😀" * 50
    splitter = LineSplitter(limit=10)
    lines = splitter.feed(text.encode() + b"\n")
    assert "".join(line.decode() for line in lines) == text


def test_every_piece_of_a_huge_line_for_the_file_only_is_for_the_file_only() -> None:
    lines = LineSplitter(limit=10).feed(FILE_ONLY + b"x" * 25 + b"\n")
    assert len(lines) == 3
    assert all(line.startswith(FILE_ONLY) for line in lines)


def test_continuation_bytes_alone_are_cut_too() -> None:
    lines = LineSplitter(limit=10).feed(b"\x80" * 100 + b"\n")
    assert b"".join(lines) == b"\x80" * 100
    assert max(map(len, lines)) <= 10


def test_a_spool_never_waits_and_says_what_it_dropped() -> None:
    spool, sink = Spool("test", limit=1000), Collector()
    sink.gate.clear()
    for _ in range(100):
        spool.put(sink, b"x" * 99 + b"\n")
    sink.gate.set()
    assert spool.flush(DEADLINE_SECONDS)
    spool.put(sink, b"end\n")
    assert spool.flush(DEADLINE_SECONDS)
    *lines, note, end = sink.data.splitlines()
    assert lines == [b"x" * 99] * 10
    assert b"9000 bytes of output are missing" in note
    assert end == b"end"


def test_flush_gives_up_on_a_terminal_that_does_not_read() -> None:
    spool, sink = Spool("test"), Collector()
    sink.gate.clear()
    spool.put(sink, b"x")
    assert not spool.flush(0.05)
    sink.gate.set()


def test_a_log_file_appends(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "rank-0.log"
    console = Spool("test")
    LogFile(path, console).write(b"one\n")
    LogFile(path, console).write(b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_told_once_and_hurts_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    console = Spool("test")
    file = LogFile(Path("/dev/full"), console)
    for _ in range(3):
        file.write(b"x")
    assert console.flush(DEADLINE_SECONDS)
    assert capfd.readouterr().out.count("/dev/full cannot be written (No space left on device)") == 1
