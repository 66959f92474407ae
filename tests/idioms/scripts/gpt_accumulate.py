"""A GPT with gradient accumulation under no_sync, float16 scaler with overflows, an exponential average, tied weights.

The scaler skips steps after overflows: such a step writes nothing but passes all the same.
"""

import contextlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import relight
from tests.idioms.digest import finish

VOCAB, CONTEXT, DIM = 32, 12, 16


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(DIM, 3 * DIM)
        self.c_proj = nn.Linear(DIM, DIM)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, 2, c // 2).transpose(1, 2) for part in self.c_attn(x).split(DIM, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(CONTEXT, DIM)
        self.attn, self.ln_1, self.ln_2 = CausalSelfAttention(), nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * DIM, DIM))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


def main():
    job = relight.init()
    torch.manual_seed(1337)
    text = torch.randint(0, VOCAB, (4000,))

    def get_batch(_):
        starts = torch.randint(0, len(text) - CONTEXT - 1, (4,))
        rows = torch.stack([text[s : s + CONTEXT + 1] for s in starts])
        return rows[:, :-1], rows[:, 1:]

    model = DDP(GPT())
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=4)
    micro = 3
    training = relight.Training(
        model=model, optimizer=optimizer, scaler=scaler, ema=ema, data=get_batch, accumulate=micro
    )
    for step in training.steps(until=16):
        with step as batches:
            for i, (x, y) in enumerate(batches):
                context = model.no_sync() if i < micro - 1 else contextlib.nullcontext()
                with context, torch.autocast("cpu", dtype=torch.float16):
                    loss = model(x, y) / micro
                    scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            ema.update_parameters(model.module)
    finish(job, model=model, optimizer=optimizer, scaler=scaler, ema=ema)


main()
