"""Everything that must be shown on a machine with GPUs, in parts: python -m benchmarks.gpu [PART ...]

Uses the Python and torch that run it, and no network. Writes runs/gpu/results.json after each part.
"""

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from relight.device.choose import accelerator

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "runs" / "gpu" / "results.json"
MIB = 2**20
# Each part: what it shows, and the tests that do, or None for a measurement in this process.
PARTS: dict[str, tuple[str, list[str] | None]] = {
    "recovery": (
        "kills, freezes and exceptions in each phase, bit for bit",
        ["tests/survival/test_gpu.py", "-k", "replaced"],
    ),
    "scripts": ("scalers, autocast, fused optimizers", ["tests/survival/test_gpu.py", "-k", "people"]),
    "transfer": ("publishing and restoring between devices", ["tests/transfer/test_device.py"]),
    "copies": ("bandwidth between pinned, shared and device memory", None),
}


def main() -> int:
    """Run the parts asked for; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all; list: name them")
    asked = parser.parse_args().parts
    if asked == ["list"]:
        print("\n".join(f"{name}: {what}" for name, (what, _) in PARTS.items()))
        return 0
    if unknown := sorted(set(asked) - PARTS.keys()):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if accelerator().is_host:
        print("benchmarks.gpu: torch sees no device here; nothing was run")
        return 1
    failed = False
    for name in asked or PARTS:
        started = time.monotonic()
        tests = PARTS[name][1]
        outcome: dict[str, Any] = measure_copies() if tests is None else run_tests(tests)
        outcome |= {"seconds": round(time.monotonic() - started, 1), "date": datetime.date.today().isoformat()}
        failed |= not outcome.get("passed", True)
        write(name, outcome)
        print(f"{name}: {json.dumps(outcome)}", flush=True)
    return int(failed)


def run_tests(arguments: list[str]) -> dict[str, Any]:
    """Run tests marked gpu; return whether all passed, and pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *arguments]
    ended = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    lines = ended.stdout.strip().splitlines()
    return {"passed": ended.returncode == 0, "summary": lines[-1] if lines else ""}


def measure_copies(nbytes: int = 256 * MIB, rounds: int = 5) -> dict[str, Any]:
    """Return GiB/s, the best of some copies: between pinned or plain host memory and the device, and on the device."""
    kind = accelerator()
    device = kind.device_of_slot(0)
    own, other = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    pinned, plain = torch.zeros(nbytes, dtype=torch.uint8).pin_memory(), torch.zeros(nbytes, dtype=torch.uint8)
    pairs = {
        "pinned_to_device": (own, pinned),
        "device_to_pinned": (pinned, own),
        "plain_to_device": (own, plain),
        "device_to_device": (other, own),
    }
    found = {}
    for name, (target, source) in pairs.items():
        times = []
        for _ in range(rounds):
            kind.synchronize(device)
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            kind.synchronize(device)
            times.append(time.perf_counter() - started)
        found[f"{name}_gib_per_s"] = round(nbytes / min(times) / 2**30, 2)
    return found


def write(part: str, outcome: dict[str, Any]) -> None:
    """Put a part's outcome into the file, beside what other parts have left there."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found["machine"] = describe_machine()
    found.setdefault("parts", {})[part] = outcome
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
