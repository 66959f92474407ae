"""The job with torchft 0.2.0: one process is one replica group; a lighthouse forms the quorum.

One process per replica group, started (and, when it dies, started again) by the benchmark::

    torchft_lighthouse --min_replicas 1 ...
    python -m benchmarks.recovery.torchft_ddp --group 0 --groups 4 --lighthouse http://... --log-dir DIR

Two modes. ``default`` is torchft's own DDP example: groups that are left train on without the failed one,
whose samples are skipped meanwhile. ``strict`` asks for what this project promises as far as torchft can give
it: all groups are required, so no sample is skipped and the failed step is done again. There the quorum is
taken before the forward pass, because a group that heals *during* its forward contributes zeros.

One thing differs from an unmodified torchft: see `wrap`.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchft import Manager, ProcessGroupGloo
from torchft.process_group import ProcessGroupDummy

from benchmarks.recovery.workload import (
    EventLog,
    arguments,
    build_model,
    build_optimizer,
    compute_gradients,
    state_digest,
    use_one_thread,
)

# Of torchft's own example for DDP; the library's default of 60 s each only makes it slower.
PROCESS_GROUP_TIMEOUT = timedelta(seconds=5)
MANAGER_TIMEOUT = timedelta(seconds=30)


def reduce_bucket(
    manager: Manager,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Average one bucket of gradients, or leave it as it is once the manager knows of an error: it discards
    the step anyway."""
    work = manager.allreduce(bucket.buffer())
    work.wait()
    if manager.errored() is None:
        reduced: torch.futures.Future[Tensor] = work.get_future()._fut
        return reduced
    unreduced: torch.futures.Future[Tensor] = torch.futures.Future()
    unreduced.set_result(bucket.buffer())
    return unreduced


def wrap(manager: Manager, module: nn.Module) -> DistributedDataParallel:
    """torchft's own wrapper for DDP, line by line but for its communication hook.

    In 0.2.0 that hook asserts that the all-reduce succeeded. With gloo, where waiting for an all-reduce is
    where its failure shows, every survivor of a fault in mid-reduction ends with an AssertionError: all
    groups are then started anew, from nothing. `reduce_bucket` lets them go on, as they were meant to.
    """
    alone = ProcessGroupDummy(0, 1)
    model = DistributedDataParallel(module, process_group=alone, find_unused_parameters=True)
    model.register_comm_hook(manager, reduce_bucket)
    return model


class Job:
    """The state of one replica group."""

    def __init__(
        self,
        group: int,
        groups: int,
        seed: int,
        strict: bool,
        lighthouse: str,
        log: EventLog,
    ) -> None:
        self.group = group
        self.seed = seed
        self.log = log
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self.module = build_model(seed)
        self.optimizer = build_optimizer(self.module)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=PROCESS_GROUP_TIMEOUT),
            min_replica_size=groups if strict else 1,
            load_state_dict=self._load_state,
            state_dict=self._state,
            use_async_quorum=not strict,
            timeout=MANAGER_TIMEOUT,
            replica_id=f"group_{group}",
            store_addr="127.0.0.1",
            store_port=self._store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=lighthouse,
            hostname="127.0.0.1",
        )
        self.model = wrap(self.manager, self.module)

    def _state(self) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _load_state(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.log.emit("restored", self.manager.current_step())

    def attempt(self) -> None:
        """One attempt at the manager's current step: what torchft's optimizer wrapper does, spelled out to
        log how it ended."""
        self.log.emit("step_start", self.manager.current_step())
        self.manager.start_quorum()
        self.optimizer.zero_grad()
        step = self.manager.current_step()  # a synchronous quorum may have healed, and so moved it
        compute_gradients(self.model, self.log, self.seed, step, self.group)
        self.log.emit("optimizer", step)
        if not self.manager.should_commit():
            self.log.emit("step_discarded", step)
            return
        self.optimizer.step()
        contributed = self.manager.is_participating()
        self.log.emit("step_end" if contributed else "step_passive", self.manager.current_step() - 1)


def main() -> None:
    parser = arguments("DDP with torchft, one replica group")
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--mode", choices=("default", "strict"), default="default")
    parser.add_argument("--lighthouse", required=True, help="address, such as http://127.0.0.1:29510")
    options = parser.parse_args()
    use_one_thread()
    log = EventLog(options.log_dir, options.group)
    job = Job(options.group, options.groups, options.seed, options.mode == "strict", options.lighthouse, log)
    while job.manager.current_step() < options.steps:
        job.attempt()
    log.emit("finished", options.steps, digest=state_digest(job.module, job.optimizer))
    job.manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
