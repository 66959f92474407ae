"""Loops with Hugging Face's accelerate that train two models against each other, chosen by name."""

import hashlib
import json
import math
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import relight
from relight.integrations.accelerate import follow_rank, update_loader

kind = sys.argv[1]
OUTPUT = sys.argv[sys.argv.index("--output") + 1]
EPOCHS = 2
torch.set_num_threads(1)


class JsonTracker(GeneralTracker):
    """A tracker as accelerate's documentation has them."""

    name = "json"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.path = Path(OUTPUT, "tracked.jsonl")

    @property
    def tracker(self):
        return self.path

    @on_main_process
    def store_init_configuration(self, values):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    @on_main_process
    def log(self, values, step=None, **kwargs):
        with self.path.open("a") as file:
            file.write(json.dumps([step, values]) + "\n")


def digest(*things):
    values = []
    for thing in things:
        state = thing.state_dict()
        values += (
            [v for each in state.get("state", {}).values() for v in each.values()]
            if "state" in state
            else state.values()
        )
    tensors = [v.detach().float().contiguous().numpy().tobytes() for v in values if isinstance(v, torch.Tensor)]
    return hashlib.sha256(b"".join(tensors)).hexdigest()[:12]


job = relight.init()
set_seed(3)
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=1,
    mixed_precision="bf16" if kind == "bf16" else "no",
    log_with=JsonTracker(),
    project_config=ProjectConfiguration(project_dir=OUTPUT, automatic_checkpoint_naming=True, total_limit=2),
    kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
)
accelerator.init_trackers("pair", config={"epochs": EPOCHS})
maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
makes = torch.optim.Adam(maker.parameters(), lr=1e-2, betas=(0.5, 0.99))
judges = torch.optim.SGD(judge.parameters(), lr=1e-2, momentum=0.9)
loader = DataLoader(
    TensorDataset(torch.randn(72, 8, generator=torch.Generator().manual_seed(0))), batch_size=4, shuffle=True
)
maker, judge, makes, judges, loader = accelerator.prepare(maker, judge, makes, judges, loader)
decays = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(judges, 0.99))
balance, won = 1.0, 0
right = nn.BCEWithLogitsLoss()

training = relight.Training(
    model={"maker": maker, "judge": judge},
    optimizer={"maker": makes, "judge": judges},
    scheduler=decays,
    data=update_loader(loader, 1),
)
for step in training.steps(until=EPOCHS * math.ceil(len(loader))):
    with step as batches:
        follow_rank()
        if kind == "saves" and step.number and step.number % 5 == 0:
            accelerator.project_configuration.iteration = step.number // 5
            accelerator.save_state()
        (real,) = batches[0]
        noise = torch.randn(len(real), 4)
        with accelerator.autocast():
            made = maker(noise)
            real_loss = right(judge(real), torch.ones(len(real), 1))
            loss = balance * real_loss + right(judge(made.detach()), torch.zeros(len(real), 1))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(judge.parameters(), 1.0)
        judges.step()
        decays.step()
        judges.zero_grad()
        with accelerator.autocast():
            fooled = right(judge(made), torch.ones(len(real), 1))
        accelerator.backward(fooled)
        makes.step()
        makes.zero_grad()
        judges.zero_grad()
        both = accelerator.gather_for_metrics(torch.stack([loss.detach(), fooled.detach()])[None]).mean(0)
        balance = 0.9 * balance + 0.1 * float(both[0] / both[1])
        won += bool(both[0] < both[1])
    if step.committed and step.number % 4 == 1:
        accelerator.log({"judge": float(both[0]), "maker": float(both[1])}, step=step.number)
follow_rank()
accelerator.end_training()
words = {"state": digest(maker, judge, makes, judges), "own": [balance, won], "rates": decays.get_last_lr()}
print(f"rank {accelerator.process_index}: {json.dumps(words)}\n", end="", flush=True)
if accelerator.is_main_process:
    files = sorted(str(path.relative_to(OUTPUT)) for path in Path(OUTPUT).rglob("*") if path.is_file())
    print(f"files: {json.dumps([files, Path(OUTPUT, 'tracked.jsonl').read_text()])}\n", end="", flush=True)
