"""DDP that torchrun restarts from a checkpoint: what most jobs do today.

Run by ``torchrun --standalone --nproc-per-node 4 --max-restarts 3 -m benchmarks.recovery.torchrun_checkpoint
--log-dir DIR --checkpoint-dir DIR``. The checkpoint lies on a local disk and, right after it was written,
in the page cache: no real job loads its checkpoint faster.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.recovery.workload import (
    EventLog,
    arguments,
    build_model,
    build_optimizer,
    state_digest,
    train_step,
    use_one_thread,
)

CHECKPOINT_EVERY_STEPS = 20


def save(path: Path, model: nn.Module, optimizer: Optimizer, steps_done: int) -> None:
    """Write beside, then rename: a process killed while it saves leaves the checkpoint before it intact."""
    unfinished = path.with_suffix(".unfinished")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": steps_done}
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def load(path: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Load the checkpoint if there is one; returns the number of the first step to do."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def main() -> None:
    parser = arguments("DDP with checkpoints, for torchrun")
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    options = parser.parse_args()
    use_one_thread()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = EventLog(options.log_dir, rank)
    module = build_model(options.seed)
    optimizer = build_optimizer(module)
    checkpoint = options.checkpoint_dir / "last.pt"
    first = load(checkpoint, module, optimizer)
    if first > 0:
        log.emit("restored", first)
    model = DistributedDataParallel(module)
    for step in range(first, options.steps):
        train_step(model, optimizer, log, options.seed, step, rank)
        if rank == 0 and (step + 1) % CHECKPOINT_EVERY_STEPS == 0:
            save(checkpoint, module, optimizer, step + 1)
    log.emit("finished", options.steps, digest=state_digest(module, optimizer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
