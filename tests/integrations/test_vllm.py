"""The backend for vLLM, made by vLLM's own factory, with vLLM's layerwise reloading. Runs where vLLM is installed."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import relight
from relight.errors import TransferError

factory = pytest.importorskip("vllm.distributed.weight_transfer.factory", exc_type=ImportError)
reload = pytest.importorskip("vllm.model_executor.model_loader.reload", exc_type=ImportError)
weight_utils = pytest.importorskip("vllm.model_executor.model_loader.weight_utils", exc_type=ImportError)

SECONDS = 30.0


class Model(nn.Module):
    """With the two things that vLLM's reloading needs of a model: `load_weights`, and loaders at its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.output = nn.Linear(8, 32)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameter = parameters[name]
            load: Callable[[Any, Any], None] = getattr(parameter, "weight_loader", weight_utils.default_weight_loader)
            load(parameter, tensor)


@pytest.fixture
def model() -> Model:
    model = Model()
    reload.record_metadata_for_reloading(model)
    return model


@pytest.fixture
def engine(model: Model) -> Iterator[Any]:
    from relight.integrations import vllm

    vllm.register()
    vllm.register()  # vLLM may call a plugin more than once
    settings = SimpleNamespace(
        parallel_config=SimpleNamespace(rank=0, data_parallel_index=0),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    config = SimpleNamespace(backend=vllm.BACKEND)
    engine = factory.WeightTransferEngineFactory.create_engine(config, settings, torch.device("cpu"), model)
    yield engine
    engine.shutdown()


def update(engine: Any, **information: Any) -> None:
    """Calls of a worker of vLLM between start and finish; without a GPU there is nothing to synchronize."""
    engine.start_weight_update()
    engine.receive_weights(engine.parse_update_info(information))
    engine.finish_weight_update()


def test_each_update_loads_the_version_that_it_names(tmp_path: Path, engine: Any, model: Model) -> None:
    trained = Model()
    kept = model.embed.weight.data_ptr()
    with relight.Publisher(tmp_path) as publisher:
        engine.init_transfer_engine(engine.parse_init_info({"place": str(tmp_path)}))
        assert publisher.wait_for_engines(1, SECONDS)
        for version in (1, 2):
            with torch.no_grad():
                trained.output.weight.add_(version)
            publisher.publish(relight.TensorSource(relight.weights_of(trained)), version=version)
            update(engine, version=version)
            assert relight.digest_weights(relight.weights_of(model)) == relight.digest_weights(
                relight.weights_of(trained)
            )
    assert model.embed.weight.data_ptr() == kept  # captured CUDA graphs refer to it


def test_a_worker_without_the_version_keeps_what_it_has(tmp_path: Path, engine: Any, model: Model) -> None:
    before = relight.digest_weights(relight.weights_of(model))
    engine.init_transfer_engine(engine.parse_init_info({"place": str(tmp_path)}))
    with pytest.raises(TransferError, match="version 5 did not come"):
        update(engine, version=5, timeout_seconds=0.1)
    assert relight.digest_weights(relight.weights_of(model)) == before


def test_vllm_refuses_information_that_the_backend_does_not_know(engine: Any) -> None:
    with pytest.raises(ValueError, match="Invalid update_info"):
        engine.parse_update_info({"versoin": 5})
