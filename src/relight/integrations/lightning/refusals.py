"""Refusals: options and callbacks of a Lightning Trainer that relight could not repeat, named before the first step."""

from typing import Any

from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher

from relight.integrations.trainers.refused import lightning as refused
from relight.integrations.trainers.refused.table import refuse


def refuse_unsupported(trainer: Any) -> None:
    """Raise UsageError for what cannot be made recoverable, before anything is trained."""
    refuse(refused.TRAINER, refused.BY, trainer)
    for callback in trainer.callbacks:
        refuse(refused.CALLBACK, refused.BY, callback)


def refuse_data(trainer: Any) -> None:
    """Raise UsageError for training data whose steps cannot be laid out beforehand, once the loop has it."""
    loop = trainer.fit_loop
    if isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
        raise refused.OWN_FETCHING.error(refused.BY)
    if loop.max_batches == float("inf"):
        raise refused.NO_LENGTH.error(refused.BY)
    if not trainer.optimizers:
        raise refused.NO_OPTIMIZER.error(refused.BY)
