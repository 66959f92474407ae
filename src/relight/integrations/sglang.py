"""relight as a custom weight loader of SGLang.

Written against SGLang 0.5.23: `WeightUpdater.update_weights_from_tensor` in
sglang/srt/model_executor/model_runner_components/weight_updater.py calls the custom loader that `load_format` names
with its model and the named tensors of the request; `Engine` in sglang/srt/entrypoints/engine.py sends the request.

    engine = sglang.Engine(model_path=MODEL, custom_weight_loader=[LOADER])
    ...
    engine.begin_weight_update(selector="target")
    engine.update_weights_from_tensor(request("runs/mine", version=1200), load_format=LOADER)
    engine.end_weight_update()

The request carries no weights, only which version of which place to load. With the first one, every worker begins to
collect what is published in host memory, while SGLang generates; each request loads exactly the named version, or
fails in those workers that do not hold it before it has touched their weights. After a failure let nothing be
generated until another request has gone through, with the version that the message names. Workers and publisher must
be on one machine. Names must be those of the model's checkpoint, as they are if the trained model is Hugging Face's.

Not run here: SGLang itself, which needs a GPU. Tested: this loader, called as SGLang calls it, on a small model on
the CPU.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from relight.errors import UsageError
from relight.integrations.engines.weight_cache import WeightCache

LOADER = "relight.integrations.sglang.load_weights"
TIMEOUT_SECONDS = 60.0
_PREFIX = "relight:"

_held: dict[str, WeightCache] = {}  # by place, for the life of the worker process


class Model(Protocol):
    """The argument that SGLang passes."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], /) -> object: ...

    def parameters(self) -> Iterable[torch.nn.Parameter]: ...


def request(place: str | Path, *, version: int) -> list[tuple[str, torch.Tensor]]:
    """Return the named tensors to send: `place` is the run directory of the training job."""
    return [(f"{_PREFIX}{Path(place).resolve()}", torch.tensor(version, device="cpu"))]


def load_weights(model: Model, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load the version that `request` named. Raises TransferError, and no weight is changed, if it is not held."""
    if len(named_tensors) != 1 or not named_tensors[0][0].startswith(_PREFIX):
        raise UsageError(f"{LOADER} takes what relight.integrations.sglang.request makes, not weights")
    name, version = named_tensors[0]
    place = name.removeprefix(_PREFIX)
    held = _held.get(place)
    if held is None:
        held = _held[place] = WeightCache(place, name=f"sglang-{os.getpid()}")
    device = next(iter(model.parameters())).device
    held.load_into(model.load_weights, version=int(version), device=device, timeout_seconds=TIMEOUT_SECONDS)


def close() -> None:
    """Stop collecting, in this process."""
    while _held:
        _held.popitem()[1].close()
