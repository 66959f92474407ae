"""Plain DDP without any fault tolerance: the step time that the other systems start from.

Run by ``torchrun --standalone --nproc-per-node 4 -m benchmarks.recovery.plain_ddp --log-dir DIR``.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.recovery.workload import (
    EventLog,
    arguments,
    build_model,
    build_optimizer,
    state_digest,
    train_step,
    use_one_thread,
)


def main() -> None:
    options = arguments("Plain DDP, for torchrun").parse_args()
    use_one_thread()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = EventLog(options.log_dir, rank)
    model = DistributedDataParallel(build_model(options.seed))
    optimizer = build_optimizer(model)
    for step in range(options.steps):
        train_step(model, optimizer, log, options.seed, step, rank)
    log.emit("finished", options.steps, digest=state_digest(model.module, optimizer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
