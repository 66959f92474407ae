"""vLLM's trainer side: relight's engine, made by vLLM's factory, with vLLM's source. Runs where vLLM is installed.

A client passes the orders on to workers, as a server of vLLM does. The workers collect weights as relight's engine of
the worker's side does, and load them without vLLM's layerwise reloading, which needs vLLM's compiled code.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relight
from relight.errors import TransferError, UsageError
from relight.integrations.engines.weight_cache import Pairs, WeightCache

factory = pytest.importorskip("vllm.distributed.weight_transfer.factory", exc_type=ImportError)

SECONDS = 30.0
CPU = torch.device("cpu")


def make_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))


class Worker:
    """A worker's model, and the weights that it collects."""

    def __init__(self) -> None:
        self.model = make_model()
        self.held: WeightCache | None = None

    def load(self, pairs: Pairs) -> None:
        self.model.load_state_dict(dict(pairs))

    def digest(self) -> str:
        return relight.digest_weights(relight.weights_of(self.model))

    def close(self) -> None:
        if self.held is not None:
            self.held.close()


class Client:
    """Has the four methods of vLLM's `VLLMWeightSyncClient`."""

    def __init__(self, *workers: Worker) -> None:
        self.workers = workers
        self.versions: list[str | None] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for number, worker in enumerate(self.workers):
            worker.held = WeightCache(init_info["place"], name=f"vllm-0-{number}")

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        for worker in self.workers:
            assert worker.held is not None
            worker.held.load_into(worker.load, version=update_info["version"], device=CPU, timeout_seconds=SECONDS)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.versions.append(weight_version)


Make = Callable[..., Any]


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[Make]:
    """A function that makes the trainer's side of a rank, by vLLM's factory."""
    from vllm.distributed.weight_transfer import ModuleSource, VLLMWeightSyncClient

    from relight.integrations import vllm

    vllm.register()
    vllm.register()  # vLLM may call a plugin more than once
    made: list[Any] = []

    def make(trained: nn.Module | None, client: Client, **information: Any) -> Any:
        assert isinstance(client, VLLMWeightSyncClient)
        info = vllm.RelightTrainerInitInfo(place=str(tmp_path), **{"rank": 0, **information})
        source = None if trained is None else ModuleSource(trained)
        trainer = factory.WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
        made.append((trainer, client))
        return trainer

    yield make
    for trainer, client in made:
        trainer.shutdown()
        for worker in client.workers:
            worker.close()


def test_every_worker_loads_each_version(make_trainer: Make) -> None:
    trained, workers = make_model(), [Worker(), Worker()]
    client = Client(*workers)
    trainer = make_trainer(trained, client, workers=2, timeout_seconds=SECONDS)
    for version in (None, 7, 7, None):  # 7 again: a step that was computed again
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.add_(1.0)
        trainer.send_weights(version)
        expected = relight.digest_weights(relight.weights_of(trained))
        assert [worker.digest() for worker in workers] == [expected] * 2
    assert client.versions == ["0", "7", "7", "8"]


def test_vllm_is_told_to_load_nothing_if_a_worker_is_missing(make_trainer: Make) -> None:
    worker = Worker()
    before = worker.digest()
    client = Client(worker)
    trainer = make_trainer(make_model(), client, workers=2, timeout_seconds=0.5)
    with pytest.raises(TransferError, match=r"of 2 workers of vLLM are connected"):
        trainer.send_weights()
    assert worker.digest() == before
    assert client.versions == []


def test_other_ranks_take_part_in_gathering_alone(make_trainer: Make) -> None:
    client = Client()
    make_trainer(make_model(), client, rank=1).send_weights()
    assert client.versions == []


def test_a_source_without_whole_tensors_is_refused(make_trainer: Make) -> None:
    with pytest.raises(UsageError, match="iter_full"):
        make_trainer(None, Client())
