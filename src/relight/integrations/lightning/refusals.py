"""Refusals: options and callbacks of a Lightning Trainer that relight could not repeat, named before the first step."""

from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch.optim.swa_utils import AveragedModel

from relight.errors import UsageError
from relight.integrations.lightning.state import is_lightnings, is_own
from relight.integrations.lightning.values import is_plain

_PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
_CALLBACKS = {
    BatchSizeFinder: "it trains before the training, with other batches: find the size in a run of its own",
    LearningRateFinder: "it trains before the training: find the rate in a run of its own",
    StochasticWeightAveraging: "it replaces the scheduler in the middle of training: use WeightAveraging",
}
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, defaultdict, np.ndarray, np.random.Generator, torch.Generator)


def refuse_unsupported(trainer: Any) -> None:
    """Raise UsageError for what cannot be made recoverable, before anything is trained."""
    reasons = {
        "reload_dataloaders_every_n_epochs makes other data in each process": trainer.reload_dataloaders_every_n_epochs,
        f"the precision plugin {type(trainer.precision_plugin).__qualname__} was not tried with it": (
            type(trainer.precision_plugin) not in _PRECISIONS
        ),
        "AsyncCheckpointIO writes after the step is over: leave it out": (
            isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO)
        ),
        "val_check_interval as a time gives each rank a moment of its own: give a number of batches": (
            getattr(trainer, "_val_check_time_interval", None) is not None
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            _refuse(reason)
    for callback in trainer.callbacks:
        _refuse_callback(callback)


def refuse_data(trainer: Any) -> None:
    """Raise UsageError for training data whose steps cannot be laid out beforehand, once the loop has it."""
    loop = trainer.fit_loop
    if isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
        _refuse("training_step(dataloader_iter) draws its batches by itself: take a batch instead")
    if loop.max_batches == float("inf"):
        _refuse(
            "the training data has no length (an IterableDataset): a replacement could not find its place in it. Use a "
            "dataset with __len__ and __getitem__, or limit_train_batches=NUMBER and data that begins anew each time"
        )
    if not trainer.optimizers:
        _refuse("configure_optimizers returned no optimizer, so there is nothing to train")


def _refuse_callback(callback: Any) -> None:
    name = type(callback).__qualname__
    for kind, reason in _CALLBACKS.items():
        if isinstance(callback, kind):
            _refuse(f"callback {name}: {reason}")
    if isinstance(callback, GradientAccumulationScheduler) and len(callback.scheduling) > 1:
        _refuse(f"callback {name}: steps of an epoch are laid out beforehand, with one accumulate_grad_batches")
    if not is_own(callback) or not is_lightnings(callback, "state_dict"):
        return
    for attribute, value in vars(callback).items():
        if isinstance(value, torch.nn.Module) and not isinstance(value, AveragedModel):
            _refuse(
                f"callback {name} holds a module ({attribute}): keep its weights in the LightningModule, or give the "
                "callback state_dict() and load_state_dict() that carry them"
            )
        if isinstance(value, _CONTAINERS) and not is_plain(value):
            _refuse(
                f"callback {name} holds a {type(value).__qualname__} ({attribute}) that relight cannot carry to a "
                "replacement: use lists and dicts of numbers and tensors, or give the callback state_dict() and "
                "load_state_dict()"
            )


def _refuse(reason: str) -> None:
    raise UsageError(f'strategy="relight": {reason}')
