"""Configurations of torchtitan that cannot be made recoverable, named before anything is built."""

import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from torchtitan.components.checkpointer import CheckpointManager

from relight.errors import UsageError

VERSION = "0.3.0"  # of torchtitan: the trainer's methods are no public interface
_OTHERS = ("relight.integrations.transformers", "relight.integrations.lightning", "relight.integrations.accelerate")


def refuse_unsupported(config: Any) -> None:
    """Raise UsageError for a configuration that cannot be made recoverable."""
    for reason in _reasons(config):
        raise UsageError(f"relight.integrations.torchtitan: {reason}")


def _reasons(config: Any) -> Iterator[str]:
    installed = version("torchtitan")
    if installed != VERSION:
        yield f"it is written for torchtitan {VERSION}, and {installed} is installed"
    for other in _OTHERS:
        if other in sys.modules:
            yield f"two integrations in one process: {other} was imported too. Use one of them"
    parallelism, training, checkpoint = config.parallelism, config.training, config.checkpoint
    if parallelism.pipeline_parallel_degree > 1:
        yield (
            "parallelism.pipeline_parallel_degree: a standby would have to build a stage before it knows which. Write "
            "the loop as examples/pipeline/train.py does"
        )
    if parallelism.context_parallel_degree > 1:
        yield (
            "parallelism.context_parallel_degree: ranks of one context group get one batch and compute on parts of "
            "it, which relight does not know. Use data and tensor parallelism"
        )
    if parallelism.expert_parallel_degree > 1:
        yield "parallelism.expert_parallel_degree: not supported. See examples/moe/train.py for a loop of your own"
    if parallelism.enable_fsdp_symm_mem:
        yield "parallelism.enable_fsdp_symm_mem: symmetric memory bypasses the process groups that relight replaces"
    if not training.disable_cuda_graphs:
        yield (
            "CUDA graphs replay collectives of process groups that a recovery replaces: set "
            "training.disable_cuda_graphs (--training.disable_cuda_graphs)"
        )
    if config.comm.mode != "default":
        yield f'comm.mode="{config.comm.mode}": relight makes the process groups, so only "default" works'
    if type(checkpoint) is not CheckpointManager.Config:
        yield f"checkpoint: {type(checkpoint).__qualname__} is not known here. Use CheckpointManager"
    elif checkpoint.enable and checkpoint.async_mode != "disabled":
        yield (
            f'checkpoint.async_mode="{checkpoint.async_mode}": its collectives run in a thread, beside the steps that '
            'a recovery repeats. Set "disabled"'
        )
    if checkpoint.create_seed_checkpoint:
        yield "checkpoint.create_seed_checkpoint trains nothing: do that with torchrun"
    metrics = config.metrics
    if metrics.save_for_all_ranks and (metrics.enable_tensorboard or metrics.enable_wandb):
        yield "metrics.save_for_all_ranks: rank 0 logs, each committed step once. Leave it out"
