"""Loops with Hugging Face's accelerate in the shape of its examples, chosen by name."""

import hashlib
import json
import math
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader
from transformers import get_scheduler

import relight
from relight.integrations.accelerate import follow_rank, update_loader

kind = sys.argv[1]
OUTPUT = sys.argv[sys.argv.index("--output") + 1]
ACCUMULATE = 2
EPOCHS = 2
torch.set_num_threads(1)


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, generator=generator), int(torch.randint(0, 3, (), generator=generator))) for _ in range(count)
    ]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x):
        return self.net(x)


def evaluate(accelerator, model, loader):
    model.eval()
    right, count, order = 0, 0, []
    for x, y in loader:
        order += y.tolist()
        with torch.no_grad():
            found = model(x).argmax(-1)
        found, y = accelerator.gather_for_metrics((found, y))
        right, count = right + int((found == y).sum()), count + len(y)
    model.train()
    return [right, count, order]


def finish(accelerator, model, optimizer, *own):
    values = [*accelerator.unwrap_model(model).state_dict().values()]
    values += [
        v for state in optimizer.state_dict()["state"].values() for v in state.values() if isinstance(v, torch.Tensor)
    ]
    digest = hashlib.sha256(b"".join(v.detach().float().numpy().tobytes() for v in values)).hexdigest()[:12]
    accelerator.end_training()  # which destroys the process group
    print(f"rank {accelerator.process_index}: {json.dumps({'state': digest, 'own': list(own)})}\n", end="", flush=True)


job = relight.init()
set_seed(3)
accelerator = Accelerator(
    cpu=True, gradient_accumulation_steps=ACCUMULATE, mixed_precision="bf16" if kind == "bf16" else "no"
)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
train_loader = DataLoader(rows(70 if kind == "accumulates" else 90, 0), batch_size=4, shuffle=True)
eval_loader = DataLoader(rows(22, 1), batch_size=4, shuffle=True)
model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
updates = math.ceil(len(train_loader) / ACCUMULATE)
scheduler = accelerator.prepare(
    get_scheduler("cosine", optimizer, num_warmup_steps=4, num_training_steps=EPOCHS * updates * job.world_size)
)
total, found = 0.0, []

if kind == "prepared":
    # The prepared loader as it is, with accumulate(): a step of relight is a micro-batch.
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=train_loader)
    for step in training.steps(until=EPOCHS * len(train_loader)):
        with step as batch:
            follow_rank()
            with accelerator.accumulate(model):
                x, y = batch
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += float(loss)
    found.append(evaluate(accelerator, model, eval_loader))
elif kind == "accumulates":
    # As in accelerate's examples: it counts micro-batches, of which an epoch's last step has one.
    assert len(train_loader) % ACCUMULATE
    training = relight.Training(
        model=model, optimizer=optimizer, scheduler=scheduler, data=update_loader(train_loader, ACCUMULATE)
    )
    for step in training.steps(until=EPOCHS * updates):
        with step as batches:
            follow_rank()
            if step.number and step.number % 5 == 0:
                found.append(evaluate(accelerator, model, eval_loader))
            for x, y in batches:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    total += float(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
else:
    training = relight.Training(
        model=model, optimizer=optimizer, scheduler=scheduler, data=update_loader(train_loader, ACCUMULATE)
    )
    for step in training.steps(until=EPOCHS * updates):
        with step as batches:
            follow_rank()
            if step.number and step.number % 5 == 0:
                found.append(evaluate(accelerator, model, eval_loader))
                if kind == "saves":
                    accelerator.save_state(os.path.join(OUTPUT, f"step_{step.number}"))
            for number, (x, y) in enumerate(batches):
                accelerator.gradient_state._set_sync_gradients(number == len(batches) - 1)
                with accelerator.autocast():
                    loss = nn.functional.cross_entropy(model(x), y)
                if number == len(batches) - 1:
                    accelerator.backward(loss)
                else:
                    with accelerator.no_sync(model):
                        accelerator.backward(loss)
                total += float(accelerator.reduce(loss.detach(), "mean"))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
finish(accelerator, model, optimizer, round(total, 9), found, scheduler.get_last_lr())
