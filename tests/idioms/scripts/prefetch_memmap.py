"""A language model whose next batch is read while this one is computed: X and Y are carried from step to step."""

# ranks: 2
import math
import os
import tempfile

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

batch_size, block_size, vocab = 4, 12, 31
learning_rate, min_lr, warmup_iters, lr_decay_iters = 3e-2, 3e-3, 4, 16
grad_clip = 1.0

job = relight.init()
seed_offset = job.rank
torch.manual_seed(1337 + seed_offset)
path = os.path.join(tempfile.mkdtemp(), "train.bin")
np.random.RandomState(3).randint(0, vocab, 3000).astype(np.uint16).tofile(path)


def get_batch():
    data = np.memmap(path, dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab, 16)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx, targets):
        x, _ = self.rnn(self.wte(idx))
        return F.cross_entropy(self.head(x).view(-1, vocab), targets.view(-1))


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = DDP(Model())
decay = [p for p in model.parameters() if p.dim() >= 2]
nodecay = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}], lr=learning_rate
)
training = relight.Training(model=model, optimizer=optimizer)
X, Y = get_batch()
running_mfu, best_val_loss, iter_num = -1.0, 1e9, 0
for step in training.steps(until=15):
    with step:
        lr = get_lr(iter_num)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        for micro_step in range(2):
            model.require_backward_grad_sync = micro_step == 1
            loss = model(X, Y) / 2
            X, Y = get_batch()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running_mfu = loss.item() if running_mfu == -1.0 else 0.9 * running_mfu + 0.1 * loss.item()
        iter_num += 1
finish(job, model=model, optimizer=optimizer, X=X, Y=Y, running_mfu=running_mfu, iter_num=iter_num)
