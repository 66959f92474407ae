"""A Hugging Face `Trainer` that survives failures: `relight run --nproc-per-node 2 --standby 1 train.py`.

One line differs from a script without relight: where `Trainer` is imported from. The model is a small GPT-2 with random
weights, the data random tokens, so nothing is downloaded.
"""

import argparse
import hashlib

import torch
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, default_data_collator, set_seed

from relight.integrations.transformers import Trainer, TrainingArguments


def tokens(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Make `count` sequences of 32 random tokens, int64."""
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (count, 32), generator=generator)]


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/huggingface", help="where the Trainer writes its checkpoints")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in --output")
    return parser.parse_args()


def main() -> None:
    """Train, and print a digest of the weights on each rank."""
    options = parse()
    torch.set_num_threads(1)
    set_seed(1)
    dropout = options.dropout
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    args = TrainingArguments(
        output_dir=options.output,
        use_cpu=True,
        seed=1,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=tokens(92, seed=0),
        eval_dataset=tokens(16, seed=1),
        data_collator=default_data_collator,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )
    result = trainer.train(resume_from_checkpoint=options.resume or None)
    weights = b"".join(value.detach().numpy().tobytes() for value in trainer.model.parameters())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    digest = hashlib.sha256(weights + repr(losses).encode()).hexdigest()[:16]
    print(f"rank {args.process_index}: {result.global_step} steps, digest {digest}", flush=True)


if __name__ == "__main__":
    main()
