"""A job of a framework that prints how long its steps take: wall time, and time of the process's CPU.

The same script runs under torchrun, where the framework trains by itself, and under `relight run`.
"""

import argparse
import importlib
import os
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
FIRST = 20  # step from which time is taken: before it relight learns, and caches are filled


class Clock:
    """Takes the time of each step from FIRST on."""

    def __init__(self) -> None:
        self.begun = 0.0
        self.walls = array("d")  # no list, which would be carried from step to step

    def step_begins(self, number: int) -> None:
        """Note the time."""
        if number == FIRST:
            self.begun = time.process_time()
        if number >= FIRST:
            self.walls.append(time.monotonic())

    def end(self, rank: int) -> None:
        """Print the median of the wall times, and the mean of the CPU's."""
        steps = sorted(after - before for before, after in zip(self.walls, self.walls[1:], strict=False))
        cpu = (time.process_time() - self.begun) / (len(steps) + 1)
        if rank == 0:
            print(f"median {1e3 * steps[len(steps) // 2]:.3f} ms, cpu {1e3 * cpu:.3f} ms", flush=True)


def train_transformers(options: argparse.Namespace) -> None:
    """A GPT-2 of random weights on random tokens, by `Trainer` or TRL's `SFTTrainer`."""
    from datasets import Dataset
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        PreTrainedTokenizerFast,
        TrainerCallback,
        default_data_collator,
    )

    clock = Clock()

    class Clocked(TrainerCallback):  # type: ignore[misc]
        """Tells the clock of steps."""

        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            """Begin a step."""
            clock.step_begins(state.global_step)

        def on_train_end(self, args: Any, *_: Any, **__: Any) -> None:
            """End the run."""
            clock.end(args.process_index)

    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=options.width, n_layer=4, n_head=4))
    rows = torch.randint(3, 256, (1024, 64), generator=torch.Generator().manual_seed(0)).tolist()
    settings: dict[str, Any] = {
        "output_dir": options.output, "use_cpu": True, "bf16": False, "seed": 1, "max_steps": options.steps,
        "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_strategy": "no", "save_strategy": "no",
        "report_to": [], "disable_tqdm": True,
    }  # fmt: skip
    if options.framework == "trl":
        from tokenizers import Tokenizer, models
        from trl import SFTConfig

        from relight.integrations.trl import SFTTrainer

        words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{str(number): number for number in range(3, 256)}}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
            pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        )  # fmt: skip
        data = Dataset.from_dict({"input_ids": rows})
        SFTTrainer(
            model, SFTConfig(**settings, max_length=64), train_dataset=data, processing_class=tokenizer,
            callbacks=[Clocked()],
        ).train()  # fmt: skip
        return
    from relight.integrations.transformers import Trainer, TrainingArguments

    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    Trainer(
        model=model, args=TrainingArguments(**settings), train_dataset=data, data_collator=default_data_collator,
        callbacks=[Clocked()],
    ).train()  # fmt: skip


def train_torchtitan(options: argparse.Namespace) -> None:
    """The example of torchtitan: a Llama of two layers, in two replicas."""
    sys.path.insert(0, str(EXAMPLES / "torchtitan"))
    sys.argv = [
        "train.py",
        *("--steps", str(options.steps), "--shards", "1", "--save-every", "0", "--log-every", "1000000"),
        *("--output", options.output),
    ]
    train: Any = importlib.import_module("train")
    clock, ours = Clock(), train.Trainer.train_step

    def train_step(trainer: Any, batches: Any) -> None:
        clock.step_begins(trainer.step)
        ours(trainer, batches)

    train.Trainer.train_step = train_step
    train.main()
    clock.end(int(os.environ["RANK"]))


def main() -> None:
    """Train for as many steps as asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=["transformers", "trl", "torchtitan"])
    parser.add_argument("--steps", type=int, default=170)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--output", default="runs/framework_job")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if options.framework == "torchtitan":
        train_torchtitan(options)
    else:
        train_transformers(options)


if __name__ == "__main__":
    main()
