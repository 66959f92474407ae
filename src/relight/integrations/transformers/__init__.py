"""Hugging Face's `Trainer`, surviving failures: import it from here, and start the script with `relight run`.

    from relight.integrations.transformers import Trainer  # instead of `from transformers import Trainer`

Importing this module joins the job, since `TrainingArguments` already asks for the process group. Without `relight run`
the classes are those of transformers. For another subclass of `Trainer` put `RelightMixin` before it:

    class MyTrainer(RelightMixin, OtherTrainer): ...

`relight.integrations.trl` does so for TRL's trainers.
"""

from relight.integrations.transformers.trainer import RelightMixin, Seq2SeqTrainer, Trainer, TrainingArguments

__all__ = ["RelightMixin", "Seq2SeqTrainer", "Trainer", "TrainingArguments"]
