"""A process that ends, or is killed, with data loading processes of its own: it ends well, and nothing of it stays."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from relight.parent import remove_private_dir

ENDING = """
import multiprocessing, os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from relight.training.process.leftovers import end_children

loader = DataLoader(TensorDataset(torch.zeros(64)), num_workers=2)
iterator = iter(loader)
next(iterator)
children = multiprocessing.active_children()
if sys.argv[1] == "in order":
    end_children()
else:
    for child in children:
        child.kill()
for child in children:
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
print("ends", flush=True)
os._exit(0)
"""

SPAWNING = """
import os, sys
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from relight.training.process.leftovers import keep_together

keep_together(Path(sys.argv[1]), "w0")
if __name__ == "__main__":
    loader = DataLoader(TensorDataset(torch.zeros(64)), num_workers=1, multiprocessing_context="spawn")
    iterator = iter(loader)
    next(iterator)
    print("loads", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("way", ["in order", "by force"])
def test_loaders_that_are_killed_at_the_end_raise_nothing(way: str) -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING, way], capture_output=True, text=True, check=False)
    if way == "in order":
        assert (ended.stdout, ended.returncode) == ("ends\n", 0), ended.stderr
    else:  # what there is to be prevented
        assert "is killed by signal" in ended.stderr
        assert ended.returncode == 1


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no shared memory here")
def test_a_killed_worker_leaves_nothing(tmp_path: Path) -> None:
    private_dir = Path("/tmp") / f"relight-{uuid.uuid4().hex[:8]}"
    private_dir.mkdir(mode=0o700)
    own = tmp_path / "temporary"
    own.mkdir()
    script = tmp_path / "script.py"
    script.write_text(SPAWNING)
    try:
        with subprocess.Popen(
            [sys.executable, str(script), str(private_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(own)},
        ) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "loads\n"
            os.killpg(worker.pid, signal.SIGKILL)
        semaphores = [name for name in os.listdir("/dev/shm") if name.startswith(f"sem.{private_dir.name}-w0-")]
        assert semaphores  # its tracker was killed too
    finally:
        remove_private_dir(private_dir)
    assert not private_dir.exists()
    assert not list(own.glob("pymp-*"))
    assert not [name for name in os.listdir("/dev/shm") if private_dir.name in name]
