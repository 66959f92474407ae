"""relight as a weight transfer backend of vLLM.

Written against vLLM 0.33.0: `WeightTransferEngine` and `TrainerWeightTransferEngine` in
vllm/distributed/weight_transfer/base.py, the factories beside them, and the calls of `GPUWorker` in
vllm/v1/worker/gpu_worker.py. With relight installed, vLLM finds it by the entry point `vllm.general_plugins`:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "relight"}'

From `init` on, every worker collects what is sent in host memory, while vLLM generates. `update_weights` loads exactly
the named version in every worker, or fails in those that do not hold it before it has touched their weights; after a
failure keep vLLM paused and update again, with the version that the message names. Workers and sender must be on one
machine. Names must be those of the model's checkpoint, as they are if the trained model is Hugging Face's.

Weights come from a job that publishes (`training.publish`), and its driver asks vLLM to take a version; or from vLLM's
trainer side, in any training program:

    register()
    engine = WeightTransferTrainerFactory.trainer_init(
        RelightTrainerInitInfo(rank=rank, place="runs/mine"), client=client, source=ModuleSource(model)
    )
    engine.send_weights(version=step)  # on every rank; sends, and has vLLM load it

Not run here: vLLM itself, which needs a GPU. Tested, where vLLM is installed, on small models on the CPU: both sides,
made by vLLM's own factories; the worker's side with vLLM's layerwise reloading.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from relight.errors import TransferError, UsageError
from relight.integrations.engines.weight_cache import Pairs, WeightCache
from relight.integrations.engines.weight_stream import entry_of, send_stream
from relight.transfer.publish.publisher import Publisher

if TYPE_CHECKING:
    import torch

BACKEND = "relight"
_IN_A_JOB = "RELIGHT_PRIVATE_DIR" in os.environ  # under `relight run`, where a rank moves to another process


@dataclass
class RelightInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """`place`: the run directory of the training job, or what a `relight.Publisher` was given."""

    place: str


@dataclass
class RelightUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version to load, and the time to wait for it."""

    version: int
    timeout_seconds: float = 60.0


class RelightWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Collects published weights in each worker process of vLLM, and loads a version when asked to."""

    init_info_cls = RelightInitInfo
    update_info_cls = RelightUpdateInfo
    supports_draft_weight_update = False  # what training publishes is the target model

    def __init__(self, config: Any, vllm_config: Any, device: "torch.device", model: "torch.nn.Module") -> None:
        super().__init__(config, vllm_config, device, model)
        self._held: WeightCache | None = None
        self._loading = False  # between the beginning of a load and `finish_weight_update`

    def init_transfer_engine(self, init_info: RelightInitInfo) -> None:
        """Collect from now on what is published at `place`; called again, at another place."""
        self.shutdown()
        parallel = self.parallel_config
        self._held = WeightCache(init_info.place, name=f"vllm-{parallel.data_parallel_index}-{parallel.rank}")

    def start_weight_update(self) -> None:
        """Nothing yet: a worker that does not hold the version must still be able to serve the version that it has."""

    def receive_weights(self, update_info: RelightUpdateInfo) -> None:
        """Load the version. Raises TransferError, and no weight is changed, if this worker does not hold it."""
        if self._held is None:
            raise UsageError("init_weight_transfer_engine must be called before update_weights")
        self._held.load_into(
            self._load, version=update_info.version, device=self.device, timeout_seconds=update_info.timeout_seconds
        )

    def _load(self, pairs: Pairs) -> None:
        """As every backend does that brings weights in the checkpoint's format."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        self._loading = True
        with disable_mtp_completeness_check():
            self.model.load_weights(pairs)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._loading:
            finalize_layerwise_reload(self.model, self.model_config)
            self._loading = False

    def shutdown(self) -> None:
        """Stop collecting; the model keeps its weights."""
        held, self._held = self._held, None
        if held is not None:
            held.close()


@dataclass
class RelightTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The trainer's side: where it sends from, and to how many workers.

    `rank` (by keyword) is this process's rank; rank 0 sends. In a job of relight it is ignored: there rank 0 is the
    process that has this rank when weights are sent. `place`: a directory of this machine. `workers`: processes of vLLM
    that must be there. `timeout_seconds`: how long to wait for them.
    """

    backend: ClassVar[str] = BACKEND

    place: str
    workers: int = 1
    timeout_seconds: float = 60.0


class RelightTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Gathers the weights in each rank of a training program and sends them; rank 0 has vLLM load them.

    No rank holds more than three whole tensors at a time.
    """

    init_info_cls = RelightTrainerInitInfo

    def __init__(self, init_info: RelightTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        self._info = init_info
        self._publisher: Publisher | None = None

    @classmethod
    def trainer_init(
        cls, init_info: RelightTrainerInitInfo, *, client: Any, source: Any = None
    ) -> "RelightTrainerWeightTransferEngine":
        """Make the trainer's side of one rank; rank 0 reaches vLLM with the first `send_weights`."""
        if source is None or not source.implements_iter_full():
            raise UsageError('the backend "relight" needs a source with iter_full, such as ModuleSource(model)')
        return cls(init_info, client=client, source=source)

    def send_weights(self, version: int | None = None) -> None:
        """Send the weights, and return when vLLM has loaded them. To be called on every rank, between two writes.

        `version`: number of the weights, not less than any before; sent again after a failure, the same number.
        Default: one more than vLLM's workers have. Raises TransferError: not all workers of vLLM have it; then vLLM is
        not told to load anything.
        """
        if _IN_A_JOB:
            self.is_sender = dist.get_rank() == 0
        if not self.is_sender:
            for _ in self.source.iter_full():  # takes part in the collectives
                pass
            return
        publisher = self._publisher = self._publisher or self._open()
        if not publisher.wait_for_engines(self._info.workers, self._info.timeout_seconds):
            raise TransferError(f"{len(publisher.engines())} of {self._info.workers} workers of vLLM are connected")
        if version is None:
            version = max(engine.version for engine in publisher.engines()) + 1
        entries = [entry_of(each.name, each.dtype, each.shape) for each in self.source.metadata]
        sent = send_stream(publisher, entries, self.source.iter_full(), version=version)
        if sent.error or len(sent.engines) < self._info.workers:
            raise TransferError(f"version {version} did not reach all workers of vLLM: {sent.error or sent.dropped}")
        self.client.start_weight_update()
        self.client.update_weights({"version": version})
        self.client.finish_weight_update(weight_version=str(version))

    def _open(self) -> Publisher:
        publisher = Publisher(self._info.place, source_timeout_seconds=self._info.timeout_seconds)
        self.client.init_weight_transfer_engine({"place": self._info.place})
        return publisher

    def shutdown(self) -> None:
        """Send no more; vLLM keeps its weights."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()


def register() -> None:
    """Make the backend known, on both sides. vLLM calls this in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for factory, engine in (
        (WeightTransferEngineFactory, RelightWeightTransferEngine),
        (WeightTransferTrainerFactory, RelightTrainerWeightTransferEngine),
    ):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, __name__, engine.__name__)
