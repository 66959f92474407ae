"""The loader for SGLang, called as SGLang's `WeightUpdater.update_weights_from_tensor` calls a custom loader."""

import importlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relight
from relight.errors import UsageError
from relight.integrations import sglang

SECONDS = 30.0


class FusedModel(nn.Module):
    """Like the models of inference engines, it keeps what the checkpoint has apart in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.gate_up = nn.Linear(8, 32, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            if name == "embed.weight":
                self.embed.weight.data.copy_(tensor)
            else:
                half = {"gate.weight": slice(0, 16), "up.weight": slice(16, 32)}[name]
                self.gate_up.weight.data[half].copy_(tensor)
            loaded.add(name)
        return loaded


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (32, 8), "gate.weight": (16, 8), "up.weight": (16, 8)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def loader() -> Iterator[Callable[[Any, Any], None]]:
    """Found as SGLang's `dynamic_import` finds it."""
    module, _, function = sglang.LOADER.rpartition(".")
    yield getattr(importlib.import_module(module), function)
    sglang.close()


def test_each_request_loads_the_version_that_it_names(tmp_path: Path, loader: Callable[[Any, Any], None]) -> None:
    model = FusedModel()
    with relight.Publisher(tmp_path) as publisher:
        publisher.begin(relight.TensorSource(checkpoint(1)), version=1, hold=True)
        loader(model, sglang.request(tmp_path, version=1))  # begins to collect: a late engine
        assert torch.equal(model.gate_up.weight, torch.cat([checkpoint(1)["gate.weight"], checkpoint(1)["up.weight"]]))
        publisher.publish(relight.TensorSource(checkpoint(2)), version=2)
        assert torch.equal(model.embed.weight, checkpoint(1)["embed.weight"])
        loader(model, sglang.request(tmp_path, version=2))
    assert torch.equal(model.embed.weight, checkpoint(2)["embed.weight"])
    assert torch.equal(model.gate_up.weight, torch.cat([checkpoint(2)["gate.weight"], checkpoint(2)["up.weight"]]))


def test_weights_in_the_request_are_refused(loader: Callable[[Any, Any], None]) -> None:
    with pytest.raises(UsageError, match=r"sglang\.request"):
        loader(FusedModel(), list(checkpoint(1).items()))
