"""Trains a byte-level GPT on the source code of Python's standard library, on any number of processes.

    relight run --nproc-per-node 4 --standby 1 examples/gpt/train.py

It is an ordinary DDP script. What makes it survive the loss of a process, as the difference to plain DDP (6 lines
changed, 2 added, and the body of the loop indented once more):

    - import torch.distributed as dist
    + import relight

    - dist.init_process_group("gloo")
    + job = relight.init()
    - device = torch.device("cpu")
    + device = job.device

    - sampler = DistributedSampler(windows, dist.get_world_size(), dist.get_rank(), seed=options.seed)
    + sampler = DistributedSampler(windows, job.world_size, job.rank, seed=options.seed)

    + training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    - for number, batch in zip(range(options.steps), endless(loader, sampler)):
    + for step in training.steps(until=options.steps):
    +     with step as batch:
              ...forward, backward, clipping, optimizer, scheduler: the same...
    -     if dist.get_rank() == 0 and (number + 1) % options.evaluate_every == 0:
    +     if job.rank == 0 and step.committed and (step.number + 1) % options.evaluate_every == 0:
              ...evaluation: the same...

Plain DDP also needs `endless`, a function that goes through the data epoch by epoch. `step.report`, which shows the
loss in the progress line, may be left out.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import relight
from model import GPT, add_model_arguments, write_on

SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "site-packages", "test", "tests"}
HELD_OUT_EVERY = 20  # one source file in so many is kept for evaluation
HELD_OUT_WINDOWS = 16
PROMPT = b"def "
SAMPLE_BYTES = 96
TEMPERATURE = 0.8


def main() -> None:
    options = parse_arguments()
    job = relight.init()
    device = job.device
    torch.manual_seed(options.seed)

    text, held_out = read_standard_library(options.megabytes)
    windows = Windows(text, options.context)
    sampler: DistributedSampler[Tensor] = DistributedSampler(windows, job.world_size, job.rank, seed=options.seed)
    loader = DataLoader(windows, batch_size=options.batch_size, sampler=sampler, drop_last=True)

    model = DDP(GPT(options).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda step: warmup_then_cosine(step, options.warmup, options.steps))
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    if options.publish_every:
        training.publish(every=options.publish_every)

    for step in training.steps(until=options.steps):
        with step as batch:
            tokens = batch.to(device)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            step.report(loss)
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        if job.rank == 0 and step.committed and (step.number + 1) % options.evaluate_every == 0:
            print(f"step {step.number + 1}: loss {evaluate(model.module, held_out):.3f} on held-out files; a sample:")
            print(sample(model.module, PROMPT, SAMPLE_BYTES), flush=True)

    if job.rank == 0 and options.publish_every:
        digest = relight.digest_weights(relight.weights_of(model))
        print(f"version {options.steps} is published; its digest is {digest}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a byte-level GPT on the source code of Python's standard library. "
        "Start it with: relight run --nproc-per-node N [--standby M] examples/gpt/train.py [arguments]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=1000, help="optimizer steps in all")
    add("--batch-size", type=int, default=4, help="sequences in each process's batch")
    add_model_arguments(parser)
    add("--learning-rate", type=float, default=2e-3, help="highest learning rate, reached after --warmup steps")
    add("--warmup", type=int, default=20, help="steps in which the learning rate rises; then a cosine leads to 0")
    add("--clip", type=float, default=1.0, help="largest norm of a gradient")
    add("--megabytes", type=float, default=4.0, help="how much text to read at most")
    add("--evaluate-every", type=int, default=50, help="steps between two evaluations, each with a sample of text")
    add("--publish-every", type=int, default=0, help="steps between two publications of the weights; 0: none")
    add("--seed", type=int, default=0, help="of the initial parameters and of the order of the data")
    return parser.parse_args()


# --- the text -----------------------------------------------------------------------------------------------------
def read_standard_library(megabytes: float) -> tuple[Tensor, Tensor]:
    """The bytes to train on and the held-out ones: source files in sorted order, the same in every process."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts))
    left = int(megabytes * 1e6)
    kept, held_out = bytearray(), bytearray()
    for index, path in enumerate(paths):
        source = path.read_bytes()[:left]
        left -= len(source)
        (held_out if index % HELD_OUT_EVERY == 0 else kept).extend(source)
    if not kept or not held_out:
        raise SystemExit(f"found no Python source files to learn from in {root}")
    return torch.frombuffer(kept, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


class Windows(Dataset[Tensor]):
    """A text cut into sequences. Each has one byte more than the context: inputs and targets overlap."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.text[start : start + self.context + 1].long()


# --- the schedule -------------------------------------------------------------------------------------------------
def warmup_then_cosine(step: int, warmup: int, steps: int) -> float:
    """The share of the highest learning rate that `step` gets."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


# --- between two steps --------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate(model: GPT, text: Tensor) -> float:
    """Mean loss on windows spread over `text`. One rank does it alone, so it must not use collectives."""
    windows = Windows(text, model.context)
    chosen = [windows[i * len(windows) // HELD_OUT_WINDOWS] for i in range(HELD_OUT_WINDOWS)]
    tokens = torch.stack(chosen).to(model.embedding.weight.device)
    model.eval()
    logits = model(tokens[:, :-1])
    model.train()
    return float(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def sample(model: GPT, prompt: bytes, length: int) -> str:
    """`prompt` and what the model writes after it; without anything a terminal would obey."""
    model.eval()
    text = prompt + write_on(model, prompt, length, TEMPERATURE, seed=0)
    model.train()
    lines = text.decode(errors="replace").split("\n")
    return "\n".join("    | " + "".join(c if c.isprintable() else " " for c in line) for line in lines)


if __name__ == "__main__":
    main()
