"""Settings that `relight.integrations.torchtitan` refuses. Rows of `CONFIG` are asked `applies(config)`."""

from typing import Any

from relight.integrations.trainers.refused.table import Refusal

BY = "relight.integrations.torchtitan"


def _degree(name: str) -> Any:
    return lambda config: getattr(config.parallelism, f"{name}_parallel_degree") > 1


CONFIG = (
    Refusal(
        "`parallelism.pipeline_parallel_degree`",
        "a standby would have to build a stage before it knows which",
        "write the loop as examples/pipeline/train.py does",
        _degree("pipeline"),
    ),
    Refusal(
        "`parallelism.context_parallel_degree`",
        "ranks of one context group get one batch and compute on parts of it, which relight does not know",
        "use data and tensor parallelism",
        _degree("context"),
    ),
    Refusal(
        "`parallelism.expert_parallel_degree`",
        "not supported",
        "see examples/moe/train.py for a loop of your own",
        _degree("expert"),
    ),
    Refusal(
        "`parallelism.enable_fsdp_symm_mem`",
        "symmetric memory bypasses the process groups that relight replaces",
        "leave it out",
        lambda config: config.parallelism.enable_fsdp_symm_mem,
    ),
    Refusal(
        "CUDA graphs",
        "they replay collectives of process groups that a recovery replaces",
        "set training.disable_cuda_graphs (--training.disable_cuda_graphs)",
        lambda config: not config.training.disable_cuda_graphs,
    ),
    Refusal(
        '`comm.mode` other than `"default"`',
        "relight makes the process groups",
        "leave it out",
        lambda config: config.comm.mode != "default",
    ),
    Refusal(
        "`checkpoint.async_mode`",
        "its collectives run in a thread, beside the steps that a recovery repeats",
        'set "disabled"',
        lambda config: config.checkpoint.enable and config.checkpoint.async_mode != "disabled",
    ),
    Refusal(
        "`checkpoint.create_seed_checkpoint`",
        "it trains nothing",
        "do that with torchrun",
        lambda config: config.checkpoint.create_seed_checkpoint,
    ),
    Refusal(
        "`metrics.save_for_all_ranks`",
        "rank 0 logs, each committed step once",
        "leave it out",
        lambda config: (
            config.metrics.save_for_all_ranks and (config.metrics.enable_tensorboard or config.metrics.enable_wandb)
        ),
    ),
)
CHECKPOINTS = Refusal(
    "another checkpointer than torchtitan's `CheckpointManager`",
    "it is not known here",
    "use CheckpointManager",
)
TABLE = (*CONFIG, CHECKPOINTS)
