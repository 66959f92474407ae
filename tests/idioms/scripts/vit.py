"""A vision transformer with drop path, two parameter groups (no decay for norms and biases), AdamW, cosine by LambdaLR.

Random depth draws from the global stream in forward.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training:
            return x
        mask = x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - self.p)
        return x * mask / (1 - self.p)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.drop = DropPath(0.2)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.drop(self.attn(y, y, y, need_weights=False)[0])
        return x + self.drop(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, dim=16, depth=2, classes=5):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, 5, dim) * 0.02)
        self.blocks = nn.Sequential(*[Block(dim, 2) for _ in range(depth)])
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.blocks(x)[:, 0])


job = relight.init()
torch.manual_seed(42)
TOTAL, WARMUP = 18, 4
images, labels = torch.randn(90, 3, 8, 8), torch.randint(0, 5, (90,))


def get_batch(number):
    idx = torch.randint(0, len(images), (6,))
    return images[idx], labels[idx]


model = DDP(ViT())
decay = [p for n, p in model.named_parameters() if p.ndim > 1]
no_decay = [p for n, p in model.named_parameters() if p.ndim <= 1]
opt = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95)
)
sched = torch.optim.lr_scheduler.LambdaLR(
    opt, lambda s: (s + 1) / WARMUP if s < WARMUP else 0.5 * (1 + math.cos(math.pi * (s - WARMUP) / (TOTAL - WARMUP)))
)
training = relight.Training(model=model, optimizer=opt, scheduler=sched, data=get_batch)
for step in training.steps(until=TOTAL):
    with step as (x, y):
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        step.report(loss, lr=sched.get_last_lr()[0])
finish(job, model=model, opt=opt, sched=sched)
