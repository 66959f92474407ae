"""torchtitan's trainer, surviving failures: `relight run --nproc-per-node 4 --standby 1 examples/torchtitan/train.py`.

One line differs from a script without relight: where `Trainer` is imported from. The model is a small Llama under HSDP,
two replicas divided among half of the ranks; the data are random tokens, so nothing is downloaded. Without a GPU it
trains on the CPU, which torchtitan does not know by itself (on_cpu.py).
"""

import argparse
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

if not torch.cuda.is_available():
    import on_cpu  # type: ignore[import-not-found]

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import CommConfig, DebugConfig
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import init_logger

from relight.integrations.torchtitan import Trainer

VOCABULARY = 2048


class RandomTokens(BaseDataLoader):  # type: ignore[misc]
    """Sequences of random tokens: a function of the number of the batch and of the place of the rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """`infinite` is what a validation asks for."""

        infinite: bool = True

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        del config
        self._place, self._places, self._shape = dp_rank, dp_world_size, (local_batch_size, seq_len + 1)
        self._next = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self._next * self._places + self._place)
            self._next += 1
            tokens = torch.randint(VOCABULARY, self._shape, generator=generator)
            positions = torch.arange(self._shape[1] - 1).expand(self._shape[0], -1).contiguous()
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self) -> dict[str, int]:
        """Return how many batches were given."""
        return {f"next of {self._place}": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after as many."""
        self._next = state[f"next of {self._place}"]


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    """The data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """Nothing to configure."""

    def __init__(self, config: Config, **_: Any) -> None:
        del config
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        """Return nothing."""
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        """Return nothing."""
        return ""

    def get_vocab_size(self) -> int:
        """Return the number of tokens."""
        return VOCABULARY


def configure(options: argparse.Namespace) -> Trainer.Config:
    """Configure the trainer as a function of a torchtitan registry does."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[: options.layers]
    if not torch.cuda.is_available():  # FlexAttention has no backward pass there
        for _, _, parent, key in list(spec.model.traverse(FlexAttention.Config)):
            setattr(parent, str(key), ScaledDotProductAttention.Config())
    return Trainer.Config(
        model_spec=spec,
        dump_folder=options.output,
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        tokenizer=NoTokenizer.Config(),
        dataloader=RandomTokens.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=options.batch,
            global_batch_size=options.batch * options.replicas * options.shards * options.accumulate,
            seq_len=options.tokens,
            steps=options.steps,
            mixed_precision_param=options.compute,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=options.replicas,
            data_parallel_shard_degree=options.shards,
            tensor_parallel_degree=options.tensor,
            spmd_backend=options.backend,
        ),
        checkpoint=CheckpointManager.Config(
            enable=options.save_every > 0, interval=max(1, options.save_every), last_save_model_only=False
        ),
        validator=Validator.Config(enable=options.validate, freq=4, steps=2, dataloader=RandomTokens.Config()),
        metrics=MetricsProcessor.Config(log_freq=options.log_every, disable_color_printing=True),
        comm=CommConfig(trace_buf_size=0),
        debug=DebugConfig(seed=1, enable_structured_logging=False),
    )


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/torchtitan", help="where torchtitan writes checkpoints and logs")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2, help="ranks among which a replica is divided")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that compute on one batch together")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a rank")
    parser.add_argument("--tokens", type=int, default=64, help="of a sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=4, help="steps; 0: never")
    parser.add_argument("--log-every", type=int, default=2, help="steps")
    parser.add_argument("--validate", action="store_true", help="every four steps")
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--compute", default="bfloat16" if on_gpu else "float32", help="type of forward and backward")
    parser.add_argument("--backend", default="spmd_types", help="torchtitan's parallelism.spmd_backend")
    return parser.parse_args()


def main() -> None:
    """Train, and print a digest of the weights on each rank."""
    torch.set_num_threads(1)
    init_logger()
    trainer = configure(parse()).build()
    if not torch.cuda.is_available():
        on_cpu.prepare(trainer)
    trainer.train()
    sha = hashlib.sha256()
    for value in trainer.model_parts[0].state_dict().values():
        part = value.to_local() if hasattr(value, "to_local") else value
        sha.update(part.detach().cpu().float().numpy().tobytes())
    rank = torch.distributed.get_rank()
    trainer.close()
    print(f"rank {rank}: {trainer.step} steps, digest {sha.hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
