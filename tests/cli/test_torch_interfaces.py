"""An installed torch that lacks a private interface, or was not tested: said before the first step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_SECONDS = 120.0
# Changes torch as soon as it is imported, in every process.
CHANGING = """
import importlib.abc, importlib.util, sys

class Changing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            CHANGE

        spec.loader.exec_module = execute_and_change
        return spec

sys.meta_path.insert(0, Changing())
"""
SCRIPT = """
import torch
import relight

job = relight.init()
print("joined")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training = relight.Training(model=model, optimizer=optimizer)
for step in training.steps(2):
    with step:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""


def run(directory: Path, change: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (directory / "sitecustomize.py").write_text(CHANGING.replace("CHANGE", change))
    (directory / "train.py").write_text(SCRIPT)
    paths = [str(directory), *(path for path in sys.path if path)]
    return subprocess.run(
        [sys.executable, "-P", "-m", "relight.cli", "run", *flags, "--run-dir", directory / "run", "train.py"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


@pytest.mark.parametrize("flags", [(), ("--preload", "torch")], ids=["", "preloaded"])
def test_an_interface_that_torch_lacks_is_named_before_the_job_is_joined(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    result = run(tmp_path, "del module.autograd.graph._engine_run_backward", *flags)
    assert result.returncode == 1
    assert "lacks torch.autograd.graph._engine_run_backward, which relight needs: install torch" in result.stdout
    assert "Traceback" not in result.stdout
    assert "joined" not in result.stdout


def test_a_release_that_was_not_tested_is_named_once(tmp_path: Path) -> None:
    result = run(tmp_path, 'module.__version__ = "9.99.0"', "--standby", "1")
    assert result.returncode == 0, result.stdout
    live, _, summary = result.stdout.partition("\nJob ")
    assert live.count("torch 9.99.0 is installed; relight was tested with") == 1
    assert summary.count("torch 9.99.0 is installed; relight was tested with") == 1
