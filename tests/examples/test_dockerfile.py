"""The Dockerfile: its files are there, and its steps install what it says. Docker itself is not needed, or tried."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DOCKERFILE = REPOSITORY / "examples" / "kubernetes" / "Dockerfile"
KNOWN = {"FROM", "ARG", "COPY", "RUN", "USER", "WORKDIR"}
builder = pytest.importorskip("hatchling.builders.wheel", reason="hatchling, which builds the wheel, is not installed")


def instructions() -> list[tuple[str, str]]:
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line and not line.startswith("#")]
    return [
        (word, rest)
        for word, _, rest in (line.partition(" ") for line in "\n".join(lines).replace("\\\n", "").splitlines())
    ]


def run_step(start: str) -> str:
    (found,) = [rest for word, rest in instructions() if word == "RUN" and rest.startswith(start)]
    return found


def defaults() -> dict[str, str]:
    return dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG")


def test_it_is_a_dockerfile_for_a_python_that_relight_supports() -> None:
    assert {word for word, _ in instructions()} <= KNOWN
    first, image = instructions()[0]
    assert first == "FROM"
    python = re.fullmatch(r"python:3\.(\d+)-slim", image)
    assert python is not None
    assert int(python[1]) >= 11
    for word, rest in instructions():
        if word == "RUN":
            subprocess.run(["sh", "-n"], input=rest, text=True, check=True)


def test_the_files_that_it_copies_are_sent_to_docker() -> None:
    sent = [line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [
        part for word, rest in instructions() if word == "COPY" for part in rest.split()[:-1] if part[:2] != "--"
    ]
    assert len(sources) == 3
    for source in sources:
        assert any(source == name or source.startswith(f"{name}/") for name in sent), source
        assert source.startswith("dist/") or (REPOSITORY / source).exists(), source


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = str(tmp_path_factory.mktemp("dist"))
    (wheel,) = builder.WheelBuilder(str(REPOSITORY)).build(directory=directory, versions=["standard"])
    return Path(wheel)


@pytest.mark.parametrize("given", [{}, {"EXTRAS": ""}], ids=["as it is", "without GPUs"])
def test_its_steps_install_the_wheel(tmp_path: Path, wheel: Path, given: dict[str, str]) -> None:
    """In an environment that sees the packages of this one, so that none is downloaded; the constraints are kept."""
    assert fnmatch.fnmatch(wheel.name, "relight-*.whl")
    shutil.copy(wheel, tmp_path)
    shutil.copy(REPOSITORY / "constraints.txt", tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "image")], check=True)
    (site,) = (tmp_path / "image" / "lib").glob("python*/site-packages")
    here = sysconfig.get_paths()["purelib"]
    (site / "below.pth").write_text(f"import sys; sys.path.append({here!r})\n")
    pip = tmp_path / "image" / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec {tmp_path}/image/bin/python -m pip "$@"\n')
    pip.chmod(0o755)
    environment = {**os.environ, **defaults(), **given, "PATH": f"{tmp_path / 'image' / 'bin'}:{os.environ['PATH']}"}
    step = run_step("pip install").replace("/tmp/", f"{tmp_path}/")
    done = subprocess.run(["sh", "-c", step], env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert not done.returncode, done.stderr
    assert ("nvidia-ml-py" in done.stdout) == (not given), done.stdout
    assert not list(tmp_path.glob("*.whl"))
    assert (site / "relight" / "cli.py").exists()
    asked = subprocess.run([str(pip), "check"], capture_output=True, text=True, check=False)
    assert "relight" not in asked.stdout, asked.stdout
    shown = subprocess.run(
        [str(tmp_path / "image/bin/relight"), "--version"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip(), shown.stderr
