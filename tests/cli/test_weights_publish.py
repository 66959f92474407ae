"""`relight weights publish` as a user runs it, with engines that wait for it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import relight

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
            _, said = publishing.communicate(timeout=SECONDS)
            assert publishing.returncode == 0, said
            for receiver in (first, second):
                assert receiver.wait_for(7, SECONDS)
                assert receiver.digest() == relight.digest_weights(tensors)
        assert "version 7: first, second" in said
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
        (("{checkpoint}", "place", "--engines", "0"), "at least 1"),
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
