"""relight as a weight transfer backend of vLLM.

Written against vLLM 0.33.0: `WeightTransferEngine` in vllm/distributed/weight_transfer/base.py, its factory beside it,
and the calls of `GPUWorker` in vllm/v1/worker/gpu_worker.py. With relight installed, vLLM finds it by the entry point
`vllm.general_plugins`:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "relight"}'

and the training's driver asks vLLM to take a version, by vLLM's own client:

    client = HTTPVLLMWeightSyncClient("http://localhost:8000")
    client.init_weight_transfer_engine({"place": "runs/mine"})     # once
    ...
    training.publish()                                             # or publish(every=...)
    ...                                                            # POST /pause
    client.start_weight_update()
    client.update_weights({"version": 1200})
    client.finish_weight_update(weight_version="1200")             # POST /resume

From `init` on, every worker collects what is published in host memory, while vLLM generates. `update_weights` loads
exactly the named version in every worker, or fails in those that do not hold it before it has touched their weights;
after a failure keep vLLM paused and update again, with the version that the message names. Workers and publisher must
be on one machine. Names must be those of the model's checkpoint, as they are if the trained model is Hugging Face's.

Not run here: vLLM itself, which needs a GPU. Tested, where vLLM is installed: this class, made by vLLM's own factory,
with vLLM's layerwise reloading, on a small model on the CPU.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from relight.errors import UsageError
from relight.integrations.weight_cache import Pairs, WeightCache

if TYPE_CHECKING:
    import torch

BACKEND = "relight"


@dataclass
class RelightInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """`place`: the run directory of the training job, or what a `relight.Publisher` was given."""

    place: str


@dataclass
class RelightUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which version to load, and how long to wait for it."""

    version: int
    timeout_seconds: float = 60.0


class RelightWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """In each worker process of vLLM: collects published weights, and loads a version when asked to."""

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


def register() -> None:
    """Make the backend known. vLLM calls this in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, RelightWeightTransferEngine.__name__)
