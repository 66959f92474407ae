"""`relight weights publish` as a user runs it, with engines that wait for it."""

import codecs
import contextlib
import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import relight
from tests.timeline.test_perfetto import assert_nested, slices_by_track

SECONDS = 60.0


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {f"block.{index}.weight": torch.randn(64, 1024, generator=generator) for index in range(20)}


@pytest.fixture
def checkpoint(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    return path


def start(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "relight.cli", "weights", "publish", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("sources", [1, 3])
def test_a_checkpoint_reaches_every_engine(
    tmp_path: Path, checkpoint: Path, tensors: dict[str, torch.Tensor], sources: int
) -> None:
    place = tmp_path / "serving"
    words = ("--engines", 2, "--once", "--version", 7, "--sources", sources, "--bucket-bytes", "256KiB")
    publishing = start(checkpoint, place, *words)
    try:
        with (
            relight.Receiver(place, model=blank(tensors), name="first") as first,
            relight.Receiver(place, model=blank(tensors), name="second") as second,
        ):
            shown, said = publishing.communicate(timeout=SECONDS)
            assert publishing.returncode == 0, said
            for receiver in (first, second):
                assert receiver.wait_for(7, SECONDS)
                assert receiver.digest() == relight.digest_weights(tensors)
        assert "2 engines have it" in said
        facts = " ".join(shown.split())
        assert facts.startswith("update version 7, 5.0 MiB in 20 buckets of 256.0 KiB total ")
        assert "by first: 20 buckets, 5.0 MiB in " in facts
        assert facts.endswith("have it first, second")
        assert facts.count("by ") == sources + 2
    finally:
        publishing.kill()
    assert list(place.iterdir()) == []


def test_engines_that_come_later_are_served_until_the_end(
    tmp_path: Path, checkpoint: Path, tensors: dict[str, torch.Tensor]
) -> None:
    place = tmp_path / "serving"
    publishing = start(checkpoint, place)
    try:
        for name in ("first", "late"):
            with relight.Receiver(place, model=blank(tensors), name=name) as receiver:
                assert receiver.wait_for(1, SECONDS)
                assert receiver.digest() == relight.digest_weights(tensors)
        publishing.send_signal(signal.SIGINT)
        _, said = publishing.communicate(timeout=SECONDS)
        assert publishing.returncode == 130, said
        assert "Traceback" not in said
    finally:
        publishing.kill()
    assert list(place.iterdir()) == []


# --- where the time went ------------------------------------------------------------------------------------------
def test_the_update_is_drawn_and_traced(tmp_path: Path, checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    place, trace = tmp_path / "serving", tmp_path / "update.json"
    words = ("--once", "--engines", 2, "--sources", 2, "--bucket-bytes", "512KiB", "--draw", "--trace", trace)
    publishing = start(checkpoint, place, *words)
    try:
        with (
            relight.Receiver(place, model=blank(tensors), name="first"),
            relight.Receiver(place, model=blank(tensors), name="second"),
        ):
            shown, said = publishing.communicate(timeout=SECONDS)
            assert publishing.returncode == 0, said
    finally:
        publishing.kill()
    lines = shown.splitlines()
    (top,) = (index for index, line in enumerate(lines) if line.startswith("planned  I0"))
    assert [line[:11] for line in lines[top : top + 4]] == ["planned  I0", "         I1", "measured I0", "         I1"]
    for rows in (lines[top : top + 2], lines[top + 2 : top + 4]):  # on a busy machine not every bucket can be seen
        assert set("SR") & set("".join(row[14:] for row in rows)), shown
    assert lines[top + 4].startswith("time")
    assert "\nPlanned with the measured means: " in shown

    tracks = slices_by_track(trace.read_bytes())
    for events in tracks.values():
        assert_nested(events)
    sources = [names(events) for (_, track), events in tracks.items() if track.startswith("source ")]
    assert len(sources) == 2
    assert sorted(name for its in sources for name in its) == sorted(f"write {bucket}" for bucket in range(10))
    expected = [*(f"reload {bucket}" for bucket in range(10)), "take version 1"]
    assert names(tracks["measured", "engine first"]) == names(tracks["measured", "engine second"]) == expected
    assert names(tracks["measured", "update"]) == ["version 1", "ask", "move", "take"]


def test_without_a_terminal_there_are_only_plain_lines(
    tmp_path: Path, checkpoint: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on many CI machines: colours perhaps, but no bar
    place = tmp_path / "serving"
    publishing = start(checkpoint, place, "--once")
    try:
        assert publishing.stderr is not None
        first = [publishing.stderr.readline() for _ in range(2)]
        assert first == [
            f"relight: 20 tensors, 5.0 MiB; engines: {place}\n",
            "relight: waiting: 0 of 1 engines are here\n",
        ]
        with relight.Receiver(place, model=blank(tensors), name="\x1b[31mred\a"):
            shown, said = publishing.communicate(timeout=SECONDS)
            assert publishing.returncode == 0, said
    finally:
        publishing.kill()
    assert all(line.startswith("relight: ") for line in said.splitlines())
    assert all(char.isprintable() or char == "\n" for char in said)
    assert "?[31mred?" in shown


def test_a_trace_that_cannot_be_written_is_said_first(tmp_path: Path, checkpoint: Path) -> None:
    publishing = start(checkpoint, tmp_path / "serving", "--trace", tmp_path / "missing" / "update.json")
    _, said = publishing.communicate(timeout=SECONDS)
    assert publishing.returncode == 2, said
    assert f"--trace {tmp_path / 'missing' / 'update.json'} cannot be written: No such file or directory" in said
    assert list((tmp_path / "serving").iterdir()) == []


def names(events: list[dict[str, Any]]) -> list[str]:
    return [event["name"] for event in events]


# --- on a terminal ------------------------------------------------------------------------------------------------
@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator["Terminal"]:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    yield terminal
    terminal.close()


class Terminal:
    """A command on a pseudo-terminal of 100 columns, and all that it has written there."""

    def __init__(self) -> None:
        self._master, self._slave = os.openpty()
        termios.tcsetwinsize(self._slave, (24, 100))
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end within a character
        self.command: subprocess.Popen[bytes] | None = None

    def start(self, *words: object) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "relight.cli", "weights", "publish", *map(str, words)]
        self.command = subprocess.Popen(command, stdin=self._slave, stdout=self._slave, stderr=self._slave)
        return self.command

    def read_until(self, wanted: str) -> None:
        end = time.monotonic() + SECONDS
        while wanted not in self.text:
            ready, _, _ = select.select([self._master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{wanted!r} does not come: {self.text!r}"
            self._read()

    def _read(self) -> None:
        self.text += self._decoder.decode(os.read(self._master, 65536))

    def end(self) -> int:
        """Wait for the command's end, reading all the while; its exit status."""
        assert self.command is not None
        end = time.monotonic() + SECONDS
        while (status := self.command.poll()) is None or select.select([self._master], [], [], 0)[0]:
            assert time.monotonic() < end, self.text
            if select.select([self._master], [], [], 0.05)[0]:
                self._read()
        return status

    def assert_clean(self) -> None:
        """The cursor is there again, and nothing is left of the bar."""
        assert self.text.count("\x1b[?25l") >= 1
        assert self.text.rindex("\x1b[?25h") > self.text.rindex("\x1b[?25l")
        assert "━" not in self.text[self.text.rindex("\x1b[2K") :]

    def close(self) -> None:
        if self.command is not None:
            self.command.kill()
            self.command.wait()
        os.close(self._master)
        os.close(self._slave)


def test_a_bar_shows_how_far_it_is(
    tmp_path: Path, checkpoint: Path, tensors: dict[str, torch.Tensor], terminal: Terminal
) -> None:
    place = tmp_path / "serving"
    terminal.start(checkpoint, place, "--once", "--engines", 2)
    terminal.read_until("0 of 2 engines are here")
    with relight.Receiver(place, model=blank(tensors), name="first") as first:
        terminal.read_until("1 of 2 engines are here")
        with contextlib.ExitStack() as second:
            with first.serving():  # before the second one comes, and with it the update
                second.enter_context(relight.Receiver(place, model=blank(tensors), name="second"))
                terminal.read_until("in every engine; 1 of 2 answer with it")
            assert terminal.end() == 0, terminal.text
    terminal.assert_clean()
    assert "first, second" in terminal.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_a_clean_terminal(
    tmp_path: Path, checkpoint: Path, tensors: dict[str, torch.Tensor], terminal: Terminal, number: signal.Signals
) -> None:
    place = tmp_path / "serving"
    with relight.Receiver(place, model=blank(tensors)) as receiver, receiver.serving():  # so it cannot end by itself
        command = terminal.start(checkpoint, place, "--once")
        terminal.read_until("0 of 1 answer with it")
        command.send_signal(number)
        command.send_signal(number)  # impatient
        assert terminal.end() == 130, terminal.text
    terminal.assert_clean()
    assert "Traceback" not in terminal.text
    assert list(place.iterdir()) == []


# --- what goes wrong ----------------------------------------------------------------------------------------------
def test_an_engine_of_another_model_is_named(
    tmp_path: Path, checkpoint: Path, tensors: dict[str, torch.Tensor]
) -> None:
    other = blank(tensors) | {"block.3.weight": torch.zeros(2, 2)}
    publishing = start(checkpoint, tmp_path / "serving", "--once")
    try:
        with relight.Receiver(tmp_path / "serving", model=other, name="other") as receiver:
            _, said = publishing.communicate(timeout=SECONDS)
            assert publishing.returncode == 1, said
            assert "block.3.weight comes as [64, 1024], wanted is [2, 2]" in said
            assert receiver.version == -1
    finally:
        publishing.kill()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere.safetensors", "place"), "nowhere.safetensors"),
        (("{checkpoint}", "place", "--bucket-bytes", "much"), "--bucket-bytes much"),
        (("{checkpoint}", "place", "--bucket-bytes", "100"), "multiple of 64"),
        (("{checkpoint}", "{checkpoint}/below"), "cannot be made"),
        (("{checkpoint}", "place", "--engines", "0"), "--engines 0: expected a number of engines 1 or more"),
    ],
)
def test_wrong_usage_is_one_clear_line(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    publishing = start(*(word.format(checkpoint=checkpoint) for word in words))
    _, said = publishing.communicate(timeout=SECONDS)
    assert publishing.returncode == 2, said
    assert message in said
    assert said.count("\n") == 1


def test_nobody_comes(tmp_path: Path, checkpoint: Path) -> None:
    publishing = start(checkpoint, tmp_path / "serving", "--once", "--wait-seconds", "0.1")
    _, said = publishing.communicate(timeout=SECONDS)
    assert publishing.returncode == 1, said
    assert "0 of 1 engines came within 0.1 s" in said
