"""The cost of relight in a step on a device, by the device's own clock: steps with relight and plain ones in turns.

`measure` runs this file under `relight run`: one rank with the device's collectives. In the same process, for the
same model, plain steps of a DDP of its own take turns with relight's, block by block (A B B A).
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import relight
from benchmarks.gated_ddp import PLAIN, RUN, Hooks
from benchmarks.gpu.model import Transformer, loss_of
from relight.training.torch_private.distributed.groups import make_generation_group

ROOT = Path(__file__).parents[2]
NOMINAL_MS = (20, 50, 100, 200)
BLOCK_S = 0.6
PAIRS = 5
DEADLINE_S = 150.0


def measure() -> dict[str, Any]:
    """Return, for each length of step, the milliseconds of plain steps and of relight's, and the difference."""
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as place:
        found = Path(place, "found.json")
        command = [
            *(sys.executable, "-P", "-m", "relight.cli", "run", "--nproc-per-node", "1", "--standby", "0"),
            *("--run-dir", f"{place}/run", str(Path(__file__)), "--found", str(found), "--meeting", f"{place}/meeting"),
        ]
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        ended = subprocess.run(
            command,
            cwd=place,
            env={**os.environ, "PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        if not found.exists():
            return {"passed": False, "error": ended.stderr[-2000:]}
        return {"passed": True, "steps": json.loads(found.read_text())}


class Measured:
    """Blocks of steps, timed by events of the device and by the host's clock."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def order(self, samples: int, step_s: float) -> list[tuple[str, int, int]]:
        """Kind, samples and steps of each block of one size."""
        steps = max(3, round(BLOCK_S / step_s))
        return [(kind, samples, steps) for pair in range(PAIRS) for kind in ((RUN, PLAIN), (PLAIN, RUN))[pair % 2]]

    def begin(self, kind: str) -> None:
        self._hooks.needed_by(kind)
        torch.cuda.synchronize()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._events[0].record()
        self._began = time.perf_counter()

    def end(self, steps: int) -> tuple[float, float]:
        """Return the milliseconds of a step: by the device's clock, and by the host's."""
        self._events[1].record()
        torch.cuda.synchronize()
        host = (time.perf_counter() - self._began) * 1e3
        return self._events[0].elapsed_time(self._events[1]) / steps, host / steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--found", type=Path, required=True)
    parser.add_argument("--meeting", required=True)
    options = parser.parse_args()
    job = relight.init()
    torch.use_deterministic_algorithms(True)  # of attention and embeddings: else no step can be repeated
    # Deterministic algorithms also fill each new tensor, with a kernel of its own; no step here reads such memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(0)
    net = Transformer(4, 2048).to(job.device)  # few and large kernels: else a step is as long as their launches
    model = DistributedDataParallel(net)
    store = dist.FileStore(options.meeting, job.world_size)  # type: ignore[attr-defined]
    group = make_generation_group(store, job.rank, job.world_size, PLAIN, job.device)
    plain = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    training = relight.Training(model=model, optimizer=optimizer)
    training.carry(ignore=("measured._events", "measured._began", "times", "blocks", "left"))  # of the measurement
    measured = Measured(Hooks(training))

    def take(kind: str, samples: int, number: int, protection: Any) -> None:
        with protection:
            loss_of(plain if kind == PLAIN else model, samples, number, job.device).backward()
            optimizer.step()
            optimizer.zero_grad()

    found: dict[str, Any] = {}
    blocks: list[tuple[int, str, int, int]] = []
    left = 0
    times: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for step in training.steps(until=10**9):
        if step.number < 3:
            take(RUN, 8, step.number, step)
            continue
        if not blocks:
            rate = calibrate(measured, take)
            blocks = [
                (nominal, *block)
                for nominal in NOMINAL_MS
                for block in measured.order(max(1, round(nominal / rate)), nominal / 1e3)
            ]
        while blocks and not left and blocks[0][1] == PLAIN:
            nominal, kind, samples, steps = blocks.pop(0)
            measured.begin(kind)
            for number in range(steps):
                take(kind, samples, number, contextlib.nullcontext())
            times.setdefault((nominal, kind), []).append(measured.end(steps))
        if not blocks:
            break
        nominal, kind, samples, steps = blocks[0]
        if not left:
            measured.begin(kind)
            left = steps
        take(kind, samples, step.number, step)
        left -= 1
        if not left:
            times.setdefault((nominal, kind), []).append(measured.end(steps))
            blocks.pop(0)
            if not blocks:
                break
    for nominal in NOMINAL_MS:
        ours, others = times[nominal, RUN], times[nominal, PLAIN]
        device, host = (
            (statistics.median(each[clock] for each in ours), statistics.median(each[clock] for each in others))
            for clock in (0, 1)
        )
        found[str(nominal)] = {
            "relight_ms": round(device[0], 3),
            "plain_ms": round(device[1], 3),
            "overhead_percent": round((device[0] / device[1] - 1) * 100, 2),
            "overhead_percent_by_the_hosts_clock": round((host[0] / host[1] - 1) * 100, 2),
            "plain_spread_ms": [round(min(each[0] for each in others), 3), round(max(each[0] for each in others), 3)],
        }
    found["parameters"] = sum(parameter.numel() for parameter in net.parameters())
    options.found.write_text(json.dumps(found))


def calibrate(measured: Measured, take: Any) -> float:
    """Return the milliseconds that one sample takes."""
    each = 0.0
    for _ in range(2):
        measured.begin(PLAIN)
        for number in range(4):
            take(PLAIN, 16, number, contextlib.nullcontext())
        each = measured.end(4)[0] / 16
    return each


if __name__ == "__main__":
    main()
