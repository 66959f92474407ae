"""The tests that decide which versions of torch relight promises, on each of them: `python -m tests.versions`.

Each version gets an environment of its own under `.versions/`, with the pinned packages but for torch. A run replaces
the rows of its versions and groups in `benchmarks/results/versions.md`.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".versions"
RECORD = ROOT / "benchmarks" / "results" / "versions.md"
VERSIONS = ("2.13.0", "2.14.1")  # the newest patch of each release that pyproject.toml accepts
GROUPS = {
    "private interfaces": (
        "tests/training/test_torch_private.py",
        "tests/training/test_fsdp_private.py",
        "tests/training/test_mesh_private.py",
        "tests/training/test_pipeline_private.py",
        "tests/training/test_zero_private.py",
        "tests/training/test_installed.py",
        "tests/training/test_backward.py",
        "tests/training/test_group.py",
        "tests/training/test_standby_groups.py",
        "tests/training/test_detached_collectives.py",
        "tests/training/test_transaction.py",
    ),
    "survival: matrix": ("tests/survival/test_matrix.py",),
    "survival: shapes": ("tests/survival/test_shapes.py",),
    "survival: divided state": ("tests/survival/test_divided.py"),
}
HEAD = """# Versions of torch

Made by `make test-versions`, which runs the tests of torch's private interfaces and the short survival matrix in an
environment of its own for each version. pyproject.toml accepts the releases that stand here, and no others.

"""


@dataclass(frozen=True)
class Row:
    """One group of tests on one version."""

    torch: str
    tests: str
    outcome: str
    seconds: str
    python: str
    commit: str
    date: str


def make_environment(version: str) -> Path:
    """Returns the Python of an environment with this torch, made on first use."""
    directory = ENVIRONMENTS / version
    python, ready = directory / "bin" / "python", directory / ".setup"
    if not ready.exists():
        pins = (ROOT / "constraints.txt").read_text()
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        constraints = directory / "constraints.txt"
        constraints.write_text(re.sub(r"(?m)^torch==.*$", f"torch=={version}", pins))
        install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
        subprocess.run([*install, "--editable", f"{ROOT}[dev]"], check=True)
        ready.touch()
    return python


def run_group(python: Path, group: str) -> Row:
    """Run one group of tests, and say what became of it."""
    began = time.monotonic()
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *GROUPS[group]]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    summary = re.sub(r" in [\d.]+s.*$", "", (done.stdout.strip().splitlines() or ["nothing ran"])[-1]).strip("= ")
    outcome = re.sub(r", \d+ deselected", "", summary)
    return Row(
        torch=_told_by(python, "import torch; print(torch.__version__)"),
        tests=group,
        outcome=outcome if done.returncode == 0 else f"**{outcome}**",
        seconds=f"{time.monotonic() - began:.0f}",
        python=_told_by(python, "import platform; print(platform.python_version())"),
        commit=_commit(),
        date=f"{datetime.now(UTC):%Y-%m-%d}",
    )


def _told_by(python: Path, program: str) -> str:
    return subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def _commit() -> str:
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    changed = subprocess.run([*git, "status", "--porcelain", "src"], capture_output=True, text=True, check=True)
    return commit.stdout.strip() + (" and changes" if changed.stdout else "")


def recorded(text: str) -> list[Row]:
    """The rows of a record."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    return [Row(*row) for row in cells[2:]]


def record(rows: Sequence[Row], text: str) -> str:
    """A record in which these rows stand in place of older ones of the same torch and tests."""
    kept = {(row.torch, row.tests): row for row in (*recorded(text), *rows)}
    order = list(GROUPS)
    table = sorted(kept.values(), key=lambda row: (row.torch, order.index(row.tests) if row.tests in order else 99))
    names = [field.name for field in fields(Row)]
    lines = [names, ["---"] * len(names), *(list(astuple(row)) for row in table)]
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=f"of torch; default: {' '.join(VERSIONS)}")
    parser.add_argument("--group", action="append", choices=GROUPS, help="of tests; default: all")
    options = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    failed = False
    for version in options.versions:
        python = make_environment(version)
        for group in options.group or GROUPS:
            row = run_group(python, group)
            failed |= row.outcome.startswith("**")
            RECORD.write_text(record([row], RECORD.read_text() if RECORD.exists() else ""))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
