"""The strategies for Lightning's `Trainer` and `Fabric`, and their environment of ranks."""

import os
import sys
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.optim import LBFGS

import relight
from relight.integrations.trainers.refused import lightning as refused
from relight.integrations.trainers.second import comes_again
from relight.script_files import adopt_caller

__all__ = ["FabricRelightStrategy", "RelightStrategy", "register"]

NAME = "relight"
VERSION = "2.6.6"  # of Lightning: the Trainer's loops are no public interface
_OTHERS = ("relight.integrations.transformers", "relight.integrations.accelerate")
_IS_WORKER = "RELIGHT_PRIVATE_DIR" in os.environ
_job: relight.Job | None = None


def _join() -> relight.Job:
    """Join the job, once in a process. Raises UsageError if something else has."""
    global _job  # noqa: PLW0603 - one job per process
    if _job is not None:
        return _job
    if lightning.__version__ != VERSION:
        found = f"it is written for lightning {VERSION}, and {lightning.__version__} is installed"
        raise refused.OTHER_VERSION.error(refused.BY, found)
    if others := [name for name in _OTHERS if name in sys.modules]:
        raise refused.TWO.error(refused.BY, f"two integrations in one process, this one and {others[0]}")
    if dist.is_initialized():
        raise refused.TWO.error(refused.BY, "torch.distributed is initialized already")
    _job = relight.init()
    return _job


class JobEnvironment(ClusterEnvironment):
    """The processes of the job, as Lightning asks about them."""

    def __init__(self, job: relight.Job) -> None:
        super().__init__()
        self._job = job

    creates_processes_externally = True
    main_address = ""  # the process group is there already
    main_port = 0

    @staticmethod
    def detect() -> bool:
        """Return False: it is not found by its variables."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._job.world_size

    def global_rank(self) -> int:
        """Return the rank of this process now."""
        return self._job.rank

    def local_rank(self) -> int:
        """Return the rank on its node."""
        return self._job.local_rank

    def node_rank(self) -> int:
        """Return the number of this node."""
        return int(os.environ.get("GROUP_RANK", "0"))

    def set_world_size(self, size: int) -> None:
        """Ignore what Lightning computes."""

    def set_global_rank(self, rank: int) -> None:
        """Ignore what Lightning computes."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise UsageError unless this is the number of ranks."""
        if num_devices * num_nodes != self._job.world_size:
            given = f"devices={num_devices} and num_nodes={num_nodes}, with {self._job.world_size} ranks in the job"
            raise refused.DEVICES.error(refused.BY, given)


class _InJob:
    """A strategy of processes that `relight run` starts. Without it, it is the strategy that follows in the classes."""

    job: relight.Job | None

    def __init__(self, **arguments: Any) -> None:
        self.job = _join() if _IS_WORKER else None
        if self.job is not None:
            for name in ("cluster_environment", "model_averaging_period"):
                if arguments.get(name) is not None:
                    raise refused.OF_DDP.error(refused.BY, name)
            if arguments.get("start_method", "popen") != "popen":
                raise refused.OF_DDP.error(refused.BY, "start_method")
            arguments["cluster_environment"] = JobEnvironment(self.job)
        super().__init__(**arguments)
        if self.job is not None:
            self.job.on_rank_change(self._take_rank)

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        inner: Any = super()
        device: torch.device = inner.root_device if self.job is None else self.job.device
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the samplers that Lightning makes."""
        inner: Any = super()
        if self.job is None:
            kwargs: dict[str, Any] = inner.distributed_sampler_kwargs
            return kwargs
        return {"num_replicas": self.job.world_size, "rank": self.job.rank}

    def _configure_launcher(self) -> None:
        strategy: Any = self
        if self.job is not None and strategy.num_nodes * strategy.num_processes == 1:
            # What devices="auto" means on a CPU.
            strategy.parallel_devices = strategy.parallel_devices * (self.job.world_size // strategy.num_nodes)
        inner: Any = super()
        inner._configure_launcher()
        if self.job is not None:
            strategy.cluster_environment.validate_settings(strategy.num_processes, strategy.num_nodes)

    def _take_rank(self, rank: int) -> None:
        rank_zero_only.rank = rank

    def _averages_by_sum(self, tensor: Any, reduce_op: Any) -> bool:
        """Return whether Lightning, with gloo, would sum and divide; it knows gloo by the name of the backend."""
        on_host = isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu"
        return self.job is not None and on_host and str(reduce_op).lower() in ("mean", "avg")


class RelightStrategy(_InJob, DDPStrategy):
    """`DDPStrategy` whose training survives failures. Takes the arguments of DDPStrategy that DDP has."""

    strategy_name = NAME
    run: Any = None  # the FitRun under way
    _has_fitted = False

    def set_world_ranks(self) -> None:
        """Tell Lightning's functions for rank 0 which rank this is."""
        if self.job is None:
            super().set_world_ranks()
        else:
            self._take_rank(self.job.rank)

    def setup_environment(self) -> None:
        """Keep a standby from a checkpoint: it gets all from other ranks, which began before there was a newer one."""
        super().setup_environment()
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is not None and self.job is not None and self.job.is_standby:
            trainer._checkpoint_connector.resume_start = _read_nothing

    def setup(self, trainer: Any) -> None:
        """Prepare model and optimizers as DDPStrategy does, and put steps of relight in place of the loop of epochs."""
        if self.job is not None and trainer.state.fn == TrainerFn.FITTING:
            adopt_caller(sys._getframe(1))
            where = "it has trained before" if self._has_fitted else comes_again("fit", Trainer)
            if where is not None:
                raise refused.SECOND.error(refused.BY, f"{refused.SECOND.setting} ({where})")
            from relight.integrations.lightning.refusals import refuse_unsupported
            from relight.integrations.lightning.run import fit

            refuse_unsupported(trainer)
            RelightStrategy._has_fitted = True
            trainer.fit_loop.run = lambda: fit(self, trainer)
        super().setup(trainer)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run the closure (forward and backward) before the optimizer begins, if it evaluates once."""
        run = self.run
        if run is None or isinstance(optimizer, LBFGS):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def computed() -> Any:
            result = closure()
            run.keep_outputs()
            return result

        if getattr(self.precision_plugin, "scaler", None) is not None:  # it calls the closure first by itself
            return super().optimizer_step(optimizer, computed, model, **kwargs)
        result = self.precision_plugin._wrap_closure(model or self.lightning_module, optimizer, computed)
        optimizer.step(**kwargs)
        return result

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks, in place."""
        if not self._averages_by_sum(tensor, reduce_op):
            return super().reduce(tensor, group, reduce_op)
        return divide(super().reduce(tensor, group, "sum"), dist.get_world_size(group))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint; one of a step that is undone is removed again."""
        if self.run is not None and self.is_global_zero:
            self.run.effects.note_file(str(filepath))
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint once the step under way is committed."""
        if self.run is not None:
            self.run.effects.remove_later(str(filepath))
        else:
            super().remove_checkpoint(filepath)

    def _take_rank(self, rank: int) -> None:
        super()._take_rank(rank)
        module = self.lightning_module
        if module is not None and module._trainer is not None:
            follow_rank_in_data(module._trainer, rank)


class FabricRelightStrategy(_InJob, FabricDDPStrategy):
    """Fabric's `DDPStrategy` in a job of relight. The loop is the script's own, with `relight.Training`."""

    strategy_name = NAME

    def _set_world_ranks(self) -> None:
        if self.job is None:
            super()._set_world_ranks()
        else:
            self._take_rank(self.job.rank)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks, in place."""
        if not self._averages_by_sum(tensor, reduce_op):
            return super().all_reduce(tensor, group, reduce_op)
        return divide(super().all_reduce(tensor, group, "sum"), dist.get_world_size(group))


def divide(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Divide in place; integers are divided and cut off."""
    return tensor.div_(count) if torch.is_floating_point(tensor) else tensor.copy_(tensor / count)


def follow_rank_in_data(trainer: Any, rank: int) -> None:
    """Have the samplers that Lightning has made serve the rank that this process has taken."""
    fit_loop = trainer.fit_loop
    for loop in (fit_loop, fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        for loader in getattr(loop._combined_loader, "flattened", ()):
            batches = getattr(loader, "batch_sampler", None)
            samplers: list[Any] = [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]
            for sampler in samplers:
                if hasattr(sampler, "rank") and hasattr(sampler, "num_replicas"):
                    sampler.rank = rank


def _read_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for the reading of a checkpoint."""


def register() -> None:
    """Make the strategy known to Trainer and Fabric by its name."""
    for registry, strategy in ((StrategyRegistry, RelightStrategy), (STRATEGY_REGISTRY, FabricRelightStrategy)):
        if NAME not in registry:
            registry.register(NAME, strategy, description="DDP that survives failures (relight)")
            registry.register(
                f"{NAME}_find_unused_parameters_true",
                strategy,
                description="The same with `find_unused_parameters`",
                find_unused_parameters=True,
            )


register()
