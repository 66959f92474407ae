"""Configurations of torchtitan that cannot be made recoverable, named before anything is built."""

import sys
from importlib.metadata import version
from typing import Any

from torchtitan.components.checkpointer import CheckpointManager

from relight.errors import UsageError
from relight.integrations.trainers.refused import torchtitan as refused
from relight.integrations.trainers.refused.table import refuse

VERSION = "0.3.0"  # of torchtitan: the trainer's methods are no public interface
_OTHERS = ("relight.integrations.transformers", "relight.integrations.lightning", "relight.integrations.accelerate")


def refuse_unsupported(config: Any) -> None:
    """Raise UsageError for a configuration that cannot be made recoverable."""
    installed = version("torchtitan")
    if installed != VERSION:
        raise UsageError(f"{refused.BY}: it is written for torchtitan {VERSION}, and {installed} is installed")
    if others := [name for name in _OTHERS if name in sys.modules]:
        raise UsageError(f"{refused.BY}: two integrations in one process: {others[0]} was imported too")
    if type(config.checkpoint) is not CheckpointManager.Config:
        raise refused.CHECKPOINTS.error(refused.BY, f"checkpoint: {type(config.checkpoint).__qualname__}")
    refuse(refused.CONFIG, refused.BY, config)
