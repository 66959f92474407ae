"""TRL's `SFTTrainer`, surviving failures: `relight run --nproc-per-node 2 --standby 1 train.py`.

One line differs from a script without relight: where the trainer is imported from. Model and tokenizer are made here,
so nothing is downloaded: the model learns to count.
"""

import argparse
import hashlib
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig

from relight.integrations.trl import SFTTrainer

NUMBERS = 50


def make_tokenizer() -> Any:
    """Make a tokenizer whose words are numbers."""
    words = ["<pad>", "<eos>", *map(str, range(NUMBERS))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def count(start: int, length: int) -> str:
    """Write `length` numbers."""
    return " ".join(str((start + number) % NUMBERS) for number in range(length))


def sentences(rows: int, first: int) -> Dataset:
    """Make texts of several lengths."""
    return Dataset.from_list([{"text": count(first + row, 6 + row % 5)} for row in range(rows)])


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="runs/trl", help="where the trainer writes its checkpoints")
    parser.add_argument("--dropout", type=float, default=0.1)
    return parser.parse_args()


def main() -> None:
    """Train, and print a digest of weights and logs on each rank."""
    options = parse()
    torch.set_num_threads(1)
    set_seed(1)
    dropout = options.dropout
    tokenizer = make_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    settings: dict[str, Any] = {
        "output_dir": options.output,
        "use_cpu": True,
        "bf16": False,
        "seed": 1,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_steps": 4,
        "report_to": [],
        "disable_tqdm": True,
    }
    data = {"train_dataset": sentences(92, 0), "eval_dataset": sentences(16, 7)}
    trainer = SFTTrainer(model, SFTConfig(**settings), processing_class=tokenizer, **data)
    result = trainer.train()
    weights = b"".join(value.detach().numpy().tobytes() for value in trainer.model.parameters())
    measured = ("_runtime", "_per_second", "total_flos")
    logs = [{k: v for k, v in entry.items() if not k.endswith(measured)} for entry in trainer.state.log_history]
    digest = hashlib.sha256(weights + repr(logs).encode()).hexdigest()[:16]
    print(f"rank {trainer.args.process_index}: {result.global_step} steps, digest {digest}", flush=True)
    if trainer.args.process_index == 0:
        print(f"logged: {logs}", flush=True)


if __name__ == "__main__":
    main()
