"""Output of `relight run` in a terminal."""

import os
import signal
import struct
import termios
import time
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from relight.core.protocol.position import Phase, Position
from relight.terminal import fit_line, printable, progress_line
from relight.wire.messages import RankStatus, StatusUpdate
from relight.wire.status import PublishStatus, RestoreStatus
from tests.cli.command import Command


def rank(number: int, version: int, loss: float = float("nan")) -> RankStatus:
    position = Position(generation=3, phase=Phase.FORWARD, version=version, step=version, stamp_ns=1, loss=loss)
    return RankStatus(rank=number, process=f"w{number}", position=position, rss_bytes=1)


def update(**changes: object) -> StatusUpdate:
    values: dict[str, object] = {
        "job": "test",
        "stage": "training",
        "generation": 3,
        "until": 1000,
        "failures": 2,
        "standbys_ready": 1,
        "steps_per_second": 8.44,
        "ranks": (rank(0, 119, 2.3149), rank(1, 118, 9.0)),
    }
    return StatusUpdate(**{**values, **changes})  # type: ignore[arg-type]


def test_one_line_of_progress() -> None:
    line = "step 119/1000 · loss 2.315 · 8.4 steps/s · 2 failures survived · generation 3 · 1 standby ready"
    assert progress_line(update()) == line


def test_what_is_not_known_is_left_out() -> None:
    start = update(stage="starting", until=0, failures=0, generation=1, standbys_ready=0, ranks=())
    assert progress_line(start) == "starting · generation 1"
    assert progress_line(update(stage="stopping", failures=1, ranks=(rank(0, 7),))) == (
        "step 7/1000 · 8.4 steps/s · stopping · 1 failure survived · generation 3 · 1 standby ready"
    )
    assert "2 standbys ready" in progress_line(update(standbys_ready=2))


def test_a_job_that_waits_says_for_what() -> None:
    why = "waiting for a replacement of rank 1: no standby was left; process 7 on node-0 has been starting for 3 s"
    assert f" · stopping · {why} · " in progress_line(update(stage="stopping", waiting=why))


@given(st.text())
def test_nothing_that_is_said_can_move_the_cursor(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) == len(text)
    assert all(char.isprintable() or char == "\n" for char in printable(text, keep="\n"))


def test_a_live_line_fits_into_the_terminal() -> None:
    assert fit_line("short") == "short"
    assert len(fit_line("x" * 10_000)) < 1_000


def test_a_live_line_under_the_output_of_the_workers(
    begin: Callable[..., Command], script: Path, tmp_path: Path
) -> None:
    """On a terminal, one line is rewritten; every line of a worker stands alone."""
    controlling, terminal = os.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    go, late = tmp_path / "go", tmp_path / "late.py"
    late.write_text(
        f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n{script.read_text()}"
    )
    command = begin("run", "--run-dir", "run", str(late), output=terminal, errors=terminal)
    os.close(terminal)
    shown = b""
    deadline = time.monotonic() + 60.0
    while b"starting" not in shown:  # the line is there before the worker prints
        assert time.monotonic() < deadline, shown
        shown += os.read(controlling, 4096)
    go.touch()
    while shown.count(b"starting") < 3 or b"up as rank 0" not in shown:
        assert time.monotonic() < deadline, shown
        shown += os.read(controlling, 4096)
    command.process.send_signal(signal.SIGINT)
    try:
        while chunk := os.read(controlling, 4096):
            shown += chunk
    except OSError:  # the other side of the terminal is closed
        pass
    os.close(controlling)
    assert command.finish().status == 130
    assert b"\r\x1b[Kstarting" in shown
    assert any(line.endswith(b"\x1b[K[rank 0] up as rank 0") for line in shown.split(b"\r\n"))
    assert shown.rstrip().split(b"\r\n")[-1].endswith(b"relight: logs: " + bytes(tmp_path / "run"))


def test_what_is_moved_is_shown_with_its_rate_and_the_time_left() -> None:
    restoring = RestoreStatus(process="w3", rank=2, generation=3, copied_bytes=2**29, total_bytes=2**31, seconds=0.5)
    line = progress_line(update(stage="restoring", waiting="waiting for rank 2", restoring=(restoring,)))
    assert "restoring rank 2: 512.0 MiB of 2.0 GiB (1.0 GiB/s, 2 s left)" in line
    assert "waiting" not in line
    publishing = PublishStatus(process="w0", version=50, moved_bytes=2**20, total_bytes=2**22, update_seconds=1.0)
    line = progress_line(update(publishing=publishing))
    assert "publishing version 50: 1.0 MiB of 4.0 MiB (1.0 MiB/s, 3 s left)" in line
    over = PublishStatus(process="w0", version=50, update_seconds=1.0)
    assert "publishing" not in progress_line(update(publishing=over))
