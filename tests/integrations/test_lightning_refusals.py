"""Options and callbacks of a Lightning Trainer that are refused by name, without a job."""

import sys
from collections import deque
from datetime import timedelta
from typing import Any

import pytest
import torch

from relight.errors import UsageError

pytest.importorskip("lightning", exc_type=ImportError)

import lightning as L
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import AsyncCheckpointIO

from relight.integrations.lightning import FabricRelightStrategy, RelightStrategy
from relight.integrations.lightning import strategy as integration
from relight.integrations.lightning.refusals import refuse_unsupported


class Holds(Callback):
    """A callback with an attribute."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing


class Bare(Callback):
    """A callback without a constructor."""


class Says(Holds):
    """One that says what its state is."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        return {"thing": list(self.thing)}


def trainer(**options: Any) -> Any:
    """Make a Trainer outside of a job, where the strategy is Lightning's own."""
    return L.Trainer(strategy="relight", accelerator="cpu", devices=1, logger=False, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        ({"val_check_interval": timedelta(minutes=1)}, "`val_check_interval` as a time"),
        ({"plugins": [AsyncCheckpointIO()]}, "AsyncCheckpointIO"),
        ({"callbacks": [BatchSizeFinder()]}, "BatchSizeFinder"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "use WeightAveraging"),
        ({"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]}, "ModelPruning"),
        ({"callbacks": [GradientAccumulationScheduler({0: 1, 4: 2})]}, "GradientAccumulationScheduler"),
    ],
)
def test_refuses_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        refuse_unsupported(trainer(**options))


def test_refuses_layers_that_a_callback_has_frozen_before_the_model_is_wrapped() -> None:
    made, module = trainer(callbacks=[BackboneFinetuning()]), L.LightningModule()
    module.backbone = torch.nn.Linear(1, 1)
    made.strategy.connect(module)
    refuse_unsupported(made)
    made.callbacks[0].freeze_before_training(module)
    with pytest.raises(UsageError, match="freeze in on_train_start"):
        refuse_unsupported(made)


@pytest.mark.parametrize(
    ("where", "name", "value", "words"),
    [
        (L, "__version__", "2.5.0", "written for lightning 2.6.6, and 2.5.0 is installed"),
        (integration, "_OTHERS", ("tests",), "two integrations in one process"),
    ],
)
def test_joins_no_job_it_is_not_made_for(
    where: Any, name: str, value: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, value)
    monkeypatch.setattr(integration, "_IS_WORKER", True)
    monkeypatch.setitem(sys.modules, "tests", sys)
    with pytest.raises(UsageError, match=words):
        trainer()


def test_takes_callbacks_with_any_attributes_and_such_that_say_what_their_state_is() -> None:
    refuse_unsupported(
        trainer(callbacks=[*map(Holds, ({"a": [1.0]}, torch.nn.Linear(2, 2), deque())), Says(deque()), Bare()])
    )


def test_is_lightnings_own_strategy_outside_of_a_job() -> None:
    made = trainer()
    assert isinstance(made.strategy, RelightStrategy)
    assert made.strategy.job is None
    assert isinstance(L.Fabric(strategy="relight", accelerator="cpu", devices=1)._strategy, FabricRelightStrategy)
