"""The job under relight: the loop of `plain_ddp` with relight's lines in it.

Run by ``relight run --nproc-per-node 4 --standby 1 -m benchmarks.recovery.relight_ddp --log-dir DIR``.
"""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

import relight
from benchmarks.recovery.workload import (
    EventLog,
    arguments,
    build_model,
    build_optimizer,
    state_digest,
    train_step,
    use_one_thread,
)


class NoLog(EventLog):
    """For a standby's rehearsal: it has no rank yet, and computes nothing that counts."""

    def __init__(self) -> None:
        pass

    def emit(self, event: str, step: int, **details: str | int | float | bool) -> None:
        pass


def main() -> None:
    options = arguments("DDP, for relight").parse_args()
    use_one_thread()
    job = relight.init()
    model = DistributedDataParallel(build_model(options.seed))
    optimizer = build_optimizer(model)
    training = relight.Training(model=model, optimizer=optimizer)
    log: EventLog = NoLog()
    for step in training.steps(until=options.steps):
        with step:
            if isinstance(log, NoLog) and not step.warmup:  # the rank is known for good from here on
                log = EventLog(options.log_dir, job.rank)
            train_step(model, optimizer, log, options.seed, step.number, job.rank)
    log.emit("finished", options.steps, digest=state_digest(model.module, optimizer))


if __name__ == "__main__":
    main()
