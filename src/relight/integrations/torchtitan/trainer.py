"""The subclass of torchtitan's trainer, and its command."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchtitan import train as torchtitan_command
from torchtitan.distributed import ParallelDims
from torchtitan.tools.utils import device_module
from torchtitan.trainer import Trainer as OwnTrainer

import relight
from relight.errors import UsageError
from relight.integrations.torchtitan.refusals import refuse_unsupported
from relight.integrations.torchtitan.run import TitanRun

__all__ = ["Trainer", "main"]

_IS_WORKER = "RELIGHT_PRIVATE_DIR" in os.environ


class Trainer(OwnTrainer):  # type: ignore[misc]
    """`torchtitan.trainer.Trainer` whose training survives failures."""

    @dataclass(kw_only=True, slots=True)
    class Config(OwnTrainer.Config):  # type: ignore[misc]
        """The configuration of torchtitan's trainer."""

    job: relight.Job | None = None  # None: without `relight run`
    _run: TitanRun | None = None

    def __init__(self, config: Any) -> None:
        if _IS_WORKER:
            refuse_unsupported(config)
        super().__init__(config)

    def init_distributed(self) -> ParallelDims:
        """Join the job, in place of making process groups."""
        if not _IS_WORKER:
            return super().init_distributed()
        if dist.is_initialized():
            raise UsageError("relight.integrations.torchtitan joins the job by itself: leave out relight.init()")
        self.job = relight.init(late_standby=False)  # no stages: torchtitan imports pipelining all the same
        self.device = self.job.device
        device_module.set_device(self.device)
        torch.autograd.set_multithreading_enabled(False)  # as torchtitan does, for its meshes
        return ParallelDims.from_config(self.config.parallelism, self.job.world_size)

    def train(self) -> None:
        """Train in steps that are committed, or undone and computed again, as a whole."""
        if self.job is None:
            super().train()
            return
        if not self.job.is_standby:  # which gets all of it from other ranks
            self.checkpointer.load(step=self.config.checkpoint.load_step)
        profiler = self.config.profiler.build(global_step=self.step, base_folder=self.config.dump_folder)
        self._run = run = TitanRun(self, self.job)
        with profiler, run.logs():
            for step in run.training.steps(until=run.steps):
                with step as batches:
                    run.take(step, batches)
                if step.committed:
                    profiler.step()
        self._run = None

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Do all that needs other ranks before the first write."""
        if self._run is None:
            super().train_step(data_iterator)
            return
        with self._run.writes_are_put_off():
            super().train_step(data_iterator)
        self.optimizers.step()
        self.lr_schedulers.step()


def main() -> None:
    """Do what `python -m torchtitan.train` does, with this trainer in place of torchtitan's own."""
    OwnTrainer.Config._owner = Trainer
    torchtitan_command.main()
