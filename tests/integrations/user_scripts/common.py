"""Parts that the scripts of this directory share: small models, data, and a digest of all that is left."""

import hashlib
import json
import sys
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, TrainerCallback

OUTPUT = sys.argv[sys.argv.index("--output") + 1]


def gpt(dropout=0.0, **more):
    torch.manual_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False, **more,
        )
    )  # fmt: skip


def bert(labels=3, dropout=0.0):
    torch.manual_seed(1)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=32, num_labels=labels, hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )  # fmt: skip


def tokens(count=92, seed=0, length=16):
    rows = torch.randint(0, 64, (count, length), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in rows]


def sentences(count=92, seed=0):
    """Rows of different lengths, with a class each."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(4, 16, (1,), generator=generator))
        ids = torch.randint(1, 64, (length,), generator=generator)
        rows.append({"input_ids": ids.tolist(), "attention_mask": [1] * length, "label": int(ids.sum()) % 3})
    return rows


def pad(features):
    longest = max(len(each["input_ids"]) for each in features)
    rows = [each["input_ids"] + [0] * (longest - len(each["input_ids"])) for each in features]
    masks = [each["attention_mask"] + [0] * (longest - len(each["attention_mask"])) for each in features]
    labels = [each["label"] for each in features]
    return {
        "input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks), "labels": torch.tensor(labels),
    }  # fmt: skip


def plain(entry):
    """An entry of a log without what a clock measured."""
    return {
        name: value
        for name, value in entry.items()
        if not name.endswith(("_runtime", "_per_second")) and name != "train_loss_time"
    }


class JsonLog(TrainerCallback):
    """Writes what is logged into a file, as reporters do."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            with open(f"{args.output_dir}/log.jsonl", "a") as file:
                file.write(json.dumps([state.global_step, plain(logs)]) + "\n")


def digest(value):
    sha = hashlib.sha256()

    def feed(each):
        if isinstance(each, torch.Tensor):
            sha.update(each.detach().float().cpu().contiguous().numpy().tobytes())
        elif isinstance(each, dict):
            for name in sorted(each, key=str):
                sha.update(str(name).encode())
                feed(each[name])
        elif isinstance(each, list | tuple):
            for one in each:
                feed(one)
        else:
            sha.update(repr(each).encode())

    feed(value)
    return sha.hexdigest()[:12]


def finish(trainer, *own):
    """Print what each rank has at the end; rank 0 also what lies in the directory."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    words = {
        "steps": trainer.state.global_step,
        "weights": digest(trainer.model.state_dict()),
        "optimizer": digest(optimizer.state_dict()["state"]),
        "rates": digest([group["lr"] for group in optimizer.param_groups]),
        "log": digest([plain(entry) for entry in trainer.state.log_history]),
        "own": digest(own),
        "epoch": trainer.state.epoch,
        "best": trainer.state.best_metric,
    }
    rank = trainer.args.process_index
    print(f"rank {rank}: {json.dumps(words)}\n", end="", flush=True)
    if rank == 0:
        files = sorted(Path(OUTPUT).rglob("*"))
        names = sorted(str(path.relative_to(OUTPUT)) for path in files if path.is_file())
        kept = {
            path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest()[:8]
            for path in files
            if path.suffix == ".safetensors"
        }
        log = Path(OUTPUT, "log.jsonl")
        written = log.read_text() if log.exists() else ""
        print(
            f"files: {json.dumps([digest(names), kept, written.count(chr(10)), digest(written)])}\n", end="", flush=True
        )
