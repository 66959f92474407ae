"""Starts a script as the agent does, in a worker process without an agent."""

import os
import subprocess
from pathlib import Path

import pytest

from relight.agent.processes.process import WORKER_COMMAND
from relight.wire.settings import JobSettings, encode_settings

SECONDS = 60.0 * float(os.environ.get("RELIGHT_TEST_PATIENCE", "1"))


@pytest.mark.parametrize(("preload", "is_there"), [("", False), ("json", True)])
def test_torch_is_imported_by_the_script_unless_all_workers_have_it_preloaded(
    tmp_path: Path, preload: str, is_there: bool
) -> None:
    """A process that replaces a forked one computes with the threads that torch has found in the same environment."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('torch' in sys.modules, 'relight.training.job' in sys.modules)\n")
    settings = JobSettings(job="job", script=str(script), preload=preload)
    (tmp_path / "settings.json").write_bytes(encode_settings(settings))
    environment = {**os.environ, "RELIGHT_PRIVATE_DIR": str(tmp_path), "RELIGHT_PROCESS": "w0"}
    result = subprocess.run(
        WORKER_COMMAND, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (result.returncode, result.stdout.split()) == (0, [str(is_there)] * 2), result.stderr
