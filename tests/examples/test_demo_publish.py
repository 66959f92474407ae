"""A short run of the demo that trains, serves, and kills; and what it concludes from what it saw."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.survival.harness import PATIENCE

DEMO = Path(__file__).parents[2] / "examples" / "demo_publish.py"
SECONDS = 280.0 * PATIENCE


@pytest.mark.all
@pytest.mark.timeout(300 * PATIENCE)
def test_both_servers_end_with_what_training_ended_with(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), "--steps", "160", "--publish-every", "10", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 workers and a server were killed" in done.stdout
