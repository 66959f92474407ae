"""Settings that `relight.integrations.trl` refuses beside what the Trainer of transformers does."""

from relight.integrations.trainers.refused.table import Refusal

GENERATING = Refusal(
    "a trainer other than `SFTTrainer`, `DPOTrainer`, `KTOTrainer` and `RewardTrainer`",
    "trainers that generate their data keep completions from step to step, which a replacement would not have; the "
    "others were not tried",
    "for GRPO, write the loop as examples/grpo.py does",
)
PRECOMPUTED = Refusal(
    "`precompute_ref_log_probs=True`",
    "it computes on all ranks together before training, where a replacement would be alone",
    "leave it out: the reference model is asked in each step",
)
CHANGES_A_MODEL = Refusal(
    "`BEMACallback`, `SyncRefModelCallback`",
    "they change a model of their own between steps, where relight does not see it",
    "leave them out",
)
TABLE = (GENERATING, PRECOMPUTED, CHANGES_A_MODEL)
