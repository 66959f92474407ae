"""Keeps synchronous data-parallel PyTorch training alive through failures, bit-identically.

Every process imports this file, so it loads nothing that needs torch: what scripts use is imported at first use.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "init": "relight.training.job",
    "Job": "relight.training.job",
    "Training": "relight.training.training",
    "Step": "relight.training.step",
    "Publisher": "relight.transfer.publish.publisher",
    "Receiver": "relight.transfer.engine.receiver",
    "LentWeights": "relight.transfer.tensors.lent_weights",
    "TensorSource": "relight.transfer.tensors.weights",
    "digest_weights": "relight.transfer.tensors.weights",
    "weights_of": "relight.transfer.tensors.weights",
}
__all__ = [
    "Job",
    "LentWeights",
    "Publisher",
    "Receiver",
    "Step",
    "TensorSource",
    "Training",
    "__version__",
    "digest_weights",
    "init",
    "weights_of",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'relight' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
