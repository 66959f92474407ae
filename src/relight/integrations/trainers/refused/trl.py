"""Settings that `relight.integrations.trl` refuses beside what the Trainer of transformers does."""

from relight.integrations.trainers.refused.table import Refusal

GENERATING = Refusal(
    "a trainer other than `SFTTrainer`",
    "trainers that generate their data keep completions from step to step, which a replacement would not have; the "
    "others were not tried",
    "for GRPO, write the loop as examples/grpo.py does",
)
CHANGES_A_MODEL = Refusal(
    "`BEMACallback`, `SyncRefModelCallback`",
    "they change a model of their own between steps, where relight does not see it",
    "leave them out",
)
TABLE = (GENERATING, CHANGES_A_MODEL)
