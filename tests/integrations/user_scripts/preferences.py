"""Scripts with trainers of TRL that learn from preferences, and with PEFT's AdaLoRA, chosen by name."""

import copy
import sys

import torch
from common import OUTPUT, JsonLog, finish, gpt, tokens
from datasets import Dataset
from peft import AdaLoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
    default_data_collator,
    set_seed,
)
from trl import DPOConfig, KTOConfig, RewardConfig

from relight.integrations.transformers import Trainer, TrainingArguments
from relight.integrations.trl import DPOTrainer, KTOTrainer, RewardTrainer

torch.set_num_threads(1)
set_seed(1)
GIVEN = {
    "output_dir": OUTPUT, "use_cpu": True, "bf16": False, "seed": 1, "max_steps": 11, "learning_rate": 1e-3,
    "per_device_train_batch_size": 2, "logging_steps": 2, "save_strategy": "no", "report_to": "none",
    "disable_tqdm": True,
}  # fmt: skip


def tokenizer():
    words = Tokenizer(WordLevel({str(number): number for number in range(64)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", bos_token="1")


def rows(*columns, count=60):
    """Texts of several lengths in each column."""
    numbers = torch.randint(2, 64, (count, len(columns), 8), generator=torch.Generator().manual_seed(3)).tolist()
    return Dataset.from_list(
        [
            {name: " ".join(map(str, row[: 4 + number % 4])) for name, row in zip(columns, each, strict=True)}
            for number, each in enumerate(numbers)
        ]
    )


def train(cls, model, args, data, **more):
    made = cls(
        model=model, args=args, train_dataset=data, eval_dataset=data.select(range(6)), processing_class=tokenizer(),
        callbacks=[JsonLog()], **more,
    )  # fmt: skip
    made.train()
    finish(made)


def dpo(**more):
    args = DPOConfig(**GIVEN, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=4, **more)
    model = gpt(0.1)
    train(DPOTrainer, model, args, rows("prompt", "chosen", "rejected"), ref_model=copy.deepcopy(model))


def precomputed():
    dpo(precompute_ref_log_probs=True)


def kto():
    data = rows("prompt", "completion")
    data = data.add_column("label", [number % 3 > 0 for number in range(len(data))])
    model = gpt(0.1)
    train(KTOTrainer, model, KTOConfig(**GIVEN), data, ref_model=copy.deepcopy(model))


def reward():
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, num_labels=1, pad_token_id=0)
    args = RewardConfig(**GIVEN, eval_strategy="steps", eval_steps=4)
    train(RewardTrainer, GPT2ForSequenceClassification(config), args, rows("chosen", "rejected"))


def adalora():
    """PEFT's allocator holds averages of how much each rank matters, and the callback has it take some away."""

    class Callback(TrainerCallback):
        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            model.base_model.update_and_allocate(state.global_step)

    config = AdaLoraConfig(
        init_r=6, target_r=2, tinit=2, tfinal=3, deltaT=2, total_step=11, target_modules=["c_attn"],
        task_type="CAUSAL_LM", fan_in_fan_out=True,
    )  # fmt: skip
    made = Trainer(
        model=get_peft_model(gpt(0.1), config), args=TrainingArguments(**{**GIVEN, "learning_rate": 1e-2}),
        train_dataset=tokens(), data_collator=default_data_collator, callbacks=[JsonLog(), Callback()],
    )  # fmt: skip
    made.train()
    finish(made, made.model.peft_config["default"].rank_pattern)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
