"""nanoGPT's shape: everything at module level, a batch fetched ahead, an evaluation now and then, configuration by exec."""

import contextlib
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

eval_interval, eval_iters, gradient_accumulation_steps = 5, 2, 2
block_size, batch_size, vocab_size, n_embd = 8, 4, 24, 16
learning_rate, min_lr, warmup_iters, lr_decay_iters, max_iters = 3e-3, 3e-4, 3, 16, 18
grad_clip, decay_lr, always_save_checkpoint = 1.0, True, False
config_keys = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))]
exec("learning_rate = 2e-3\ngrad_clip = 0.5")
config = {k: globals()[k] for k in config_keys}

job = relight.init()
seed_offset = job.rank
torch.manual_seed(1337 + seed_offset)
source = torch.Generator().manual_seed(5)
corpus = {
    "train": torch.randint(vocab_size, (600,), generator=source),
    "val": torch.randint(vocab_size, (200,), generator=source),
}
best_val_loss, iter_num, running_mfu, raw_loss = 1e9, 0, -1.0, 0.0


def get_batch(split):
    data = corpus[split]
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, n_embd))
        self.head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        logits = self.head(self.mlp(self.wte(idx)))
        return logits, F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    coeff = 0.5 * (1.0 + math.cos(math.pi * (it - warmup_iters) / (lr_decay_iters - warmup_iters)))
    return min_lr + coeff * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            with ctx:
                _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean().item()
    model.train()
    return out


ctx = contextlib.nullcontext()
model = DDP(Net())
raw_model = model.module
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
training = relight.Training(model=model, optimizer=optimizer)
checkpoint = None
X, Y = get_batch("train")  # fetch the very first batch
local_iter_num = 0
for step in training.steps(until=max_iters):
    with step:
        lr = get_lr(iter_num) if decay_lr else learning_rate
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        if iter_num % eval_interval == 0:
            losses = estimate_loss()
            if losses["val"] < best_val_loss or always_save_checkpoint:
                best_val_loss = losses["val"]
                if iter_num > 0:
                    checkpoint = {"iter_num": iter_num, "best_val_loss": best_val_loss, "config": config}
        for micro_step in range(gradient_accumulation_steps):
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
            with ctx:
                logits, loss = model(X, Y)
                loss = loss / gradient_accumulation_steps
            X, Y = get_batch("train")  # the next batch, while the model computes
            loss.backward()
        if grad_clip != 0.0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        lossf = loss.item() * gradient_accumulation_steps
        if local_iter_num >= 5:
            mfu = lossf / 100
            running_mfu = mfu if running_mfu == -1.0 else 0.9 * running_mfu + 0.1 * mfu
        iter_num += 1
        local_iter_num += 1
finish(job, model=raw_model, optimizer=optimizer, best=best_val_loss, mfu=running_mfu, checkpoint=checkpoint, X=X)
