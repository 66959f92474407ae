"""Trainers of TRL that survive failures: import them from here, and start the script with `relight run`.

    from relight.integrations.trl import SFTTrainer  # instead of `from trl import SFTTrainer`

Import this module before you make the arguments (`SFTConfig`), as it joins the job. Other trainers of TRL
are refused before the first step.
"""

import functools
from typing import Any

import trl
from transformers import PreTrainedModel

from relight.integrations.trainers.refused import trl as refused
from relight.integrations.transformers.trainer import IS_WORKER, RelightMixin

_enable = PreTrainedModel.enable_input_require_grads


@functools.wraps(_enable)
def _enable_once(model: Any) -> None:
    """Enable it, with one hook: trainers do so in every step, and a replacement would have fewer hooks than others."""
    if getattr(model, "_require_grads_hooks", None):
        model.disable_input_require_grads()
    _enable(model)


PreTrainedModel.enable_input_require_grads = _enable_once

__all__ = ["DPOTrainer", "KTOTrainer", "RewardTrainer", "SFTTrainer"]


class SFTTrainer(RelightMixin, trl.SFTTrainer):  # type: ignore[misc]
    """`trl.SFTTrainer` that survives failures."""


class _WithReference(RelightMixin):
    """A trainer that asks a reference model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raise UsageError for what the trainer would do on all ranks together while it is made."""
        given = (*args, *kwargs.values())
        if IS_WORKER and any(getattr(one, "precompute_ref_log_probs", False) for one in given):
            raise refused.PRECOMPUTED.error("relight.integrations.trl")
        super().__init__(*args, **kwargs)


class DPOTrainer(_WithReference, trl.DPOTrainer):  # type: ignore[misc]
    """`trl.DPOTrainer` that survives failures."""


class KTOTrainer(_WithReference, trl.KTOTrainer):  # type: ignore[misc]
    """`trl.KTOTrainer` that survives failures."""


class RewardTrainer(RelightMixin, trl.RewardTrainer):  # type: ignore[misc]
    """`trl.RewardTrainer` that survives failures."""
