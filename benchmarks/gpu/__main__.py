"""Everything that must be shown on a machine with GPUs, in parts: python -m benchmarks.gpu [PART ...]

Uses the Python and torch that run it, and no network. Writes runs/gpu/results.json after each part.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu import copies, overlap, publishing, restoring, stages, steps
from relight.device.choose import accelerator

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "runs" / "gpu" / "results.json"
JOBS = max(1, min(8, (os.cpu_count() or 1) // 2))  # tests at a time
OTHERS = ["relight", "relight-host", "ipc-buckets", "ipc-tensors", "limit"]


class Part(NamedTuple):
    """A part: what it shows, and the tests that do, or a measurement."""

    shows: str
    tests: Sequence[str] = ()
    measure: Callable[[], dict[str, Any]] | None = None


def publish() -> dict[str, Any]:
    """Publish sets of several sizes to one engine or more, as far as the device has room."""
    kind = accelerator()
    free = (kind.free_bytes(kind.device_of_slot(0)) or 0) / publishing.GIB
    found: dict[str, Any] = {}
    for gib, engines in ((1, 1), (1, 2), (1, 4), (8, 1), (8, 2), (8, 4), (32, 1)):
        if gib * (1 + 2 * engines) + 3 + engines < free:
            found[f"{gib} GiB to {engines}"] = publishing.measure(gib, engines, OTHERS)
    for mib in (32, 64, 128, 512):
        found[f"8 GiB to 1, buckets of {mib} MiB"] = publishing.measure(
            8, 1, ["relight"], bucket_bytes=mib * publishing.MIB
        )
    return found


PARTS = {
    "copies": Part("bandwidth between pinned, shared and device memory", measure=copies.measure),
    "recovery": Part(
        "kills, freezes and exceptions in each phase, bit for bit", ["tests/survival/test_gpu.py", "-k", "replaced"]
    ),
    "scripts": Part(
        "scalers, autocast, fused optimizers, a rank alone with NCCL, an engine beside a job",
        ["tests/survival/test_gpu.py", "-k", "not replaced"],
    ),
    "transfer": Part(
        "publishing and restoring between devices, and their health",
        ["tests/transfer/test_device.py", "tests/device/test_nvidia.py"],
    ),
    "stages": Part("the stages of four recoveries", measure=lambda: stages.measure("gloo")),
    "steps": Part("the cost of a step of 20, 50, 100 and 200 ms, by the device's clock", measure=steps.measure),
    "publish": Part("1, 8 and 32 GiB to engines on the device, beside others' designs", measure=publish),
    "restore": Part(
        "a replacement's state from device to device",
        measure=lambda: {f"{gib} GiB": restoring.measure(gib) for gib in (1, 8)},
    ),
    "overlap": Part(
        "copies beside kernels, in a trace", measure=lambda: overlap.measure(RESULTS.with_name("trace.json"))
    ),
}
if accelerator().count() > 2:
    PARTS["stages-nccl"] = Part("the same with NCCL, a rank on each device", measure=lambda: stages.measure("nccl"))


def main() -> int:
    """Run the parts asked for; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all; list: name them")
    asked = parser.parse_args().parts
    if asked == ["list"]:
        print("\n".join(f"{name}: {part.shows}" for name, part in PARTS.items()))
        return 0
    if unknown := sorted(set(asked) - PARTS.keys()):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if accelerator().is_host:
        print("benchmarks.gpu: torch sees no device here; nothing was run")
        return 1
    failed = False
    for name in asked or PARTS:
        started = time.monotonic()
        part = PARTS[name]
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        try:
            outcome = run_tests(part.tests) if part.measure is None else part.measure()
        except Exception:
            outcome = {"passed": False, "error": traceback.format_exc()}
        outcome |= {"seconds": round(time.monotonic() - started, 1), "date": datetime.date.today().isoformat()}
        failed |= not outcome.get("passed", True)
        write(name, outcome)
        print(f"{name}: {json.dumps(outcome)}", flush=True)
    return int(failed)


def run_tests(arguments: Sequence[str]) -> dict[str, Any]:
    """Run tests marked gpu; return whether all passed, and pytest's last line."""
    at_a_time = ["-n", str(JOBS), "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *at_a_time, *arguments]
    ended = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    lines = ended.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if ended.returncode:
        RESULTS.with_name("tests.log").write_text(ended.stdout)
    return {"passed": ended.returncode == 0, "summary": lines[-1] if lines else "", "failed": failed}


def write(name: str, outcome: dict[str, Any]) -> None:
    """Put a part's outcome into the file, beside what other parts have left there."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found["machine"] = describe_machine()
    found.setdefault("parts", {})[name] = outcome
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


def describe_machine() -> dict[str, Any]:
    """Return devices, driver and versions."""
    kind = accelerator()
    module = torch.get_device_module(kind.type)
    name = getattr(module, "get_device_name", lambda _: kind.type)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return {
        "devices": [name(index) for index in range(kind.count())],
        "driver": driver,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
