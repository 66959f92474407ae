"""The stages of recoveries on a device: four ranks that share it (gloo), or one on each of several (NCCL)."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from relight.core.account.report import JobReport, decode_report

ROOT = Path(__file__).parents[2]
FAULTS = (
    "kill rank 1 in BACKWARD of step 5",
    "kill rank 2 in OPTIMIZER of step 9",
    "raise rank 3 in FORWARD of step 13",
    "freeze rank 1 in BARRIER of step 17",
)
STEPS = 22
DEADLINE_S = 150.0


def measure(groups: str) -> dict[str, Any]:
    """Run a job undisturbed and disturbed; return each recovery's stages, and whether the bits are the same."""
    ranks = 4 if groups == "gloo" else min(8, torch.cuda.device_count() - 1)
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as place:
        undisturbed, _ = run(Path(place, "undisturbed"), ranks, groups, ())
        disturbed, told = run(Path(place, "disturbed"), ranks, groups, FAULTS)
    if undisturbed.error or disturbed.error:
        return {"passed": False, "error": undisturbed.error or disturbed.error}
    return {
        "passed": disturbed.final_state_digest == undisturbed.final_state_digest,
        "ranks": ranks,
        "groups": groups,
        "model": told,
        "steps_per_s": round(undisturbed.steps / undisturbed.wall_seconds, 2),
        "recoveries": [
            {
                "failure": FAULTS[number],
                "decision": recovery.decision,
                "steps_repeated": recovery.steps_repeated,
                "moved_bytes": recovery.moved_bytes,
                **{name: round(getattr(recovery.stages, name) or 0.0, 4) for name in recovery.stages.__struct_fields__},
            }
            for number, recovery in enumerate(disturbed.recoveries)
        ],
    }


def run(directory: Path, ranks: int, groups: str, faults: tuple[str, ...]) -> tuple[JobReport, str]:
    """Run one job to its end; return its report, and what rank 0 has said of the model."""
    directory.mkdir()
    devices = "0" if groups == "gloo" else ",".join(map(str, range(torch.cuda.device_count())))
    command = [
        *(sys.executable, "-P", "-m", "relight.cli", "run", "--nproc-per-node", str(ranks)),
        *("--standby", str(len(faults[:1])), "--run-dir", str(directory / "run")),
        *(word for fault in faults for word in ("--chaos", fault)),
        *(str(Path(__file__).parent / "model.py"), "--steps", str(STEPS), "--told", str(directory / "told")),
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": devices, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        command,
        cwd=directory,
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    report = directory / "run" / "report.json"
    if not report.exists():
        return JobReport(job="", error=ended.stderr[-2000:]), ""
    told = directory / "told"
    return decode_report(report.read_bytes()), told.read_text() if told.exists() else ""
