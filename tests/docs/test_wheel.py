"""The wheel has all that users run, and nothing that only developers use."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling, which builds the wheel, is not installed")

EVERY_MODULE = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import relight
assert relight.__file__.startswith(sys.argv[1]), relight.__file__
for module in pkgutil.walk_packages(relight.__path__, "relight."):
    if module.name.startswith(("relight.core", "relight.sim", "relight.server", "relight.prove", "relight.goodput")):
        importlib.import_module(module.name)
        print(module.name)
"""


@pytest.fixture(scope="module")
def files() -> dict[str, Path]:
    """Files of the wheel, by their path there."""
    builder = wheel.WheelBuilder(str(REPOSITORY))
    return {file.distribution_path: Path(file.path) for file in builder.recurse_included_files()}


@pytest.fixture(scope="module")
def unpacked(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files, as pip would install them."""
    root = tmp_path_factory.mktemp("installed")
    for name, path in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, root / name)
    return root


def test_only_the_judge_of_journals_is_left_of_the_simulator(files: dict[str, Path]) -> None:
    left = {name for name in files if name.startswith("relight/sim/")}
    judge = {f"relight/sim/judge/{name}.py" for name in ("__init__", "invariants", "journal", "placement", "supply")}
    assert left == {"relight/sim/__init__.py", *judge}


def test_everything_else_is_in_it(files: dict[str, Path]) -> None:
    source = REPOSITORY / "src"
    modules = {path.relative_to(source).as_posix() for path in (source / "relight").rglob("*.py")}
    assert {name for name in modules if not name.startswith("relight/sim/")} <= files.keys()
    assert any(name.endswith(".js") for name in files)


def test_what_is_left_needs_nothing_of_what_is_left_out(unpacked: Path) -> None:
    command = [sys.executable, "-P", "-c", EVERY_MODULE, str(unpacked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert {"relight.sim.judge.journal", "relight.prove.command"} <= set(done.stdout.split())


def test_the_command_runs_from_it(unpacked: Path, tmp_path: Path) -> None:
    """`relight check` imports the judge only once it is given a run."""
    main = f"import sys; sys.path.insert(0, {str(unpacked)!r}); from relight.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", main, "check", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ))
    assert done.returncode == 2, done.stderr
    assert "cannot be read" in done.stderr
